"""Runs one sample through prefill and decode workers and resumes it after a worker loss.

    QUEUED --Prefill.Run--> OFFERED --Decode.Run(ticket)--> FETCHING --> DECODING --> DONE
       ^                       |                                |            |
       +----- lost call -------+---- ticket dropped  -----------+------------+

A stream that loses its decode worker continues on another worker from the prompt and the emitted tokens. Sampling
depends only on seed and position, so the output is the same. `sample_states.DUTIES` lists the clean-up for each exit.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Never

from kvferry.core.clock import Clock
from kvferry.core.errors import (
    ENDS_OUTPUT,
    DeadlinePassed,
    InvalidRequest,
    KvferryError,
    Overloaded,
    RequestCancelled,
    RequestRefused,
    TicketRejected,
    Unavailable,
)
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.sampling import FinishReason
from kvferry.core.traces.spans import current_span
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.decide.config import DispatchConfig
from kvferry.gateway.decide.flow.capacity import UNBOUNDED
from kvferry.gateway.decide.lifecycle.retry_decision import RetryDecision, retry_decision
from kvferry.gateway.decide.lifecycle.sample_run import NO_TRACE, NoTrace, SampleRun, SampleTrace
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE, SampleEvent, State
from kvferry.gateway.decide.routing.routes import Route
from kvferry.gateway.dispatch.ending import Ending
from kvferry.gateway.dispatch.journal import Journal
from kvferry.gateway.dispatch.kv_hints import KvPrefetches, Turns
from kvferry.gateway.dispatch.lost_call import WorkerLost
from kvferry.gateway.dispatch.releases import Releases, Sleep
from kvferry.gateway.dispatch.route_selection import RETRY_AFTER_SECONDS
from kvferry.gateway.dispatch.routing_parts import Routing
from kvferry.gateway.dispatch.search_steps import SearchSteps
from kvferry.gateway.dispatch.step_turns import StepTurns
from kvferry.gateway.dispatch.worker_calls import WorkerCalls
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent, Vector

_MAX_TICKET_LOSSES = 2
"""Number of decode workers lost with the same ticket after which the ticket is dropped and the prompt recomputed,
since the ticket may be the cause."""


class Dispatcher:
    """Implements `TokenSource`, `SearchSource` and `VectorSource` on a fleet of workers."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        config: DispatchConfig,
        *,
        routing: Routing,
        gate: FlowGate | None = None,
        step_slots: Callable[[], int] = lambda: UNBOUNDED,
        sleep: Sleep = asyncio.sleep,
        on_end: Callable[[SampleRun], None] | None = None,
    ) -> None:
        """
        Args:
            fleet: the workers; the caller starts and stops the fleet.
            clock: for deadlines and timings; the time base of `Request.arrived` and `Request.deadline`.
            config: routing, retries and limits.
            routing: chooses the workers, and counts what is dispatched to them.
            gate: gate in which samples wait while the pool has no workers. If it is `None`, a sample waits while a lost
                worker may recover, and fails otherwise.
            step_slots: function that returns how many steps of beam searches may run on the workers at a time.
            sleep: called to wait between attempts.
            on_end: called with each sample that has ended.
        """
        self._fleet = fleet
        self._clock = clock
        self._retry = config.retry
        self._max_streams = config.max_streams
        self._instruments = routing.instruments
        self._gate = gate
        self._sleep = sleep
        self._on_end = on_end
        self.journal = Journal()
        self._releases = Releases(fleet, self._instruments, self._retry.release_timeout_seconds, sleep)
        self._ending = Ending(self._releases, clock, self._instruments)
        self._records, self._routes = routing.records, routing.routes
        self.turns = Turns(fleet, routing.namers)
        self._calls = WorkerCalls(
            fleet,
            clock,
            self.turns,
            KvPrefetches(fleet, config.routing.kv_prefetch_tokens),
            self._releases,
            self._ending,
            self._records,
            self._instruments,
        )
        self._step_turns = StepTurns(step_slots)
        self._runs: dict[int, SampleRun] = {}
        """The samples and searches that have not ended, by identity."""
        self.open_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Generate one sample's tokens; see `serving.token_source.TokenSource.stream`."""
        run = SampleRun(request, emitted=list(request.prior_ids), trace=self._trace(request))
        with self._open(run):
            async with aclosing(self._serve(run)) as events:
                async for event in events:
                    yield event

    @contextmanager
    def search(self, request: Request, width: int) -> Iterator[SearchSteps]:
        """Open a beam search; see `serving.token_source.SearchSource.search`."""
        run = SampleRun(request, trace=self._trace(request, "beam_search"), num_beams=width)
        with self._open(run):
            yield SearchSteps(run, self._serve_step, self._lifetime)
            self._ending.end(run, SampleEvent.FINISH)

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        """Compute the vector of a prompt; see `serving.token_source.VectorSource.pool`. If the worker of a call is
        lost, the call is repeated on another worker."""
        run = SampleRun(request, pooling=params, trace=self._trace(request))
        with self._open(run):
            while True:
                try:
                    route = self._route(run)
                    return await self._calls.pool(run, params, route.decode, self._remaining(run))
                except WorkerLost as lost:
                    await self._recover(run, lost)

    @property
    def runs(self) -> Collection[SampleRun]:
        """The samples and searches that have not ended, without the steps of searches."""
        return self._runs.values()

    def _trace(self, request: Request, name: str = "sample") -> NoTrace:
        span = current_span()
        if span is None:
            return NO_TRACE
        return SampleTrace(span, name, request.sample_index, self._clock.monotonic())

    def _route(self, run: SampleRun) -> Route:
        begun = self._clock.monotonic()
        route = self._routes.select(run, self._ending.drop_ticket)
        run.trace.routed(begun, route)
        return route

    @contextmanager
    def _open(self, run: SampleRun) -> Iterator[None]:
        """Count a sample, or each beam of a search, as open during the `with` block, and end it at the end of the
        block."""
        if self.open_streams >= self._max_streams:
            raise Overloaded(
                f"{self.open_streams} streams are open, and max_streams is {self._max_streams}; retry later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        num_streams = max(1, run.num_beams)
        self.open_streams += num_streams
        self._runs[id(run)] = run
        self._no_streams.clear()
        self._instruments.streams_open.inc(num_streams)
        self._instruments.prompt_tokens.inc(len(run.request.token_ids))
        try:
            with self._lifetime(run):
                yield
        finally:
            del self._runs[id(run)]
            self.journal.add(run)
            if self._on_end is not None:
                self._on_end(run)
            counts = {
                "gen_ai.usage.input_tokens": len(run.request.token_ids),
                "gen_ai.usage.output_tokens": run.num_output,
                "kvferry.cached_tokens": run.num_cached_tokens,
                "kvferry.resumed": run.timing.resumed,
            }
            run.trace.end(run.state.value, run.last_error, counts)
            self._instruments.streams_open.dec(num_streams)
            self.open_streams -= num_streams
            if self.open_streams == 0:
                self._no_streams.set()

    @contextmanager
    def _lifetime(self, run: SampleRun) -> Iterator[None]:
        """End the sample on exit from the `with` block."""
        try:
            yield
        except KvferryError:
            self._ending.end(run, SampleEvent.FAIL)
            raise
        finally:
            self._ending.end(run, SampleEvent.CANCEL)
            self._records.arrived(run)

    async def wait_idle(self) -> None:
        """Return when no streams are open and no clean-up is in flight."""
        while self.open_streams or self._releases.count:
            await self._no_streams.wait()
            await self._releases.drain()

    async def _serve(self, run: SampleRun) -> AsyncGenerator[TokenEvent, None]:
        last_event_at = self._clock.monotonic()
        row = self._instruments.ledger.row(*run.account)
        while run.state not in MACHINE.final:
            try:
                if run.is_complete:
                    yield self._complete(run)
                    return
                route = self._route(run)
                remaining = self._remaining(run)
                steps = (
                    self._calls.decode(run, route.decode, remaining)
                    if route.prefill is None
                    else self._calls.prefill(run, route, route.prefill, remaining)
                )
                async with aclosing(steps) as events:
                    async for event in events:
                        now = self._clock.monotonic()
                        is_first = len(run.emitted) == len(event.tokens)
                        if not is_first:
                            self._instruments.token_gap_seconds.observe(now - last_event_at)
                        if event.tokens and not run.is_step:
                            first_seconds = run.timing.first_token_seconds if is_first else None
                            self._instruments.tokens_arrived(len(event.tokens), first_seconds)
                            row.output_tokens += len(event.tokens)
                        last_event_at = now
                        yield event
            except WorkerLost as lost:
                await self._recover(run, lost)

    async def _serve_step(self, run: SampleRun) -> AsyncGenerator[TokenEvent, None]:
        try:
            async with asyncio.timeout(self._remaining(run)):
                await self._step_turns.take(run.request.caller.priority)
        except TimeoutError:
            raise self._deadline_passed(run) from None
        try:
            async with aclosing(self._serve(run)) as events:
                async for event in events:
                    yield event
        finally:
            self._step_turns.give()

    # -- failures --------------------------------------------------------------------------------------------------

    async def _recover(self, run: SampleRun, lost: WorkerLost) -> None:
        """Wait until the next attempt may start.

        Raises:
            KvferryError: there is none; see `_take_loss` and `_first_worker`.
        """
        if lost.address is None and not run.failures and not run.emitted:
            await self._first_worker(run, lost.error)
        else:
            self._take_loss(run, lost)
            await self._pause(run)

    def _take_loss(self, run: SampleRun, lost: WorkerLost) -> None:
        """Set the sample to a state from which the next attempt can start.

        Raises:
            KvferryError: the error is final, or the retries are exhausted.
        """
        error, address = lost.error, lost.address
        run.trace.lost(error, address, len(run.emitted))
        if run.state in (State.PREFILLING, State.FETCHING, State.DECODING):
            run.on(SampleEvent.LOSE)
        if isinstance(error, TicketRejected):
            self._instruments.ticket_rejected(error)
        decision = retry_decision(error)
        if decision is RetryDecision.FATAL:
            self._refuse(run, error)
        run.failed(
            error, None if decision is RetryDecision.DROP_TICKET else address, in_failed_step=lost.in_failed_step
        )
        if decision is RetryDecision.SUSPECT and address is not None:
            self._fleet.suspect(address, error.message)
            if run.ticket is not None:
                run.ticket = replace(run.ticket, losses=run.ticket.losses + 1)
        if run.ticket is not None and (
            decision is RetryDecision.DROP_TICKET or run.ticket.losses >= _MAX_TICKET_LOSSES
        ):
            self._ending.drop_ticket(run, "decode_failed")
        if run.failed_steps >= self._retry.max_failed_steps:
            raise RequestRefused(
                f"{run.failed_steps} workers failed in a row while processing this request (the last one, {address}: "
                f"{error.message}); the request is not retried, since it may be the cause"
            ) from error
        if run.failures > self._retry.max_failures:
            self._refuse(run, error)
        self._instruments.retries.labels(error.reason).inc()

    def _refuse(self, run: SampleRun, error: KvferryError) -> Never:
        if isinstance(error, DeadlinePassed):
            raise self._deadline_passed(run) from error
        was_valid = isinstance(error, InvalidRequest) and error.reason not in ENDS_OUTPUT and run.emitted
        if isinstance(error, RequestCancelled) or was_valid:
            # The client did not cancel, and its request was valid when it began.
            raise Unavailable(f"no worker could finish the stream: {error.message}") from error
        raise error

    async def _first_worker(self, run: SampleRun, error: KvferryError) -> None:
        """Wait until a route for a new sample exists; a recovered worker is detected with some delay.

        Raises:
            KvferryError: `error`, or a deadline error, if no route exists in time.
        """
        if self._gate is not None:
            if not await self._gate.wait_for_worker(lambda: self._routes.exists(run), self._remaining(run)):
                self._remaining(run)
                self._refuse(run, self._gate.gave_up())
        elif not self._fleet.may_recover():
            self._refuse(run, error)
        else:
            try:
                async with asyncio.timeout(min(self._retry.first_worker_seconds, self._remaining(run))):
                    await self._fleet.wait_until(lambda _: self._routes.exists(run))
            except TimeoutError:
                self._refuse(run, error)
        run.failed(error, None)

    async def _pause(self, run: SampleRun) -> None:
        seconds = run.backoff_seconds(self._retry, elsewhere=self._routes.exists_elsewhere(run))
        if seconds > 0:
            await self._sleep(min(seconds, self._remaining(run)))

    def _remaining(self, run: SampleRun) -> float:
        """Return the time until the sample's deadline in seconds, greater than 0.

        Raises:
            DeadlinePassed: the deadline has passed.
        """
        limit = run.request.caller.arrived + self._retry.request_timeout_seconds
        deadline = limit if run.request.caller.deadline is None else min(limit, run.request.caller.deadline)
        remaining = deadline - self._clock.monotonic()
        if remaining <= 0:
            raise self._deadline_passed(run)
        return remaining

    def _deadline_passed(self, run: SampleRun) -> DeadlinePassed:
        if run.pooling is not None:
            return DeadlinePassed("the deadline passed before the vector was computed")
        return DeadlinePassed(
            f"the deadline passed after {len(run.emitted)} of {run.request.sampling.max_tokens} tokens"
        )

    def _complete(self, run: SampleRun) -> TokenEvent:
        self._ending.drop_ticket(run, "finished")
        self._ending.end(run, SampleEvent.FINISH)
        return run.emit((), FinishReason.LENGTH, self._clock.monotonic())
