"""Runs one sample through prefill and decode workers: first token at once, then the rest, whoever dies meanwhile.

    QUEUED --Prefill.Run--> OFFERED --Decode.Run(ticket)--> FETCHING --> DECODING --> DONE
       ^                       |                                |            |
       +----- lost call -------+---- ticket given up -----------+------------+

A stream that loses its decode worker goes on at another from the prompt and the tokens emitted so far; since
sampling depends on seed and position alone, the client cannot tell. `release.DUTIES` says what each exit owes.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Never

import grpc

from kvferry.core.clock import Clock
from kvferry.core.errors import DeadlinePassed, InvalidRequest, KvferryError, Overloaded, RequestCancelled, Unavailable
from kvferry.core.sampling import FinishReason
from kvferry.gateway import calls
from kvferry.gateway.config import DispatchConfig
from kvferry.gateway.fleet import Fleet
from kvferry.gateway.head_starts import HeadStarts
from kvferry.gateway.instruments import Instruments
from kvferry.gateway.journal import Journal
from kvferry.gateway.loss import Lost, raise_if_lost
from kvferry.gateway.release import DUTIES, MACHINE, Duty, Event, State
from kvferry.gateway.releases import Releases, Sleep
from kvferry.gateway.route_notes import route_notes
from kvferry.gateway.routing import Candidates, Pick, Route, RouteReason, choose, prefix_key, readers
from kvferry.gateway.trip import Ticket, Trip, Verdict, judge
from kvferry.gateway.turns import Turns
from kvferry.gateway.waiting_room import WaitingRoom
from kvferry.rpc import wire
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.text import Usage
from kvferry.rpc.token_source import TokenEvent, TokenRequest
from kvferry.v1 import decode_pb2

_RETRY_AFTER_SECONDS = 1.0
_MAX_ROUTES = 16
_MAX_TICKET_LOSSES = 2
"""Decode workers lost with a ticket in hand before its blocks are computed anew; it might be to blame."""


class Dispatcher:
    """The gateway's token source."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        config: DispatchConfig,
        *,
        instruments: Instruments | None = None,
        room: WaitingRoom | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """
        Args:
            fleet: the workers; started and stopped by its owner.
            clock: for deadlines and timings; requests' `arrived` and `deadline` are readings of it.
            config: routing, retries and bounds.
            instruments: `None`: counted for nobody.
            room: where samples wait for a pool's first worker; `None`: they wait only for one that may be back soon.
            sleep: waits between attempts.
        """
        self._fleet = fleet
        self._clock = clock
        self._routing = config.routing
        self._retry = config.retry
        self._max_streams = config.max_streams
        self._instruments = instruments or Instruments()
        self._room = room
        self._sleep = sleep
        self._releases = Releases(fleet, self._instruments, self._retry.release_timeout_seconds, sleep)
        self.journal = Journal()
        self._turns = Turns(fleet, config.routing.block_tokens)
        self._head_starts = HeadStarts(fleet, config.routing.head_start_tokens)
        self.open_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `rpc.token_source.TokenSource.stream`."""
        if self.open_streams >= self._max_streams:
            raise Overloaded(
                f"{self.open_streams} streams are open and this gateway takes {self._max_streams}",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        trip = Trip(request)
        self.open_streams += 1
        self._no_streams.clear()
        self._instruments.streams_open.inc()
        try:
            async with aclosing(self._travel(trip)) as events:
                async for event in events:
                    yield event
        except KvferryError:
            self._end(trip, Event.FAIL)
            raise
        finally:
            self._end(trip, Event.CANCEL)
            self.journal.add(trip)
            self._instruments.streams_open.dec()
            self.open_streams -= 1
            if self.open_streams == 0:
                self._no_streams.set()

    async def wait_idle(self) -> None:
        """Return when no stream is open and nothing is owed for one that ended."""
        while self.open_streams or self._releases.count:
            await self._no_streams.wait()
            await self._releases.drain()

    async def _travel(self, trip: Trip) -> AsyncGenerator[TokenEvent, None]:
        last_event_at = self._clock.monotonic()
        while trip.state not in MACHINE.final:
            try:
                if trip.is_complete:
                    yield self._complete(trip)
                    return
                route = self._route(trip)
                steps = (
                    self._decode(trip, route.decode)
                    if route.prefill is None
                    else self._prefill(trip, route, route.prefill)
                )
                async with aclosing(steps) as events:
                    async for event in events:
                        now = self._clock.monotonic()
                        if len(trip.emitted) > len(event.tokens):
                            self._instruments.token_gap_seconds.observe(now - last_event_at)
                        last_event_at = now
                        yield event
            except Lost as lost:
                if lost.address is None and not trip.failures and not trip.emitted:
                    await self._first_worker(trip, lost.error)
                else:
                    self._take_loss(trip, lost)
                    await self._pause(trip)

    # -- the two calls ---------------------------------------------------------------------------------------------

    async def _prefill(self, trip: Trip, route: Route, pick: Pick) -> AsyncGenerator[TokenEvent, None]:
        """Compute the prompt at `pick`; ends in OFFERED, QUEUED (it kept nothing) or DONE."""
        asked = trip.request
        address = pick.replica.address
        request = calls.prefill_request(trip, self._turns.find(trip, pick))
        made_by = pick.replica
        unheard = Ticket(request.ticket_id, b"", address, made_by.fingerprint, made_by.family)
        trip.time(prefill_worker=pick.replica.worker_id)
        with self._fleet.hold(address) as held, self._head_starts.running(trip, route, request.ticket_id):
            trip.on(Event.CALL_PREFILL)
            call = held.watch(self._fleet.prefill(address).Run(request, timeout=self._remaining(trip)))
            try:
                answer = await call
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._releases.reap(call, unheard, asked.request_id)
                raise Lost(error_from_rpc(error), address) from error
            except asyncio.CancelledError:
                self._releases.reap(call, unheard, asked.request_id)
                raise_if_lost(held, address)
                raise
        finish = wire.finish_from_wire(answer.finish_reason)
        trip.num_cached_tokens = answer.num_cached_tokens
        trip.time(queue_seconds=answer.queue_seconds, prefill_seconds=answer.prefill_seconds)
        trip.report_kv(wire.kv_reports_from_wire(answer.kv))
        if answer.ticket_id:
            trip.on(Event.OFFER)
            trip.ticket = replace(unheard, ticket_id=answer.ticket_id, sealed=answer.ticket)
        else:
            trip.on(Event.LOSE)
        event = trip.emit((wire.token_from_wire(answer.first_token),), finish, self._clock.monotonic())
        if finish is not None:
            self._drop_ticket(trip, "finished")
            self._end(trip, Event.FINISH)
        yield event

    async def _decode(self, trip: Trip, pick: Pick) -> AsyncGenerator[TokenEvent, None]:
        """Generate at `pick`, with the ticket if there is one; ends in DONE."""
        address = pick.replica.address
        request = calls.decode_request(trip)
        if trip.ticket is not None:
            request.ticket, request.attempt = trip.ticket.sealed, trip.ticket.deliveries
            trip.ticket = replace(trip.ticket, deliveries=trip.ticket.deliveries + 1)
        trip.time(decode_worker=pick.replica.worker_id)
        with self._fleet.hold(address) as held:
            trip.on(Event.CALL_DECODE)
            call = held.watch(self._fleet.decode(address).Run(request, timeout=self._remaining(trip)))
            try:
                async for answer in call:
                    held.heard()
                    self._note_handoff(trip, answer)
                    finish = wire.finish_from_wire(answer.finish_reason)
                    event = trip.emit(wire.tokens_from_wire(answer.tokens), finish, self._clock.monotonic())
                    if finish is not None:
                        self._turns.remember(trip, address, answer.kept, answer.num_kept_tokens)
                        self._end(trip, Event.FINISH)
                        self._releases.settle(call)
                    yield event
                    if finish is not None:
                        return
            except grpc.aio.AioRpcError as error:
                raise Lost(error_from_rpc(error), address) from error
            except asyncio.CancelledError:
                raise_if_lost(held, address)
                raise
            finally:
                if trip.state not in MACHINE.final:
                    call.cancel()
        raise Lost(Unavailable(f"worker {pick.replica.worker_id} ended a stream without a finish reason"), address)

    def _note_handoff(self, trip: Trip, answer: decode_pb2.DecodeResponse) -> None:
        """Learn from the first message how the prompt's KV came; a ticket that was not used up is released."""
        if not answer.HasField("handoff"):
            if trip.state is State.FETCHING:
                self._drop_ticket(trip, "unused")
            return
        handoff = answer.handoff
        trip.report_kv(wire.kv_reports_from_wire(answer.kv))
        outcome = wire.handoff_outcome_from_wire(handoff.outcome)
        self._instruments.handoffs.labels(outcome).inc()
        trip.num_cached_tokens = max(trip.num_cached_tokens, handoff.num_cached_tokens if not trip.emitted else 0)
        if trip.state is not State.FETCHING:
            return
        trip.time(
            handoff_outcome=outcome,
            handoff_seconds=handoff.seconds,
            connector=handoff.connector,
            handoff_blocks=handoff.num_blocks,
            handoff_bytes=handoff.num_bytes,
        )
        if handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED:
            self._instruments.handoff_seconds.observe(handoff.seconds)
            trip.on(Event.FETCH)
            trip.ticket = None
        else:
            self._drop_ticket(trip, outcome)

    # -- where to ----------------------------------------------------------------------------------------------------

    def _route(self, trip: Trip) -> Route:
        route = self._choose(trip, frozenset(trip.excluded))
        if route is None and isinstance(trip.last_error, Overloaded) and not trip.emitted:
            raise trip.last_error  # everybody is full, and nothing is lost by saying so
        if route is None and trip.excluded:
            route = self._choose(trip, frozenset())
        if route is None and trip.ticket is not None:
            self._drop_ticket(trip, "no_reader")
            route = self._choose(trip, frozenset())
        if route is None:
            raise Lost(
                Unavailable(
                    "no worker takes requests now; see /ready for why", retry_after_seconds=_RETRY_AFTER_SECONDS
                ),
                None,
            )
        spilled = route.decode.spilled or (route.prefill is not None and route.prefill.spilled)
        if trip.ticket is None:  # with one, this completes a decision that was counted
            self._instruments.routes.labels(route.reason.value, str(spilled).lower()).inc()
        trip.routes = [*trip.routes, *route_notes(route)][-_MAX_ROUTES:]
        return route

    def _choose(self, trip: Trip, excluded: frozenset[str]) -> Route | None:
        candidates = self._fleet.candidates(excluded)
        config = self._routing
        asked = trip.request
        skip: RouteReason | None = None
        if trip.ticket is not None:
            fitting = readers(candidates.decode, trip.ticket.fingerprint, trip.ticket.family)
            candidates, skip = Candidates(decode=fitting), RouteReason.PAIR
            if fitting and fitting[0].fingerprint != trip.ticket.fingerprint:
                skip = RouteReason.CONVERTED
        elif trip.emitted:
            skip = RouteReason.RESUME
        elif len(asked.token_ids) < config.skip_prefill_below_tokens:
            skip = RouteReason.SHORT_PROMPT
        key = prefix_key(
            asked.token_ids,
            tenant=asked.tenant,
            block_tokens=config.block_tokens,
            prefix_blocks=config.prefix_blocks,
        )
        return choose(key, candidates, load_factor=config.load_factor, skip_prefill=skip)

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def _take_loss(self, trip: Trip, lost: Lost) -> None:
        """Put the trip back to where another attempt can start.

        Raises:
            KvferryError: there is to be none.
        """
        error, address = lost.error, lost.address
        if trip.state in (State.PREFILLING, State.FETCHING, State.DECODING):
            trip.on(Event.LOSE)
        verdict = judge(error)
        if verdict is Verdict.FATAL:
            self._refuse(trip, error)
        trip.failed(error, None if verdict is Verdict.DROP_TICKET else address)
        if verdict is Verdict.SUSPECT and address is not None:
            self._fleet.suspect(address, error.message)
            if trip.ticket is not None:
                trip.ticket = replace(trip.ticket, losses=trip.ticket.losses + 1)
        if trip.ticket is not None and (verdict is Verdict.DROP_TICKET or trip.ticket.losses >= _MAX_TICKET_LOSSES):
            self._drop_ticket(trip, "decode_failed")
        if trip.failures > self._retry.max_failures:
            self._refuse(trip, error)
        self._instruments.retries.labels(error.reason).inc()

    def _refuse(self, trip: Trip, error: KvferryError) -> Never:
        if isinstance(error, DeadlinePassed):
            raise self._deadline_passed(trip) from error
        if isinstance(error, RequestCancelled) or (isinstance(error, InvalidRequest) and trip.emitted):
            # Neither did the client cancel, nor was its request bad: it was good enough to begin with.
            raise Unavailable(f"no worker could finish the stream: {error.message}") from error
        raise error

    async def _first_worker(self, trip: Trip, error: KvferryError) -> None:
        """Wait a moment for somebody to begin with; whoever comes back is seen a little later than it is there.

        Raises:
            KvferryError: nobody came, or nobody can.
        """
        if self._room is not None:
            if not await self._room.wait(lambda: self._can_route(trip), self._remaining(trip)):
                self._remaining(trip)
                self._refuse(trip, self._room.gave_up())
        elif not self._fleet.may_recover():
            self._refuse(trip, error)
        else:
            try:
                async with asyncio.timeout(min(self._retry.first_worker_seconds, self._remaining(trip))):
                    await self._fleet.wait_until(lambda _: self._can_route(trip))
            except TimeoutError:
                self._refuse(trip, error)
        trip.failed(error, None)

    def _can_route(self, trip: Trip) -> bool:
        return self._choose(trip, frozenset()) is not None

    async def _pause(self, trip: Trip) -> None:
        elsewhere = self._choose(trip, frozenset(trip.excluded)) is not None
        seconds = trip.backoff_seconds(self._retry, elsewhere=elsewhere)
        if seconds > 0:
            await self._sleep(min(seconds, self._remaining(trip)))

    def _remaining(self, trip: Trip) -> float:
        """Seconds left, more than 0.

        Raises:
            DeadlinePassed: none are.
        """
        limit = trip.request.arrived + self._retry.request_timeout_seconds
        deadline = limit if trip.request.deadline is None else min(limit, trip.request.deadline)
        remaining = deadline - self._clock.monotonic()
        if remaining <= 0:
            raise self._deadline_passed(trip)
        return remaining

    def _deadline_passed(self, trip: Trip) -> DeadlinePassed:
        return DeadlinePassed(
            f"the deadline passed after {len(trip.emitted)} of {trip.request.sampling.max_tokens} tokens"
        )

    def _complete(self, trip: Trip) -> TokenEvent:
        self._drop_ticket(trip, "finished")
        self._end(trip, Event.FINISH)
        return trip.emit((), FinishReason.LENGTH, self._clock.monotonic())

    # -- what is owed ------------------------------------------------------------------------------------------------

    def _drop_ticket(self, trip: Trip, reason: str) -> None:
        if trip.ticket is not None:
            self._releases.release(trip.ticket, trip.request.request_id, reason)
            trip.ticket = None
            trip.on(Event.DROP)

    def _end(self, trip: Trip, event: Event) -> None:
        """Take the last step and pay what is owed; nothing when it was taken already."""
        if trip.state in MACHINE.final:
            return
        duties = DUTIES[trip.state]
        trip.on(event)
        request_id = trip.request.request_id
        for duty in duties:
            # The calls themselves were cancelled where they are made, on the way out to here.
            if duty is Duty.RELEASE_TICKET and trip.ticket is not None:
                self._releases.release(trip.ticket, request_id, "client_gone" if event is Event.CANCEL else event.value)
                trip.ticket = None
        now = self._clock.monotonic()
        usage = Usage(len(trip.request.token_ids), len(trip.emitted), trip.num_cached_tokens)
        trip.time(total_seconds=now - trip.request.arrived)
        self._instruments.resumes.inc(trip.timing.resumed)
        self._instruments.stream_ended(trip.state.value, usage, trip.timing)
