"""The decode side of a head start: fetches a prompt's blocks while a prefill worker still computes it.

    P   chunk 0 ......| chunk 1 ......| chunk 2 ......| first token, ticket
    D                 | fetch chunk 0 | fetch chunk 1 |                     Run: fetches chunk 2, generates

P tells of blocks as they become full (`KvTransfer.Follow`). They are read like a ticket that nothing holds: the epochs
prove that P's pages still held what it told of, and the *names* prove that it is the KV of our tokens, since nobody
without the pool's key can make them. What was fetched waits in the prefix cache.
"""

import logging
from collections.abc import Callable, Sequence
from uuid import uuid4

import grpc

from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash, RequestId
from kvferry.engine.ahead import AheadRequest
from kvferry.kv.connector import FetchSource
from kvferry.kv.ticket import Ticket
from kvferry.rpc.channel import open_channel
from kvferry.v1 import decode_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.context import WorkerContext

_log = logging.getLogger(__name__)

_SECONDS = 600.0
"""A prompt that takes longer to compute is followed no further."""


class HeadStart:
    """Fetches for prompts that others compute. Used on the event loop's thread only."""

    def __init__(self, context: WorkerContext, namer: Callable[[str], BlockNamer]) -> None:
        """
        Args:
            namer: names a tenant's blocks as the engine does.
        """
        self._context = context
        self._namer = namer

    async def run(self, request: decode_pb2.PrepareRequest, tokens: Sequence[int]) -> int:
        """Follow one prompt to its end; the blocks that were fetched. What goes wrong ends it, and is no error."""
        names = self._namer(request.tenant).chain(tokens[:-1])
        asked = kv_transfer_pb2.FollowRequest(
            ticket_id=request.ticket_id,
            incarnation=request.prefill.incarnation,
            fingerprint=self._context.layout.fingerprint,
        )
        fetched = told = 0
        try:
            async with open_channel(request.prefill_address) as channel:
                async for news in kv_transfer_pb2_grpc.KvTransferStub(channel).Follow(asked, timeout=_SECONDS):
                    count = len(news.names)
                    if list(news.names) == names[:count]:
                        told = 0  # its first blocks: the prompt was preempted there, and begins anew
                    ours = names[told : told + count] == list(news.names)
                    if not ours or not len(news.block_ids) == len(news.epochs) == count:
                        _log.warning(
                            "worker %s tells of blocks that are not this prompt's",
                            request.prefill.worker_id,
                            extra={"request_id": request.request_id},
                        )
                        break
                    told += count
                    fetched += await self._fetch(request, tokens, names[:told], news)
        except grpc.aio.AioRpcError as error:
            _log.info("no head start: %s", error.details(), extra={"request_id": request.request_id})
        return fetched

    async def _fetch(
        self,
        request: decode_pb2.PrepareRequest,
        tokens: Sequence[int],
        names: Sequence[BlockHash],
        news: kv_transfer_pb2.FollowResponse,
    ) -> int:
        own = self._context
        size = own.layout.block_tokens
        ticket = Ticket(
            ticket_id=request.ticket_id,
            worker_id=request.prefill.worker_id,
            incarnation=request.prefill.incarnation,
            control_address=request.prefill_address,
            connector=own.connector,
            fingerprint=own.layout.fingerprint,
            tenant=request.tenant,
            tokens_digest=b"",
            num_tokens=len(news.block_ids) * size,
            block_ids=tuple(news.block_ids),
            epochs=tuple(news.epochs),
            expires_wall=own.clock.wall() + _SECONDS,
            held=False,
        )
        outcome = await own.loop.fetch_ahead(
            AheadRequest(
                request_id=RequestId(f"{request.request_id}/ahead/{uuid4().hex[:8]}"),
                source=FetchSource(ticket, 0),
                first_block=len(names) - len(news.block_ids),
                names=tuple(names),
                tokens=tuple(tokens[: len(names) * size]),
            )
        )
        if outcome.failure is not None:
            _log.info("not fetched ahead: %s", outcome.failure, extra={"request_id": request.request_id})
        return outcome.num_blocks
