"""`Decode` service: fetches the KV of a ticket or computes it, then streams tokens."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.core.errors import InvalidRequest, KvferryError, TicketRejected, shortened
from kvferry.core.ids import new_ticket_id
from kvferry.core.pausing import WeightVersion
from kvferry.engine.loop.engine_stream import EngineStream, StreamItem
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import Export, SequenceUpdate
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.interface.connector import FetchSource, Peer, PeerControl
from kvferry.kv.interface.ticket import Keyring, Ticket, check_ticket, digest_tokens
from kvferry.rpc import computed_wire, retention_wire, wire, worker_wire
from kvferry.rpc.access.hosts import is_host
from kvferry.rpc.call_interceptor import STARTED_METADATA
from kvferry.v1 import decode_pb2, decode_pb2_grpc
from kvferry.workers.calls.call_trace import call_trace
from kvferry.workers.calls.context import WorkerContext, sequence_id
from kvferry.workers.handoff.kv_prefetch import KvPrefetcher
from kvferry.workers.handoff.kv_report import PEER, KvReportBuilder
from kvferry.workers.handoff.page_publisher import PagePublisher

_log = logging.getLogger(__name__)

_CONTROL_SECONDS = 2.0
_KEPT_SECONDS = 480.0
"""Validity of a prior-turn ticket, in seconds; conversations pause for minutes."""

Context = grpc.aio.ServicerContext[Any, Any]
Outcome = decode_pb2.Handoff


@dataclass(slots=True)
class _Handoff:
    """State of the hand-off of a request, reported once."""

    ticket: Ticket | None
    kv_report: KvReportBuilder
    refused: str = ""
    """Reason why the ticket was not used."""
    reported: bool = False
    kept: Export | None = None
    """Export of the full blocks, for the prior-turn ticket; `None` if there is none."""
    weights: WeightVersion = WeightVersion()  # noqa: RUF009  frozen
    """The weights of the latest tokens."""
    sent_weights: WeightVersion | None = None
    """The weights that the caller knows; `None` before the first message."""

    def describe(self, update: SequenceUpdate) -> decode_pb2.Handoff:
        self.reported = True
        message = decode_pb2.Handoff(
            num_cached_tokens=update.num_cached,
            num_loaded_tokens=update.num_loaded,
            num_written_tokens=update.num_written,
        )
        if self.ticket is not None:
            message.connector = self.ticket.connector
        load = self.kv_report.from_peer
        if load is not None:
            message.seconds = load.seconds
        if load is not None and load.failure is None:
            message.outcome = Outcome.OUTCOME_FETCHED
            message.num_blocks, message.num_bytes = load.num_blocks, load.num_bytes
        elif load is not None or self.refused:
            message.outcome = Outcome.OUTCOME_FAILED
            message.reason = self.refused if load is None else load.failure or ""
        elif self.kv_report.from_tiers:
            message.outcome = Outcome.OUTCOME_TIER
        elif self.kv_report.is_declined:
            message.outcome, message.reason = Outcome.OUTCOME_RECOMPUTED, "computing was faster than fetching"
        else:
            message.outcome = Outcome.OUTCOME_NONE if self.ticket is None else Outcome.OUTCOME_LOCAL
        return message


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Implements `Decode` for one engine."""

    def __init__(
        self,
        context: WorkerContext,
        keyring: Keyring,
        control: PeerControl,
        kv_prefetch: KvPrefetcher,
        publisher: PagePublisher,
    ) -> None:
        """
        Args:
            context: state of the worker.
            keyring: opens the tickets of requests and seals the prior-turn tickets.
            control: sends control messages to the workers that issued the tickets.
            kv_prefetch: prefetches the KV of prompts that are under prefill.
            publisher: makes the pages of prior-turn tickets readable by peers.
        """
        self._publisher = publisher
        self._kv_prefetch = kv_prefetch
        self._context = context
        self._keyring = keyring
        self._control = control
        self._dismissals: set[asyncio.Task[None]] = set()

    async def Run(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self._context.admit(request.model, request.scope)
        tokens = list(wire.token_ids_from_wire(request.token_ids, "token_ids"))
        sampling = wire.sampling_from_wire(request.sampling)
        handoff = self._open(request, tokens)
        remote = None
        source = None
        if handoff.ticket is not None:
            # A ticket for one reader belongs to one sample; a ticket for several readers is shared by the samples of a
            # prompt.
            reader = request.sample_index if handoff.ticket.readers > 1 else 0
            source = FetchSource(handoff.ticket, request.attempt, reader)
            remote = RemoteKv(handoff.ticket.num_tokens, source, PEER, handoff.ticket.worker_id)
        stream = self._context.loop.submit(
            EngineRequest(
                request_id=sequence_id(request.request_id, request.sample_index),
                token_ids=tokens,
                sampling=sampling,
                num_generated=request.num_generated,
                sample_index=request.sample_index,
                scope=request.scope,
                adapter=worker_wire.adapter_from_wire(request),
                priority=wire.check_priority(request.priority),
                deadline=self._context.deadline_in(context.time_remaining()),
                keeps=request.want_cached_ticket,
                retain_seconds=retention_wire.check_retain_seconds(request.retain_seconds),
                remote=remote,
            )
        )
        clock = self._context.clock
        arrived, started = clock.monotonic(), None
        trace = call_trace(
            self._context.tracer,
            context,
            "kvferry.v1.Decode/Run",
            "decode",
            clock,
            request.request_id,
            self._context.connector,
        )
        try:
            with stream, trace:
                async for item in stream:
                    items = [item, *stream.take_ready()]
                    trace.add(items)
                    if started is None and any(i.is_started for i in items):
                        started = clock.monotonic()
                        await context.send_initial_metadata(STARTED_METADATA)
                    for message in _messages(items, handoff):
                        if message.HasField("handoff") and started is not None:
                            message.queue_seconds = started - arrived
                            message.prefill_seconds = clock.monotonic() - started
                        if message.handoff.outcome in (Outcome.OUTCOME_RECOMPUTED, Outcome.OUTCOME_FAILED):
                            why = message.handoff.reason
                            _log.info("did not read the offered KV: %s", why, extra={"request_id": stream.request_id})
                        await self._add_kept(message, request, tokens, handoff)
                        yield message
        finally:
            if source is not None and source.ticket.held and handoff.kv_report.from_peer is None:
                self._dismiss(source, stream)

    async def PrefetchKv(
        self, request: decode_pb2.PrefetchKvRequest, context: Context
    ) -> decode_pb2.PrefetchKvResponse:
        self._context.admit("", request.scope)
        tokens = wire.token_ids_from_wire(request.token_ids, "token_ids")
        host, _, port = request.prefill_address.rpartition(":")
        if not is_host(host) or not port.isdecimal():  # gRPC would accept other schemes, too
            raise InvalidRequest(
                f"prefill_address must be host:port, not {shortened(repr(request.prefill_address))}",
                field="prefill_address",
            )
        return decode_pb2.PrefetchKvResponse(num_blocks=await self._kv_prefetch.run(request, tokens))

    def _open(self, request: decode_pb2.DecodeRequest, tokens: list[int]) -> _Handoff:
        """Open and check the ticket. An expired ticket is not an error: the prompt is computed instead.

        Raises:
            TicketRejected: the ticket is forged, or was made for a different request.
        """
        kv_report = KvReportBuilder(self._context.worker_id)
        if not request.ticket:
            return _Handoff(None, kv_report)
        ticket = self._keyring.open(request.ticket)
        try:
            check_ticket(
                ticket,
                fingerprint=self._context.layout.fingerprint,
                block_tokens=self._context.layout.block_tokens,
                scope=request.scope,
                tokens=tokens,
                now_wall=self._context.clock.wall(),
                windows=self._context.layout.groups.windows,
                layout=self._context.layout,
            )
        except TicketRejected as error:
            if error.reason != "TICKET_EXPIRED":
                raise
            return _Handoff(None, kv_report, refused=error.message)
        return _Handoff(ticket, kv_report)

    async def _add_kept(
        self,
        message: decode_pb2.DecodeResponse,
        request: decode_pb2.DecodeRequest,
        tokens: list[int],
        handoff: _Handoff,
    ) -> None:
        """Collect generated tokens; at the end of the stream, add a prior-turn ticket for the full blocks."""
        if not request.want_cached_ticket:
            return
        tokens.extend(token.id for token in message.tokens)
        kept, own = handoff.kept, self._context
        if kept is None or handoff.weights != own.loop.weights:  # KV of other weights gets no ticket
            return
        ticket = Ticket(
            ticket_id=new_ticket_id(),
            worker_id=own.worker_id,
            incarnation=own.incarnation,
            control_address=own.address,
            connector=own.connector,
            fingerprint=own.layout.fingerprint,
            scope=request.scope,
            tokens_digest=digest_tokens(tokens[: kept.num_tokens]),
            num_tokens=kept.num_tokens,
            block_ids=kept.blocks,
            epochs=kept.epochs,
            expires_wall=own.clock.wall() + _KEPT_SECONDS,
            held=False,
            digests=await self._publisher.publish(kept.blocks, kept.epochs),
        )
        message.cached_ticket, message.num_cached_ticket_tokens = self._keyring.seal(ticket), kept.num_tokens

    def _dismiss(self, source: FetchSource, stream: EngineStream) -> None:
        """Notify the peer in the background that its pages are not needed, because all blocks were cached or the call
        ended."""
        ticket = source.ticket
        peer = Peer(*ticket.peer, ticket.control_address)

        async def notify() -> None:
            try:
                await asyncio.to_thread(
                    self._control.finish,
                    peer,
                    ticket.id,
                    source.attempt,
                    _CONTROL_SECONDS,
                    done=True,
                    reader=source.reader,
                )
            except KvferryError as error:  # the peer frees the pages after a timeout
                _log.info("offer not dismissed: %s", error.message, extra={"request_id": stream.request_id})

        task = asyncio.create_task(notify())
        self._dismissals.add(task)
        task.add_done_callback(self._dismissals.discard)


def _messages(items: list[StreamItem], handoff: _Handoff) -> Iterator[decode_pb2.DecodeResponse]:
    """Combine the available events in one message for each version of the weights; there is none without tokens and
    without an end."""
    pending: list[StreamItem] = []
    for item in items:
        is_other = item.update is not None and item.weights != handoff.weights
        if is_other and (message := _message(pending, handoff)) is not None:
            yield message
        if is_other:
            pending, handoff.weights = [item], item.weights
        else:
            pending.append(item)
    if (message := _message(pending, handoff)) is not None:
        yield message


def _message(items: list[StreamItem], handoff: _Handoff) -> decode_pb2.DecodeResponse | None:
    """Combine events of one version of the weights in a message; return `None` if it would have neither tokens nor an
    end."""
    message = decode_pb2.DecodeResponse()
    last: SequenceUpdate | None = None
    for item in items:
        handoff.kv_report.add(item)
        if item.update is not None:
            message.tokens.extend(map(wire.token_to_wire, item.update.tokens))
            message.prompt_logprobs.extend(wire.scores_to_wire(item.update.scores))
            if item.retention is not None:
                message.retention.CopyFrom(retention_wire.retention_to_wire(item.retention))
            if item.update.computed:
                message.computed.extend(computed_wire.computed_to_wire(item.update.computed))
            last = item.update
            handoff.kept = item.update.kept
            if item.update.finish_reason is not None:
                message.finish_reason = wire.finish_to_wire(item.update.finish_reason)
    if last is None or not (message.tokens or message.finish_reason):
        return None
    if handoff.weights != handoff.sent_weights:
        message.weight_version, handoff.sent_weights = handoff.weights.name, handoff.weights
    if not handoff.reported:
        message.handoff.CopyFrom(handoff.describe(last))
        message.kv.extend(wire.kv_reports_to_wire(handoff.kv_report.take_reports()))
    return message
