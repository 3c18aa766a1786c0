"""The `Decode` service: fetch what a ticket offers, or compute it, then stream tokens."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from kvferry.core.errors import KvferryError, TicketRejected
from kvferry.core.ids import new_ticket_id
from kvferry.engine.jobs import Export
from kvferry.engine.messages import EngineRequest
from kvferry.engine.sequence import RemoteKv
from kvferry.kv.connector import FetchSource, Peer, PeerControl
from kvferry.kv.ticket import Keyring, Ticket, check_ticket, digest_tokens
from kvferry.rpc import wire
from kvferry.v1 import decode_pb2, decode_pb2_grpc
from kvferry.workers.arrival import PEER, Arrival
from kvferry.workers.context import WorkerContext, sequence_id
from kvferry.workers.head_start import HeadStart
from kvferry.workers.loop import EngineStream, StreamItem

_log = logging.getLogger(__name__)

_CONTROL_SECONDS = 2.0
_KEPT_SECONDS = 480.0
"""How long a ticket for blocks that nothing holds is worth a try; conversations pause for minutes."""

Context = grpc.aio.ServicerContext[Any, Any]
Outcome = decode_pb2.Handoff


@dataclass(slots=True)
class _Handoff:
    """What became of one request's ticket; reported once."""

    ticket: Ticket | None
    arrival: Arrival
    refused: str = ""
    """Why a ticket was not even tried."""
    reported: bool = False
    kept: Export | None = None
    """Where the full blocks were when the stream ended."""

    def describe(self, num_cached: int) -> decode_pb2.Handoff:
        self.reported = True
        message = decode_pb2.Handoff(num_cached_tokens=num_cached)
        if self.ticket is not None:
            message.connector = self.ticket.connector
        load = self.arrival.from_peer
        if load is not None:
            message.seconds = load.seconds
        if load is not None and load.failure is None:
            message.outcome = Outcome.OUTCOME_FETCHED
            message.num_blocks, message.num_bytes = load.num_blocks, load.num_bytes
        elif self.arrival.from_tiers:
            message.outcome = Outcome.OUTCOME_TIER
            message.reason = self.refused if load is None else load.failure or ""
        elif load is not None:
            message.outcome, message.reason = Outcome.OUTCOME_RECOMPUTED, load.failure or ""
        elif self.refused or self.arrival.is_declined:
            message.outcome = Outcome.OUTCOME_RECOMPUTED
            message.reason = self.refused or "computing was cheaper than fetching"
        else:
            message.outcome = Outcome.OUTCOME_NONE if self.ticket is None else Outcome.OUTCOME_LOCAL
        return message


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """One engine's streams."""

    def __init__(self, context: WorkerContext, keyring: Keyring, control: PeerControl, head_start: HeadStart) -> None:
        self._head_start = head_start
        self._context = context
        self._keyring = keyring
        self._control = control
        self._dismissals: set[asyncio.Task[None]] = set()

    async def Run(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self._context.admit(request.model, request.tenant)
        tokens = list(wire.token_ids_from_wire(request.token_ids, "token_ids"))
        sampling = wire.sampling_from_wire(request.sampling)
        handoff = self._open(request, tokens)
        remote = None
        source = None
        if handoff.ticket is not None:
            # A ticket for one is the sample's own; one for several was made for the samples of one prompt.
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
                tenant=request.tenant,
                keeps=request.keep,
                remote=remote,
            )
        )
        try:
            with stream:
                async for item in stream:
                    message = _message([item, *stream.take_ready()], handoff)
                    if message is not None:
                        if message.handoff.outcome == Outcome.OUTCOME_RECOMPUTED:
                            why = message.handoff.reason
                            _log.info("computed what was offered: %s", why, extra={"request_id": stream.request_id})
                        self._add_kept(message, request, tokens, handoff)
                        yield message
        finally:
            if source is not None and source.ticket.held and handoff.arrival.from_peer is None:
                self._dismiss(source, stream)

    async def Prepare(self, request: decode_pb2.PrepareRequest, context: Context) -> decode_pb2.PrepareResponse:
        self._context.admit("", request.tenant)
        tokens = wire.token_ids_from_wire(request.token_ids, "token_ids")
        return decode_pb2.PrepareResponse(num_blocks=await self._head_start.run(request, tokens))

    def _open(self, request: decode_pb2.DecodeRequest, tokens: list[int]) -> _Handoff:
        """Open and check the ticket. One that merely came too late is not an error: the tokens are computed.

        Raises:
            TicketRejected: it is forged, or was made for something else; whoever sent it should know.
        """
        arrival = Arrival(self._context.worker_id)
        if not request.ticket:
            return _Handoff(None, arrival)
        ticket = self._keyring.open(request.ticket)
        try:
            check_ticket(
                ticket,
                fingerprint=self._context.layout.fingerprint,
                block_tokens=self._context.layout.block_tokens,
                tenant=request.tenant,
                tokens=tokens,
                now_wall=self._context.clock.wall(),
                layout=self._context.layout,
            )
        except TicketRejected as error:
            if error.reason != "TICKET_EXPIRED":
                raise
            return _Handoff(None, arrival, refused=error.message)
        return _Handoff(ticket, arrival)

    def _add_kept(
        self,
        message: decode_pb2.DecodeResponse,
        request: decode_pb2.DecodeRequest,
        tokens: list[int],
        handoff: _Handoff,
    ) -> None:
        """Collect what is generated; when the stream ends, seal where its full blocks are."""
        if not request.keep:
            return
        tokens.extend(token.id for token in message.tokens)
        kept = handoff.kept
        if kept is None:
            return
        own = self._context
        ticket = Ticket(
            ticket_id=new_ticket_id(),
            worker_id=own.worker_id,
            incarnation=own.incarnation,
            control_address=own.address,
            connector=own.connector,
            fingerprint=own.layout.fingerprint,
            tenant=request.tenant,
            tokens_digest=digest_tokens(tokens[: kept.num_tokens]),
            num_tokens=kept.num_tokens,
            block_ids=kept.blocks,
            epochs=kept.epochs,
            expires_wall=own.clock.wall() + _KEPT_SECONDS,
            held=False,
        )
        message.kept, message.num_kept_tokens = self._keyring.seal(ticket), kept.num_tokens

    def _dismiss(self, source: FetchSource, stream: EngineStream) -> None:
        """Tell the peer that its pages are not needed: every block was here, or the caller left first."""
        ticket = source.ticket
        peer = Peer(*ticket.peer, ticket.control_address)

        async def tell() -> None:
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
            except KvferryError as error:  # its own timer gives the pages back
                _log.info("offer not dismissed: %s", error.message, extra={"request_id": stream.request_id})

        task = asyncio.create_task(tell())
        self._dismissals.add(task)
        task.add_done_callback(self._dismissals.discard)


def _message(items: list[StreamItem], handoff: _Handoff) -> decode_pb2.DecodeResponse | None:
    """Everything that has arrived, in one message; `None` when there is no token yet."""
    message = decode_pb2.DecodeResponse()
    num_cached = 0
    for item in items:
        handoff.arrival.hear(item)
        if item.update is not None:
            message.tokens.append(wire.token_to_wire(item.update.token))
            num_cached = item.update.num_cached
            handoff.kept = item.update.kept
            if item.update.finish_reason is not None:
                message.finish_reason = wire.finish_to_wire(item.update.finish_reason)
    if not message.tokens:
        return None
    if not handoff.reported:
        message.handoff.CopyFrom(handoff.describe(num_cached))
        message.kv.extend(wire.kv_reports_to_wire(handoff.arrival.take_reports()))
    return message
