"""The calls to workers, `Prefill.Run` and `Decode.Run`: their requests, and the state changes that their responses
cause.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

import grpc

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable
from kvferry.core.ids import new_ticket_id
from kvferry.core.inference.pooling import PoolingParams
from kvferry.core.sampling import ScoredToken
from kvferry.gateway.decide.lifecycle.computed_causes import refined
from kvferry.gateway.decide.lifecycle.ledger import count_answer, count_computed
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun, SealedTicket
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE, SampleEvent, State
from kvferry.gateway.decide.routing.routes import Pick, Route
from kvferry.gateway.dispatch.ending import Ending
from kvferry.gateway.dispatch.kv_hints import KvPrefetches, Turns
from kvferry.gateway.dispatch.lost_call import WorkerLost, raise_if_lost, worker_lost
from kvferry.gateway.dispatch.releases import Releases
from kvferry.gateway.dispatch.route_selection import WorkRecords
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.rpc import computed_wire, retention_wire, wire, worker_wire
from kvferry.rpc.inference.vector_wire import vector_from_wire
from kvferry.rpc.wire import pooling_to_wire
from kvferry.serving.token_source import TokenEvent, Vector
from kvferry.v1 import common_pb2, decode_pb2, prefill_pb2


def prefill_request(run: SampleRun, prior_turn_ticket: bytes) -> prefill_pb2.PrefillRequest:
    """Build the `Prefill.Run` request: compute the prompt, sample the first token and offer the blocks under a new
    ticket id.

    Args:
        run: the sample.
        prior_turn_ticket: sealed ticket for the blocks of a prior turn; empty if there is no such ticket.
    """
    request = run.request
    return prefill_pb2.PrefillRequest(
        request_id=request.caller.request_id,
        token_ids=request.token_ids,
        sampling=wire.sampling_to_wire(request.sampling),
        sample_index=request.sample_index,
        scope=request.caller.scope,
        offer=True,
        ticket_id=new_ticket_id(),
        prior_turn_ticket=prior_turn_ticket,
        retain_seconds=_retain_seconds(run),
        priority=request.caller.priority,
        adapter=worker_wire.adapter_to_wire(request.caller.adapter),
    )


def pool_request(run: SampleRun, params: PoolingParams) -> prefill_pb2.PoolRequest:
    """Build the `Prefill.Pool` request: compute the prompt and its vector.

    Args:
        run: the sample, whose prompt is pooled.
        params: parameters of the vector.
    """
    request = run.request
    return prefill_pb2.PoolRequest(
        request_id=request.caller.request_id,
        token_ids=request.token_ids,
        pooling=pooling_to_wire(params),
        scope=request.caller.scope,
        priority=request.caller.priority,
        input_index=request.sample_index,
    )


def decode_request(run: SampleRun) -> decode_pb2.DecodeRequest:
    """Build the `Decode.Run` request: continue from the prompt and the emitted tokens, and return a ticket for the
    cached blocks."""
    request = run.request
    # The log-probabilities of the prompt arrive with the first token.
    sampling = replace(request.sampling, prompt_logprobs=None) if run.emitted else request.sampling
    return decode_pb2.DecodeRequest(
        request_id=request.caller.request_id,
        token_ids=run.token_ids,
        num_generated=len(run.emitted),
        sampling=wire.sampling_to_wire(sampling),
        sample_index=request.sample_index,
        scope=request.caller.scope,
        want_cached_ticket=True,
        retain_seconds=0.0 if run.emitted else _retain_seconds(run),
        priority=request.caller.priority,
        adapter=worker_wire.adapter_to_wire(request.caller.adapter),
    )


class WorkerCalls:
    """Makes one gateway's calls to its workers. Used on the event loop's thread only."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        turns: Turns,
        kv_prefetches: KvPrefetches,
        releases: Releases,
        ending: Ending,
        records: WorkRecords,
        instruments: GatewayInstruments,
    ) -> None:
        """
        Args:
            fleet: the workers and their channels.
            clock: for timings.
            turns: prior-turn tickets of conversations.
            kv_prefetches: starts KV prefetches on decode workers.
            releases: releases offers in the background.
            ending: ends samples.
            records: observed durations and dispatched work.
            instruments: metrics.
        """
        self._fleet = fleet
        self._clock = clock
        self._turns = turns
        self._kv_prefetches = kv_prefetches
        self._releases = releases
        self._ending = ending
        self._records = records
        self._instruments = instruments

    async def prefill(
        self, run: SampleRun, route: Route, pick: Pick, remaining: float
    ) -> AsyncGenerator[TokenEvent, None]:
        """Compute the prompt on `pick`; the sample ends in state OFFERED, QUEUED (no blocks were offered) or DONE.

        Args:
            run: the sample.
            route: the whole route, for a KV prefetch on the decode worker.
            pick: the worker.
            remaining: time limit in seconds.

        Raises:
            WorkerLost: the call failed; `WorkerLost.error` is the reason.
        """
        address = pick.replica.address
        request = prefill_request(run, self._turns.find(run, pick))
        replica = pick.replica
        requested = SealedTicket(request.ticket_id, b"", address, replica.fingerprint, replica.family)
        run.time(prefill_worker=replica.worker_id)
        with (
            self._fleet.hold(address) as held,
            self._kv_prefetches.running(run, route, request.ticket_id),
            run.trace.call("prefill", pick) as metadata,
        ):
            run.on(SampleEvent.CALL_PREFILL)
            call = held.watch(self._fleet.prefill(address).Run(request, timeout=remaining, metadata=metadata))
            try:
                answer = await call
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._releases.reap(call, requested, run.request.caller.request_id)
                raise await worker_lost(call, error, address) from error
            except asyncio.CancelledError:
                self._releases.reap(call, requested, run.request.caller.request_id)
                raise_if_lost(held, address)
                raise
        finish = wire.finish_from_wire(answer.finish_reason)
        run.reused(
            num_cached=answer.num_cached_tokens,
            num_loaded=answer.num_loaded_tokens,
            num_written=answer.num_written_tokens,
        )
        self._note_computed(run, pick, answer.computed)
        self._count_reused(run, answer)
        self._instruments.prefix_predicted(pick.cached, answer.num_cached_tokens)
        self._records.prefilled(run, address, answer.num_cached_tokens, answer.prefill_seconds)
        queued = run.request.caller.queued_seconds + answer.queue_seconds
        run.time(queue_seconds=queued, prefill_seconds=answer.prefill_seconds)
        reports = wire.kv_reports_from_wire(answer.kv)
        run.report_kv(reports)
        self._instruments.prior_turn_reported(reports)
        self._note_retention(run, answer, address)
        if answer.ticket_id:
            run.on(SampleEvent.OFFER)
            run.ticket = replace(requested, ticket_id=answer.ticket_id, sealed=answer.ticket)
        else:
            run.on(SampleEvent.LOSE)
        scores = _scores(run, answer)
        tokens = (wire.token_from_wire(answer.first_token),) if answer.HasField("first_token") else ()
        event = run.emit(tokens, finish, self._clock.monotonic(), scores, answer.weight_version)
        if finish is not None:
            self._ending.drop_ticket(run, "finished")
            self._ending.end(run, SampleEvent.FINISH)
        yield event

    async def pool(self, run: SampleRun, params: PoolingParams, pick: Pick, remaining: float) -> Vector:
        """Compute the vector of the sample's prompt on `pick`; the sample ends in state DONE.

        Args:
            run: the sample.
            params: selects the hidden states of the vector.
            pick: the worker.
            remaining: time limit in seconds.

        Raises:
            WorkerLost: the call failed; `WorkerLost.error` is the reason.
        """
        address = pick.replica.address
        run.time(prefill_worker=pick.replica.worker_id)
        with self._fleet.hold(address) as held, run.trace.call("pool", pick) as metadata:
            run.on(SampleEvent.CALL_PREFILL)
            request = pool_request(run, params)
            call = held.watch(self._fleet.prefill(address).Pool(request, timeout=remaining, metadata=metadata))
            try:
                answer = await call
            except grpc.aio.AioRpcError as error:
                raise await worker_lost(call, error, address) from error
            except asyncio.CancelledError:
                raise_if_lost(held, address)
                raise
            finally:
                call.cancel()
        run.reused(num_cached=answer.num_cached_tokens, num_loaded=answer.num_loaded_tokens)
        self._note_computed(run, pick, answer.computed)
        self._count_reused(run, answer)
        run.time(prefill_seconds=answer.prefill_seconds)
        run.report_kv(wire.kv_reports_from_wire(answer.kv))
        self._ending.end(run, SampleEvent.FINISH)
        return vector_from_wire(answer, len(run.request.token_ids))

    async def decode(self, run: SampleRun, pick: Pick, remaining: float) -> AsyncGenerator[TokenEvent, None]:
        """Generate on `pick`, with the sample's ticket if it has one; the sample ends in state DONE.

        Args:
            run: the sample.
            pick: the worker.
            remaining: time limit in seconds.

        Raises:
            WorkerLost: the call failed; `WorkerLost.error` is the reason.
        """
        address = pick.replica.address
        request = decode_request(run)
        if run.ticket is not None:
            request.ticket, request.attempt = run.ticket.sealed, run.ticket.deliveries
            run.ticket = replace(run.ticket, deliveries=run.ticket.deliveries + 1)
        run.time(decode_worker=pick.replica.worker_id)
        output = _Output(self._clock, self._records.running(address))
        with self._fleet.hold(address) as held, run.trace.call("decode", pick) as metadata:
            run.on(SampleEvent.CALL_DECODE)
            call = held.watch(self._fleet.decode(address).Run(request, timeout=remaining, metadata=metadata))
            try:
                async for answer in call:
                    held.note_answer()
                    if answer.HasField("handoff") and run.state is State.DECODING:  # no ticket: computed here
                        self._note_prompt(run, pick, answer)
                    if answer.computed:
                        self._note_computed(run, pick, answer.computed)
                    self._records.arrived(run)
                    self._note_handoff(run, address, answer)
                    finish = wire.finish_from_wire(answer.finish_reason)
                    tokens, scores = wire.tokens_from_wire(answer.tokens), _scores(run, answer)
                    event = run.emit(tokens, finish, self._clock.monotonic(), scores, answer.weight_version)
                    output.add(len(tokens))
                    if finish is not None:
                        self._records.generated(run, address, output.running, output.num_tokens, output.seconds)
                        self._turns.remember(run, address, answer.cached_ticket, answer.num_cached_ticket_tokens)
                        self._ending.end(run, SampleEvent.FINISH)
                        self._releases.settle(call)
                        run.trace.answered()
                    yield event
                    if finish is not None:
                        return
            except grpc.aio.AioRpcError as error:
                raise await worker_lost(call, error, address) from error
            except asyncio.CancelledError:
                raise_if_lost(held, address)
                raise
            finally:
                if run.state not in MACHINE.final:
                    call.cancel()
        raise WorkerLost(
            Unavailable(f"worker {pick.replica.worker_id} ended a stream without a finish reason"), address
        )

    def _note_prompt(self, run: SampleRun, pick: Pick, answer: decode_pb2.DecodeResponse) -> None:
        """Record the prompt's cached tokens and prefill time, as reported in the generating worker's first message."""
        num_cached = answer.handoff.num_cached_tokens
        self._instruments.prefix_predicted(pick.cached, num_cached)
        self._records.prefilled(run, pick.replica.address, num_cached, answer.prefill_seconds)
        if not run.emitted:
            queued = run.request.caller.queued_seconds + answer.queue_seconds
            run.time(queue_seconds=queued, prefill_seconds=answer.prefill_seconds)

    def _note_computed(self, run: SampleRun, pick: Pick, messages: Iterable[common_pb2.ComputedTokens]) -> None:
        """Record why a worker computed tokens of the prompt."""
        computed = refined(
            computed_wire.computed_from_wire(messages),
            num_prompt=len(run.request.token_ids),
            block_tokens=pick.replica.block_tokens,
            num_elsewhere=run.num_elsewhere,
        )
        run.note_computed(computed)
        count_computed(self._instruments.ledger.row(*run.account), computed)
        for one in computed:
            self._instruments.computed_tokens.labels(one.cause).inc(one.num_tokens)

    def _count_reused(
        self, run: SampleRun, report: prefill_pb2.PrefillResponse | prefill_pb2.PoolResponse | decode_pb2.Handoff
    ) -> None:
        """Count the cached and the loaded tokens that a worker reports for the sample's tenant."""
        row, num_prompt = self._instruments.ledger.row(*run.account), len(run.request.token_ids)
        count_answer(row, num_prompt, report.num_cached_tokens, report.num_loaded_tokens, is_first=not run.emitted)

    def _note_retention(
        self, run: SampleRun, answer: prefill_pb2.PrefillResponse | decode_pb2.DecodeResponse, address: str
    ) -> None:
        """Record what the worker that computed the prompt granted."""
        retention = retention_wire.retention_from_wire(answer.retention) if answer.HasField("retention") else None
        if retention is not None:
            expires_at = self._clock.wall() + retention.seconds if retention.num_tokens else 0.0
            run.retained(replace(retention, expires_at=expires_at), address)
            self._instruments.retentions.labels(retention.outcome).inc()

    def _note_handoff(self, run: SampleRun, address: str, answer: decode_pb2.DecodeResponse) -> None:
        """Record the source of the prompt's KV, as reported in the first message; release the ticket if it was not
        used."""
        if not answer.HasField("handoff"):
            if run.state is State.FETCHING:
                self._ending.drop_ticket(run, "unused")
            return
        handoff = answer.handoff
        self._count_reused(run, handoff)
        self._note_retention(run, answer, address)
        run.report_kv(wire.kv_reports_from_wire(answer.kv))
        outcome = worker_wire.handoff_outcome_from_wire(handoff.outcome)
        self._instruments.handoffs.labels(outcome).inc()
        if not run.emitted:  # otherwise another worker has computed the prompt for this request
            run.reused(
                num_cached=handoff.num_cached_tokens,
                num_loaded=handoff.num_loaded_tokens,
                num_written=handoff.num_written_tokens,
            )
        if run.state is not State.FETCHING:
            return
        run.time(
            handoff_outcome=outcome,
            handoff_seconds=handoff.seconds,
            connector=handoff.connector,
            handoff_blocks=handoff.num_blocks,
            handoff_bytes=handoff.num_bytes,
        )
        run.trace.handed_off(run.timing)
        if handoff.outcome == decode_pb2.Handoff.OUTCOME_FETCHED:
            self._instruments.handoff_seconds.observe(handoff.seconds)
            if run.ticket is not None:
                self._records.handed_off(run, run.ticket.address, address, handoff)
            run.on(SampleEvent.FETCH)
            run.ticket = None
        else:
            self._ending.drop_ticket(run, outcome)


class _Output:
    """The tokens of one call after its first message, and their time."""

    def __init__(self, clock: Clock, running: int) -> None:
        self.running = running
        """Number of requests on the worker before the call."""
        self.num_tokens = 0
        self.seconds = 0.0
        self._clock = clock
        self._first: float | None = None

    def add(self, num_tokens: int) -> None:
        """Count the tokens of a message."""
        if not num_tokens:
            return
        now = self._clock.monotonic()
        if self._first is None:
            self._first = now
        else:
            self.num_tokens += num_tokens
            self.seconds = now - self._first


def _retain_seconds(run: SampleRun) -> float:
    """Return the time for which the worker is asked to keep the prompt; the steps of a beam search ask for none."""
    return 0.0 if run.is_step else run.request.retain_seconds


def _scores(
    run: SampleRun, answer: prefill_pb2.PrefillResponse | decode_pb2.DecodeResponse
) -> tuple[ScoredToken, ...] | None:
    """Return the log-probabilities of the prompt that come with the first token; `None` if they were not requested or
    already received."""
    is_first = run.request.sampling.prompt_logprobs is not None and not run.emitted
    return wire.scores_from_wire(answer.prompt_logprobs) if is_first else None
