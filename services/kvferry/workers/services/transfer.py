"""`KvTransfer` service: returns the transport address of the pages to readers and manages the leases of offers."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import TicketId
from kvferry.kv.handoff.offers import check_incarnation
from kvferry.kv.interface.connector import Transport
from kvferry.kv.interface.seals import AddressSeal, BlocksSeal
from kvferry.kv.interface.ticket import Keyring
from kvferry.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.calls.context import WorkerContext
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.handoff.page_publisher import PagePublisher
from kvferry.workers.handoff.peer_layouts import check_equal, check_reader, layout_to_wire
from kvferry.workers.handoff.prefill_progress import PrefillProgress

Context = grpc.aio.ServicerContext[Any, Any]


class TransferService(kv_transfer_pb2_grpc.KvTransferServicer):
    """Implements `KvTransfer` for one worker."""

    def __init__(
        self,
        context: WorkerContext,
        desk: OfferDesk,
        keyring: Keyring,
        transport: Transport,
        following: PrefillProgress,
        publisher: PagePublisher,
    ) -> None:
        """
        Args:
            context: state of the worker.
            desk: the open offers and their leases.
            keyring: signs addresses and reports of full blocks.
            transport: exposes the pages; its address is returned by `Describe`.
            following: the prompts under prefill, for `WatchBlocks`.
            publisher: makes pages readable by peers before they are reported.
        """
        self._publisher = publisher
        self._context = context
        self._following = following
        self._desk = desk
        self._keyring = keyring
        self._transport = transport

    async def Describe(
        self, request: kv_transfer_pb2.DescribeRequest, context: Context
    ) -> kv_transfer_pb2.DescribeResponse:
        check_incarnation(request.incarnation, self._context.incarnation)
        check_reader(request.fingerprint, request.layout, self._context.layout)
        if request.connector != self._context.connector:
            raise TicketRejected(
                f"this worker uses connector {self._context.connector!r}, not {request.connector!r}",
                reason="TICKET_CONNECTOR",
                field="connector",
            )
        own = self._context
        address = self._transport.address()
        sealed = AddressSeal(own.incarnation, own.connector, own.layout.fingerprint, address)
        return kv_transfer_pb2.DescribeResponse(
            identity=own.identity,
            fingerprint=own.layout.fingerprint,
            address=address,
            layout=layout_to_wire(own.layout),
            seal=self._keyring.sign(sealed),
        )

    async def Claim(self, request: kv_transfer_pb2.ClaimRequest, context: Context) -> kv_transfer_pb2.ClaimResponse:
        check_incarnation(request.incarnation, self._context.incarnation)
        lease = self._desk.claim(TicketId(request.ticket_id), request.attempt, request.reader_index)
        return kv_transfer_pb2.ClaimResponse(lease_seconds=lease)

    async def Renew(self, request: kv_transfer_pb2.RenewRequest, context: Context) -> kv_transfer_pb2.RenewResponse:
        check_incarnation(request.incarnation, self._context.incarnation)
        lease = self._desk.renew(TicketId(request.ticket_id), request.attempt, request.reader_index)
        return kv_transfer_pb2.RenewResponse(lease_seconds=lease)

    async def Finish(self, request: kv_transfer_pb2.FinishRequest, context: Context) -> kv_transfer_pb2.FinishResponse:
        check_incarnation(request.incarnation, self._context.incarnation)
        done = request.outcome == kv_transfer_pb2.FinishRequest.OUTCOME_DONE
        self._desk.finish(TicketId(request.ticket_id), request.attempt, request.reader_index, done=done)
        return kv_transfer_pb2.FinishResponse()

    async def WatchBlocks(
        self, request: kv_transfer_pb2.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[kv_transfer_pb2.WatchBlocksResponse]:
        check_incarnation(request.incarnation, self._context.incarnation)
        check_equal(request.fingerprint, self._context.layout)
        number = 0
        async for progress in self._following.follow(request.ticket_id):
            digests = await self._publisher.publish(progress.blocks, progress.epochs)
            sealed = BlocksSeal(
                request.ticket_id,
                self._context.incarnation,
                number,
                tuple(progress.blocks),
                tuple(progress.epochs),
                tuple(progress.names),
                tuple(digests),
            )
            yield kv_transfer_pb2.WatchBlocksResponse(
                block_ids=progress.blocks,
                epochs=progress.epochs,
                names=progress.names,
                digests=digests,
                seal=self._keyring.sign(sealed),
            )
            number += 1
