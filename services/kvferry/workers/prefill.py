"""The `Prefill` service: compute a prompt, draw the first token, offer the pages."""

import logging
import re
from typing import Any

import grpc

from kvferry.core.errors import InvalidRequest, TicketRejected, Unavailable
from kvferry.core.ids import TicketId
from kvferry.engine.messages import EngineRequest
from kvferry.engine.sequence import RemoteKv
from kvferry.kv.connector import FetchSource
from kvferry.kv.ticket import Keyring, check_ticket
from kvferry.rpc import wire
from kvferry.v1 import prefill_pb2, prefill_pb2_grpc
from kvferry.workers.arrival import PEER, Arrival
from kvferry.workers.context import WorkerContext, sequence_id
from kvferry.workers.following import Following
from kvferry.workers.loop import StreamItem
from kvferry.workers.offer_desk import OfferDesk

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_TICKET_ID = re.compile(r"[0-9a-f]{32}")


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """One engine's prompts."""

    def __init__(self, context: WorkerContext, desk: OfferDesk, keyring: Keyring, following: Following) -> None:
        self._context = context
        self._following = following
        self._keyring = keyring
        self._desk = desk

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:
        self._context.admit(request.model, request.tenant)
        if request.ticket_id and not _TICKET_ID.fullmatch(request.ticket_id):
            raise InvalidRequest("ticket_id must be 32 hex digits, or empty", field="ticket_id")
        tokens = list(wire.token_ids_from_wire(request.token_ids, "token_ids"))
        begun = self._context.clock.monotonic()
        stream = self._context.loop.submit(
            EngineRequest(
                request_id=sequence_id(request.request_id, request.sample_index),
                token_ids=tokens,
                sampling=wire.sampling_from_wire(request.sampling),
                num_generated=request.num_generated,
                sample_index=request.sample_index,
                tenant=request.tenant,
                exports=True,
                remote=self._earlier(request, tokens),
            )
        )
        arrival = Arrival(self._context.worker_id)
        with stream, self._following.computing(request.ticket_id):
            async for item in stream:
                arrival.hear(item)
                if item.progress is not None:
                    self._following.add(request.ticket_id, item.progress)
                if item.update is not None:
                    seconds = self._context.clock.monotonic() - begun
                    answer = self._answer(request, context, tokens, item, seconds)
                    answer.kv.extend(wire.kv_reports_to_wire(arrival.take_reports()))
                    return answer
        raise Unavailable("the engine ended without drawing a token")

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Context) -> prefill_pb2.ReleaseResponse:
        self._desk.release(TicketId(request.ticket_id))
        return prefill_pb2.ReleaseResponse()

    def _earlier(self, request: prefill_pb2.PrefillRequest, tokens: list[int]) -> RemoteKv | None:
        """An earlier turn's blocks at a decode worker; only a hint, so what is wrong with it is no error."""
        if not request.earlier:
            return None
        layout = self._context.layout
        try:
            ticket = self._keyring.open(request.earlier)
            check_ticket(
                ticket,
                fingerprint=layout.fingerprint,
                block_tokens=layout.block_tokens,
                tenant=request.tenant,
                tokens=tokens,
                now_wall=self._context.clock.wall(),
            )
        except TicketRejected as error:
            _log.info("an earlier turn is of no use: %s", error.message, extra={"request_id": request.request_id})
            return None
        if ticket.held:
            return None
        return RemoteKv(ticket.num_tokens, FetchSource(ticket, 0), PEER, ticket.worker_id)

    def _answer(
        self,
        request: prefill_pb2.PrefillRequest,
        context: Context,
        tokens: list[int],
        item: StreamItem,
        seconds: float,
    ) -> prefill_pb2.PrefillResponse:
        update = item.update
        if update is None:
            raise Unavailable("the engine ended without drawing a token")
        answer = prefill_pb2.PrefillResponse(
            first_token=wire.token_to_wire(update.token),
            finish_reason=wire.finish_to_wire(update.finish_reason),
            num_cached_tokens=update.num_cached,
            prefill_seconds=seconds,
        )
        if item.export is None or update.export is None:
            return answer
        if not request.offer:
            self._context.loop.release_export(item.export)
            return answer
        wished = TicketId(request.ticket_id) if request.ticket_id else None
        offered = self._desk.offer(item.export, update.export, tokens, request.tenant, wished)
        answer.ticket, answer.ticket_id = offered.sealed, offered.ticket_id

        def release_if_unheard(call: Context) -> None:
            # The answer may never have reached the caller, who then cannot name the ticket to release it.
            if call.cancelled():
                self._desk.release(offered.ticket_id)

        context.add_done_callback(release_if_unheard)  # type: ignore[arg-type]  # the stubs want a class
        return answer
