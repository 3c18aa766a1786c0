"""`Prefill` service: computes a prompt, samples the first token, offers the pages."""

import logging
import re
from typing import Any

import grpc

from kvferry.core.errors import InvalidRequest, TicketRejected, Unavailable, shortened
from kvferry.core.ids import TicketId
from kvferry.engine.loop.engine_stream import StreamItem
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.interface.connector import FetchSource
from kvferry.kv.interface.ticket import Keyring, check_ticket
from kvferry.rpc import computed_wire, retention_wire, wire, worker_wire
from kvferry.rpc.call_interceptor import STARTED_METADATA
from kvferry.rpc.wire import pooling_from_wire
from kvferry.v1 import prefill_pb2, prefill_pb2_grpc
from kvferry.workers.calls.call_trace import call_trace
from kvferry.workers.calls.context import WorkerContext, sequence_id
from kvferry.workers.handoff.kv_report import PEER, KvReportBuilder
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.handoff.page_publisher import PagePublisher
from kvferry.workers.handoff.prefill_progress import PrefillProgress
from kvferry.workers.services.pooling import compute_vector

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_TICKET_ID = re.compile(r"[0-9a-f]{32}")


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Implements `Prefill` for one engine."""

    def __init__(
        self,
        context: WorkerContext,
        desk: OfferDesk,
        keyring: Keyring,
        following: PrefillProgress,
        publisher: PagePublisher,
    ) -> None:
        """
        Args:
            context: state of the worker.
            desk: offers the blocks of computed prompts.
            keyring: opens prior-turn tickets.
            following: reports the full blocks of prompts to decode workers that prefetch.
            publisher: makes pages readable by peers before they are reported or offered.
        """
        self._publisher = publisher
        self._context = context
        self._following = following
        self._keyring = keyring
        self._desk = desk

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillResponse:
        self._context.admit(request.model, request.scope)
        if request.ticket_id and not _TICKET_ID.fullmatch(request.ticket_id):
            raise InvalidRequest(
                f"ticket_id must be 32 hexadecimal digits, or empty, not {shortened(repr(request.ticket_id))}",
                field="ticket_id",
            )
        tokens = list(wire.token_ids_from_wire(request.token_ids, "token_ids"))
        begun = self._context.clock.monotonic()
        stream = self._context.loop.submit(
            EngineRequest(
                request_id=sequence_id(request.request_id, request.sample_index),
                token_ids=tokens,
                sampling=wire.sampling_from_wire(request.sampling),
                num_generated=request.num_generated,
                sample_index=request.sample_index,
                scope=request.scope,
                adapter=worker_wire.adapter_from_wire(request),
                priority=wire.check_priority(request.priority),
                deadline=self._context.deadline_in(context.time_remaining()),
                exports=True,
                retain_seconds=retention_wire.check_retain_seconds(request.retain_seconds),
                remote=self._earlier(request, tokens),
            )
        )
        kv_report = KvReportBuilder(self._context.worker_id)
        is_started = False
        own = self._context
        trace = call_trace(
            own.tracer, context, "kvferry.v1.Prefill/Run", "compute", own.clock, request.request_id, own.connector
        )
        with stream, trace, self._following.computing(request.ticket_id):
            async for item in stream:
                kv_report.add(item)
                trace.add((item,))
                if item.is_started and not is_started:
                    is_started = True
                    await context.send_initial_metadata(STARTED_METADATA)
                if item.progress is not None:
                    self._following.add(request.ticket_id, item.progress)
                if item.update is not None:
                    seconds = self._context.clock.monotonic() - begun
                    digests = await self._digests(request, item)
                    answer = self._answer(request, context, tokens, item, seconds, digests)
                    answer.kv.extend(wire.kv_reports_to_wire(kv_report.take_reports()))
                    return answer
        raise Unavailable("the request ended without a sampled token")

    async def Pool(self, request: prefill_pb2.PoolRequest, context: Context) -> prefill_pb2.PoolResponse:
        self._context.admit(request.model, request.scope)
        pooling = EngineRequest.for_vector(
            sequence_id(request.request_id, request.input_index),
            wire.token_ids_from_wire(request.token_ids, "token_ids"),
            pooling_from_wire(request.pooling),
            scope=request.scope,
            priority=wire.check_priority(request.priority),
            deadline=self._context.deadline_in(context.time_remaining()),
        )
        begun = self._context.clock.monotonic()
        kv_report = KvReportBuilder(self._context.worker_id)
        update = await compute_vector(
            self._context, pooling, kv_report, lambda: context.send_initial_metadata(STARTED_METADATA)
        )
        assert update.embedding is not None
        return prefill_pb2.PoolResponse(
            values=update.embedding.tolist(),
            num_cached_tokens=update.num_cached,
            num_loaded_tokens=update.num_loaded,
            computed=computed_wire.computed_to_wire(update.computed),
            prefill_seconds=self._context.clock.monotonic() - begun,
            kv=wire.kv_reports_to_wire(kv_report.take_reports()),
        )

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Context) -> prefill_pb2.ReleaseResponse:
        self._desk.release(TicketId(request.ticket_id))
        return prefill_pb2.ReleaseResponse()

    def _earlier(self, request: prefill_pb2.PrefillRequest, tokens: list[int]) -> RemoteKv | None:
        """Return the blocks of a prior turn in a decode worker's cache; ignore an invalid ticket, since the ticket is
        only a hint."""
        if not request.prior_turn_ticket:
            return None
        layout = self._context.layout
        try:
            ticket = self._keyring.open(request.prior_turn_ticket)
            check_ticket(
                ticket,
                fingerprint=layout.fingerprint,
                block_tokens=layout.block_tokens,
                scope=request.scope,
                tokens=tokens,
                now_wall=self._context.clock.wall(),
                windows=self._context.layout.groups.windows,
            )
        except TicketRejected as error:
            _log.info(
                "cannot use the blocks of a prior turn: %s", error.message, extra={"request_id": request.request_id}
            )
            return None
        if ticket.held:
            return None
        return RemoteKv(ticket.num_tokens, FetchSource(ticket, 0), PEER, ticket.worker_id)

    async def _digests(self, request: prefill_pb2.PrefillRequest, item: StreamItem) -> tuple[bytes, ...]:
        update = item.update
        if update is None or update.export is None or item.export is None or not request.offer:
            return ()
        try:
            export = update.export
            num_full = export.num_tokens // self._context.layout.block_tokens
            return await self._publisher.publish(export.blocks, export.epochs, num_full=num_full)
        except BaseException:
            self._context.loop.release_export(item.export)  # cancelled before the offer was made: free the export
            raise

    def _answer(
        self,
        request: prefill_pb2.PrefillRequest,
        context: Context,
        tokens: list[int],
        item: StreamItem,
        seconds: float,
        digests: tuple[bytes, ...],
    ) -> prefill_pb2.PrefillResponse:
        update = item.update
        if update is None:
            raise Unavailable("the request ended without a sampled token")
        answer = prefill_pb2.PrefillResponse(
            first_token=wire.token_to_wire(update.tokens[0]) if update.tokens else None,
            weight_version=item.weights.name,
            finish_reason=wire.finish_to_wire(update.finish_reason),
            num_cached_tokens=update.num_cached,
            num_loaded_tokens=update.num_loaded,
            num_written_tokens=update.num_written,
            computed=computed_wire.computed_to_wire(update.computed),
            prefill_seconds=seconds,
            prompt_logprobs=wire.scores_to_wire(update.scores),
            retention=None if item.retention is None else retention_wire.retention_to_wire(item.retention),
        )
        if item.export is None or update.export is None:
            return answer
        # KV of other weights than those in use has no offer: its fingerprint would be that of the weights in use.
        if not request.offer or item.weights != self._context.loop.weights:
            self._context.loop.release_export(item.export)
            return answer
        requested_id = TicketId(request.ticket_id) if request.ticket_id else None
        offered = self._desk.offer(item.export, update.export, tokens, request.scope, requested_id, digests=digests)
        answer.ticket, answer.ticket_id = offered.sealed, offered.ticket_id

        def release_if_undelivered(call: Context) -> None:
            # If the caller has not received the response, it cannot release the ticket.
            if call.cancelled():
                self._desk.release(offered.ticket_id)

        context.add_done_callback(release_if_undelivered)  # type: ignore[arg-type]  # the stubs expect a class
        return answer
