"""The `WorkerAdmin` service: what the worker is, what it holds, and how it is told to stop taking work."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvferry.core.errors import InvalidRequest
from kvferry.kv.offers import OfferState
from kvferry.kv.tiers.stack import TierStack
from kvferry.rpc.calls import OpenCalls
from kvferry.v1 import worker_admin_pb2, worker_admin_pb2_grpc
from kvferry.workers.context import WorkerContext
from kvferry.workers.offer_desk import OfferDesk

Context = grpc.aio.ServicerContext[Any, Any]

_POLL_SECONDS = 0.02
_MAX_DRAIN_SECONDS = 3600.0


class AdminService(worker_admin_pb2_grpc.WorkerAdminServicer):
    """One engine's operation."""

    def __init__(
        self,
        context: WorkerContext,
        desk: OfferDesk,
        calls: OpenCalls,
        tiers: TierStack | None = None,
        *,
        on_drain: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            calls: of the server that takes work, not of the one that serves this.
            on_drain: called once, when new work begins to be refused.
        """
        self._on_drain = on_drain
        self._is_hastened = False
        self._tiers = tiers
        self._context = context
        self._desk = desk
        self._calls = calls

    async def Status(
        self, request: worker_admin_pb2.StatusRequest, context: Context
    ) -> worker_admin_pb2.StatusResponse:
        return self.status()

    def status(self) -> worker_admin_pb2.StatusResponse:
        """What the worker is and holds now."""
        own = self._context
        return worker_admin_pb2.StatusResponse(
            identity=own.identity,
            role=own.role,
            model=own.model,
            model_digest=own.model_digest,
            fingerprint=own.layout.fingerprint,
            connector=own.connector,
            domain=own.domain,
            ready=own.ready,
            draining=own.draining,
            max_model_tokens=own.max_model_tokens,
            block_tokens=own.layout.block_tokens,
            dtype=own.layout.dtype,
            load=self._load(),
            tiers=self._tier_statuses(),
            family=own.layout.family,
        )

    async def Drain(self, request: worker_admin_pb2.DrainRequest, context: Context) -> worker_admin_pb2.DrainResponse:
        if not 0 <= request.timeout_seconds <= _MAX_DRAIN_SECONDS:
            raise InvalidRequest(
                f"timeout_seconds must be from 0 to {_MAX_DRAIN_SECONDS:.0f}, not {request.timeout_seconds}",
                field="timeout_seconds",
            )
        return worker_admin_pb2.DrainResponse(idle=await self.drain(request.timeout_seconds))

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuse new work, wait for running work and offers to end; whether they did in time."""
        if not self._context.draining:
            self._context.draining = True
            await self._on_drain()
        deadline = self._context.clock.monotonic() + timeout_seconds
        while not self._is_idle():
            if self._is_hastened or self._context.clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def hasten(self) -> None:
        """End all draining, now and later, without waiting."""
        self._is_hastened = True

    def _is_idle(self) -> bool:
        load = self._context.loop.load
        held = load.running or load.waiting or load.loading or load.transfers or load.exports or load.stores
        return not held and not self._calls.count and self._desk.is_idle

    def _load(self) -> worker_admin_pb2.WorkerLoad:
        load = self._context.loop.load
        return worker_admin_pb2.WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            loading=load.loading,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_quarantined=load.blocks_quarantined,
            tickets_offered=self._desk.count(OfferState.OFFERED),
            tickets_claimed=self._desk.count(OfferState.CLAIMED) + self._desk.count(OfferState.QUIESCE),
            transfers=load.transfers,
            open_calls=self._calls.count,
            stores=load.stores,
        )

    def _tier_statuses(self) -> list[worker_admin_pb2.TierStatus]:
        if self._tiers is None:
            return []
        return [
            worker_admin_pb2.TierStatus(
                name=tier.name,
                bytes_held=tier.num_bytes,
                hits=stats.hits,
                misses=stats.misses,
                loads=stats.loads,
                bytes_loaded=stats.bytes_loaded,
                load_seconds=stats.seconds,
                failures=stats.failures,
                stores=stats.stores,
                bytes_stored=stats.bytes_stored,
                dropped=stats.dropped,
            )
            for tier in self._tiers.tiers
            for stats in [self._tiers.stats[tier.name]]
        ]
