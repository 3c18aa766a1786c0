"""The decode side of a KV prefetch: fetches a prompt's blocks while a prefill worker is still computing it.

    P   chunk 0 ......| chunk 1 ......| chunk 2 ......| first token, ticket
    D                 | fetch chunk 0 | fetch chunk 1 |                     Run: fetches chunk 2, generates

P is the prefill worker, D the decode worker. P reports blocks as they become full (`KvTransfer.WatchBlocks`). D reads
them as with a ticket without a lease: the epochs prove that P's pages still contained the reported blocks, and the
seal of each message proves that a worker of the pool paired these names with these pages. Fetched blocks stay in the
prefix cache.
"""

import logging
from collections.abc import Callable, Sequence
from uuid import uuid4

import grpc

from kvferry.core.errors import TicketRejected
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash, RequestId
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetchRequest
from kvferry.kv.interface.connector import FetchSource
from kvferry.kv.interface.seals import BlocksSeal
from kvferry.kv.interface.ticket import Keyring, Ticket
from kvferry.rpc.access.call_keys import CallSigner
from kvferry.rpc.access.signed_channel import signed
from kvferry.rpc.channel import open_channel
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import decode_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc
from kvferry.workers.calls.context import WorkerContext

_log = logging.getLogger(__name__)

_SECONDS = 600.0
"""Time limit in seconds for following a prompt."""


class KvPrefetcher:
    """Prefetches the KV of prompts that prefill workers are computing. Used only on the event loop's thread."""

    def __init__(
        self,
        context: WorkerContext,
        namer: Callable[[str], BlockNamer],
        signer: CallSigner,
        keyring: Keyring,
        tls: PoolTls | None = None,
    ) -> None:
        """
        Args:
            context: state of the worker.
            namer: function that returns a tenant's block namer; names must equal the engine's.
            signer: creates the tokens for this worker's calls.
            keyring: checks that the reported blocks were sealed with the pool's key.
            tls: TLS of the pool; `None` for plain connections.
        """
        self._tls = tls
        self._context = context
        self._namer = namer
        self._signer = signer
        self._keyring = keyring

    async def run(self, request: decode_pb2.PrefetchKvRequest, tokens: Sequence[int]) -> int:
        """Follow a prompt to its end and return the number of fetched blocks. On a failure, stop early without
        raising.

        Args:
            request: names the prefill worker and the ticket.
            tokens: tokens of the prompt.
        """
        names = self._namer(request.scope).chain(tokens[:-1])
        watched = kv_transfer_pb2.WatchBlocksRequest(
            ticket_id=request.ticket_id,
            incarnation=request.prefill.incarnation,
            fingerprint=self._context.layout.fingerprint,
        )
        fetched = num_reported = number = 0
        try:
            async with open_channel(request.prefill_address, self._tls) as channel:
                stub = kv_transfer_pb2_grpc.KvTransferStub(signed(channel, self._signer, request.prefill_address))
                async for report in stub.WatchBlocks(watched, timeout=_SECONDS):
                    self._keyring.check(_sealed_content(request, number, report), report.seal)
                    number += 1
                    count = len(report.names)
                    if list(report.names) == names[:count]:
                        num_reported = 0  # the prompt was preempted and restarted from its first block
                    is_match = names[num_reported : num_reported + count] == list(report.names)
                    lengths = {len(report.block_ids), len(report.epochs), len(report.digests or report.epochs)}
                    if not is_match or lengths != {count}:
                        _log.warning(
                            "worker %s reported blocks of a different prompt",
                            request.prefill.worker_id,
                            extra={"request_id": request.request_id},
                        )
                        break
                    num_reported += count
                    fetched += await self._fetch(request, tokens, names[:num_reported], report)
        except grpc.aio.AioRpcError as error:
            _log.info("KV prefetch ended: %s", error.details(), extra={"request_id": request.request_id})
        except TicketRejected as error:
            _log.warning("KV prefetch ended: %s", error.message, extra={"request_id": request.request_id})
        return fetched

    async def _fetch(
        self,
        request: decode_pb2.PrefetchKvRequest,
        tokens: Sequence[int],
        names: Sequence[BlockHash],
        report: kv_transfer_pb2.WatchBlocksResponse,
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
            scope=request.scope,
            tokens_digest=b"",
            num_tokens=len(report.block_ids) * size,
            block_ids=tuple(report.block_ids),
            epochs=tuple(report.epochs),
            expires_wall=own.clock.wall() + _SECONDS,
            held=False,
            digests=tuple(report.digests),
        )
        outcome = await own.loop.prefetch_kv(
            KvPrefetchRequest(
                request_id=RequestId(f"{request.request_id}/ahead/{uuid4().hex[:8]}"),
                source=FetchSource(ticket, 0),
                first_block=len(names) - len(report.block_ids),
                names=tuple(names),
                tokens=tuple(tokens[: len(names) * size]),
            )
        )
        if outcome.failure is not None:
            _log.info("KV prefetch failed: %s", outcome.failure, extra={"request_id": request.request_id})
        return outcome.num_blocks


def _sealed_content(
    request: decode_pb2.PrefetchKvRequest, number: int, report: kv_transfer_pb2.WatchBlocksResponse
) -> BlocksSeal:
    """Return the fields of message `number` that its seal covers."""
    return BlocksSeal(
        request.ticket_id,
        request.prefill.incarnation,
        number,
        tuple(report.block_ids),
        tuple(report.epochs),
        tuple(report.names),
        tuple(report.digests),
    )
