"""`WorkerAdmin` service: reports a worker's identity and load, and drains the worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from kvferry.core.errors import InvalidRequest, Unavailable
from kvferry.core.load import WorkerLoad
from kvferry.engine.schedule.adapters.adapter_store import AdapterInfo
from kvferry.kv.handoff.offers import OfferState
from kvferry.kv.tiers.stack import TierStack
from kvferry.rpc.access.call_keys import MAX_NONCE_BYTES, CallVerifier
from kvferry.rpc.access.guard import token_of
from kvferry.rpc.call_interceptor import OpenCalls
from kvferry.rpc.worker_wire import adapter_to_wire, load_to_wire
from kvferry.v1 import common_pb2, worker_admin_pb2, worker_admin_pb2_grpc
from kvferry.workers.adapters.adapter_loader import AdapterLoader
from kvferry.workers.adapters.listed_adapters import ListedAdapters
from kvferry.workers.calls.context import WorkerContext
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.services.pinning import PrefixPinning
from kvferry.workers.services.profiling import Profiling
from kvferry.workers.updates.pause_keeper import PauseKeeper
from kvferry.workers.updates.weight_updates import WeightUpdates

Context = grpc.aio.ServicerContext[Any, Any]

_POLL_SECONDS = 0.02
_MAX_DRAIN_SECONDS = 3600.0


class AdminService(worker_admin_pb2_grpc.WorkerAdminServicer):
    """Implements `WorkerAdmin` for one engine."""

    def __init__(
        self,
        context: WorkerContext,
        desk: OfferDesk,
        calls: OpenCalls,
        verifier: CallVerifier,
        tiers: TierStack | None = None,
        adapters: AdapterLoader | None = None,
        listed: ListedAdapters | None = None,
        *,
        pauses: PauseKeeper | None = None,
        weights: WeightUpdates | None = None,
        on_drain: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            context: state of the worker.
            desk: the open offers.
            calls: counter of calls in flight to the request server, excluding those to the admin server.
            verifier: the admin server's verifier, which proves to callers that this worker has the pool's secret.
            tiers: the KV tiers, for their statistics; `None` without tiers.
            adapters: loads adapters while serving; `None` refuses calls that load adapters.
            listed: loads the adapters of the worker's list; its failures are part of the status. `None` without a list.
            pauses: pauses generation, and is shared with `weights`.
            weights: changes the weights; `None` refuses calls that do.
            on_drain: called once when draining begins.
        """
        self._pauses = pauses or PauseKeeper(context, desk)
        self._weights = weights
        self._on_drain = on_drain
        self._is_cut_short = False
        self._tiers = tiers
        self._context = context
        self._desk = desk
        self._calls = calls
        self._verifier = verifier
        self._adapters = adapters
        self._listed = listed
        self._profiling = Profiling(context)
        self._pinning = PrefixPinning(context)

    async def Status(
        self, request: worker_admin_pb2.StatusRequest, context: Context
    ) -> worker_admin_pb2.StatusResponse:
        if len(request.nonce) > MAX_NONCE_BYTES:
            raise InvalidRequest(
                f"nonce has {len(request.nonce)} bytes; at most {MAX_NONCE_BYTES} are accepted", field="nonce"
            )
        status = self.status()
        if request.nonce:
            port = self._context.address.rpartition(":")[2].encode()
            status.proof = self._verifier.proof(token_of(context.invocation_metadata()), request.nonce + port)
        return status

    def status(self) -> worker_admin_pb2.StatusResponse:
        """Return the worker's current status."""
        own = self._context
        return worker_admin_pb2.StatusResponse(
            identity=own.identity,
            role=own.role,
            model=own.model,
            model_digest="" if self._weights is None else self._weights.status.digest,
            fingerprint=own.layout.fingerprint,
            connector=own.connector,
            domain=own.domain,
            ready=own.ready,
            draining=own.draining,
            max_model_tokens=own.max_model_tokens,
            block_tokens=own.layout.block_tokens,
            dtype=own.layout.dtype,
            load=load_to_wire(self.load()),
            tiers=self._tier_statuses(),
            family=own.layout.family,
            max_sequences=own.max_sequences,
            num_steps=own.loop.num_steps,
            device=own.device,
            staged=own.is_staged,
            adapters=[_adapter(info) for info in own.loop.adapters if info.retired_until is None],
            pause=self._pauses.status(),
            weights=None if self._weights is None else self._weights.status,
            adapter_failures={} if self._listed is None else self._listed.failures,
            retired_adapters=[
                _adapter(info)
                for info in own.loop.adapters
                if info.retired_until is not None and own.clock.monotonic() < info.retired_until
            ],
        )

    async def Drain(self, request: worker_admin_pb2.DrainRequest, context: Context) -> worker_admin_pb2.DrainResponse:
        if not 0 <= request.timeout_seconds <= _MAX_DRAIN_SECONDS:
            raise InvalidRequest(
                f"timeout_seconds must be between 0 and {_MAX_DRAIN_SECONDS:.0f}, not {request.timeout_seconds}",
                field="timeout_seconds",
            )
        return worker_admin_pb2.DrainResponse(idle=await self.drain(request.timeout_seconds))

    async def ResetPrefixCache(
        self, request: worker_admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> worker_admin_pb2.ResetPrefixCacheResponse:
        count = await self._context.loop.reset_prefix_cache()
        return worker_admin_pb2.ResetPrefixCacheResponse(num_blocks=count)

    async def PinPrefix(
        self, request: worker_admin_pb2.PinPrefixRequest, context: Context
    ) -> worker_admin_pb2.PinPrefixResponse:
        return await self._pinning.pin(request, context.time_remaining())

    async def UnpinPrefix(
        self, request: worker_admin_pb2.UnpinPrefixRequest, context: Context
    ) -> worker_admin_pb2.UnpinPrefixResponse:
        return await self._pinning.unpin(request)

    async def LoadAdapter(
        self, request: worker_admin_pb2.LoadAdapterRequest, context: Context
    ) -> worker_admin_pb2.AdapterResponse:
        adapter = await self._loader().load(request.name, request.path)
        return worker_admin_pb2.AdapterResponse(adapter=adapter_to_wire(adapter))

    async def UnloadAdapter(
        self, request: worker_admin_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_admin_pb2.AdapterResponse:
        adapter = await self._loader().unload(request.name)
        return worker_admin_pb2.AdapterResponse(adapter=adapter_to_wire(adapter))

    async def SetPause(
        self, request: worker_admin_pb2.SetPauseRequest, context: Context
    ) -> worker_admin_pb2.PauseStatus:
        return await self._pauses.set(request)

    async def PrepareWeights(
        self, request: worker_admin_pb2.PrepareWeightsRequest, context: Context
    ) -> worker_admin_pb2.PrepareWeightsResponse:
        return await self._changes().prepare(request)

    async def CommitWeights(
        self, request: worker_admin_pb2.CommitWeightsRequest, context: Context
    ) -> worker_admin_pb2.WeightsStatus:
        return await self._changes().commit(request)

    async def DiscardWeights(
        self, request: worker_admin_pb2.DiscardWeightsRequest, context: Context
    ) -> worker_admin_pb2.DiscardWeightsResponse:
        self._changes().discard(request.revision)
        return worker_admin_pb2.DiscardWeightsResponse()

    async def Profile(
        self, request: worker_admin_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[worker_admin_pb2.ProfilePart]:
        async for part in self._profiling.record(request):
            yield part

    def _changes(self) -> WeightUpdates:
        if self._weights is None:
            raise InvalidRequest("this worker does not change its weights", reason="WEIGHTS_NOT_SUPPORTED")
        return self._weights

    def _loader(self) -> AdapterLoader:
        if self._adapters is None:
            raise InvalidRequest(
                "this worker does not support adapters; start it with --adapter-slots above 0", field="lora_name"
            )
        return self._adapters

    async def drain(self, timeout_seconds: float) -> bool:
        """Reject new requests, end the pins, and wait for running requests and offers; return whether they ended in
        time."""
        if not self._context.draining:
            self._context.draining = True
            with suppress(Unavailable):  # the engine has stopped
                await self._context.loop.close_pins()
            await self._on_drain()
        deadline = self._context.clock.monotonic() + timeout_seconds
        while not self._is_idle():
            if self._is_cut_short or self._context.clock.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def stop_draining(self) -> None:
        """Make the current and all later calls of `drain` return without waiting."""
        self._is_cut_short = True

    def _is_idle(self) -> bool:
        load = self._context.loop.load
        held = load.num_requests or load.transfers or load.exports or load.stores
        return not held and not self._calls.count and self._desk.is_idle

    def load(self) -> WorkerLoad:
        """Return the resources that requests currently use in this worker."""
        return replace(
            self._context.loop.load,
            tickets_offered=self._desk.count(OfferState.OFFERED),
            tickets_claimed=self._desk.count(OfferState.CLAIMED) + self._desk.count(OfferState.QUIESCE),
            open_calls=self._calls.count,
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


def _adapter(info: AdapterInfo) -> common_pb2.Adapter:
    return common_pb2.Adapter(name=info.adapter.name, digest=info.adapter.digest, rank=info.rank)
