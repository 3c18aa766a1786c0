"""One engine with its services: a process of role prefill, decode or both has one, of role split two."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import Incarnation, WorkerId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.engine import one_secret
from kvferry.engine.messages import EngineRequest
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.populate import populate_in_background
from kvferry.kv.ticket import Keyring
from kvferry.kv.tiers.registry import open_tiers
from kvferry.kv.tiers.stack import TierStack
from kvferry.rpc.inference import inference_service
from kvferry.rpc.model_text import text_model_of
from kvferry.rpc.server import RpcServer, Service, start_server
from kvferry.rpc.text_service import TextService
from kvferry.v1 import (
    decode_pb2_grpc,
    kv_events_pb2_grpc,
    kv_transfer_pb2_grpc,
    prefill_pb2_grpc,
    worker_admin_pb2_grpc,
)
from kvferry.v1.worker_admin_pb2 import StatusResponse
from kvferry.workers.admin import AdminService
from kvferry.workers.build import BuiltEngine, LoadedModel
from kvferry.workers.config import WorkerConfig
from kvferry.workers.context import WorkerContext, sequence_id
from kvferry.workers.decode import DecodeService
from kvferry.workers.following import Following
from kvferry.workers.head_start import HeadStart
from kvferry.workers.kv_events import CacheFeed, KvEventsService
from kvferry.workers.local import LocalSource
from kvferry.workers.loop import EngineLoop
from kvferry.workers.offer_desk import OfferDesk
from kvferry.workers.peers import GrpcPeerControl
from kvferry.workers.prefill import PrefillService
from kvferry.workers.transfer import TransferService

LIVENESS = "liveness"
"""Health's name, on the port of WorkerAdmin, for whether the process lives, whatever it is ready for."""
_WARM_UP_TOKENS = 2
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """What one unit of a process is and where it listens."""

    role: str
    listen: str
    admin: str


@dataclass(slots=True)
class _Running:
    work: RpcServer
    admin: RpcServer
    admin_service: AdminService
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class WorkerUnit:
    """Owns an engine, its thread, its transport and its two servers, from `start` to `stop`."""

    def __init__(
        self,
        config: WorkerConfig,
        place: UnitPlace,
        model: LoadedModel,
        built: BuiltEngine,
        *,
        incarnation: Incarnation,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config, self._place, self._model, self._built = config, place, model, built
        self._keyring = Keyring(config.ticket_secrets)
        self._cache = CacheFeed(incarnation)
        self._loop = EngineLoop(
            built.engine, name=f"engine-{place.role}", on_failure=on_failure, on_cache_changes=self._cache.apply
        )
        self.context = WorkerContext(
            incarnation=incarnation,
            role=place.role,
            model=model.source.config.name,
            model_digest=model.source.digest,
            layout=built.layout,
            connector=config.connector,
            domain=built.transport.domain,
            max_model_tokens=built.engine.max_model_tokens,
            loop=self._loop,
            clock=clock,
        )
        self._desk = OfferDesk(self.context, self._keyring, config.offers, built.transport)
        self._control = GrpcPeerControl(lambda: self.context.identity)
        self._tiers: TierStack | None = None
        self._fetcher = Fetcher(
            built.transport, self._control, built.layout, self._loop.post, clock=clock, pages=built.memory.pages
        )
        self._running: _Running | None = None
        self._stopped = threading.Event()
        self._service: AdminService | None = None

    async def start(self) -> None:
        """Bind, serve, and run the engine's thread. Not ready before `warm_up`.

        Raises:
            UsageError: an address cannot be bound.
        """
        self._built.engine.attach_loader(self._fetcher)
        self._tiers = await asyncio.to_thread(self._open_tiers)
        if self._tiers is not None:
            self._built.engine.attach_tiers(self._tiers)
        self._loop.start()
        work = await start_server(self._place.listen, self._services())
        host, _, port = work.address.rpartition(":")
        self.context.address = f"{_in_address(self._config.advertise_host or host)}:{port}"
        self.context.worker_id = WorkerId(self._config.worker_id or self.context.address)

        async def not_ready() -> None:
            await work.set_ready(False)

        service = AdminService(self.context, self._desk, work.calls, self._tiers, on_drain=not_ready)
        try:
            admin = await start_server(
                self._place.admin,
                [
                    Service(
                        "kvferry.v1.WorkerAdmin",
                        lambda s: worker_admin_pb2_grpc.add_WorkerAdminServicer_to_server(service, s),
                    )
                ],
            )
        except KvferryError:
            await work.stop(0)
            raise
        self._service = service
        self._running = _Running(work, admin, service, [asyncio.create_task(self._desk.run())])
        await admin.set_ready(True)
        await admin.set_ready(True, LIVENESS)

    async def warm_up(self) -> None:
        """Compute and draw real tokens, then take work."""
        request = EngineRequest(
            request_id=sequence_id("warm-up", 0),
            token_ids=[0] * min(self._built.layout.block_tokens + 1, self.context.max_model_tokens - _WARM_UP_TOKENS),
            sampling=SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True),
        )
        with self._loop.submit(request) as stream:
            async for _ in stream:
                pass
        if self._running is None:
            raise Unavailable("the worker was stopped while it started")
        self.context.ready = True
        populate_in_background(self._built.memory.pages, self._stopped)
        if not self.context.draining:
            await self._running.work.set_ready(True)

    async def stop(self, drain_seconds: float) -> None:
        """Drain, then end everything; what still runs is told to go on elsewhere. Idempotent."""
        self._stopped.set()
        running, self._running = self._running, None
        if running is None:
            return
        self._cache.close()  # its streams never end by themselves
        if not await running.admin_service.drain(drain_seconds):
            self._loop.cut(Unavailable("this worker is stopping; ask another", reason="DRAINING"))
        await running.work.stop(_FLUSH_SECONDS)
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        await running.admin.stop(_FLUSH_SECONDS)
        await self._loop.stop()  # first, so that it starts no more fetches
        self._fetcher.close()
        if self._tiers is not None:
            self._tiers.close()
        self._built.transport.close()
        self._control.close()

    def hasten(self) -> None:
        """End the waiting of `stop`, under way or to come."""
        if self._service is not None:
            self._service.hasten()

    def status(self) -> StatusResponse:
        """What it is and holds now, as WorkerAdmin says it."""
        return StatusResponse() if self._service is None else self._service.status()

    @property
    def admin_address(self) -> str:
        """Of WorkerAdmin, as bound."""
        return "" if self._running is None else self._running.admin.address

    def _namer(self, tenant: str) -> BlockNamer:
        """As the engine names blocks; its own namers are its thread's."""
        layout = self._built.layout
        secret = one_secret(self._config.tenant_secret)(tenant)
        return BlockNamer(tenant=secret, fingerprint=layout.fingerprint, block_tokens=layout.block_tokens)

    def _open_tiers(self) -> TierStack | None:
        config, layout = self._config, self._built.layout
        if not config.tiers:
            return None
        blocks = config.tier_object_tokens // layout.block_tokens
        return TierStack(
            open_tiers(
                config.tiers,
                object_bytes=blocks * layout.block_bytes,
                secret=config.tenant_secret,
                clock=self.context.clock,
            ),
            self._built.memory.pages,
            block_bytes=layout.block_bytes,
            object_blocks=blocks,
            listener=self._loop.post,
            clock=self.context.clock,
        )

    def _services(self) -> list[Service]:
        following = Following()
        prefill = PrefillService(self.context, self._desk, self._keyring, following)
        transfer = TransferService(self.context, self._desk, self._built.transport, following)
        decode = DecodeService(self.context, self._keyring, self._control, HeadStart(self.context, self._namer))
        events = KvEventsService(self._cache)
        feed = Service("kvferry.v1.KvEvents", lambda s: kv_events_pb2_grpc.add_KvEventsServicer_to_server(events, s))
        pages = Service(
            "kvferry.v1.KvTransfer", lambda s: kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(transfer, s)
        )
        makers = {
            "prefill": [
                Service("kvferry.v1.Prefill", lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, s))
            ],
            "decode": [Service("kvferry.v1.Decode", lambda s: decode_pb2_grpc.add_DecodeServicer_to_server(decode, s))],
        }
        if self._place.role != "both":
            return [*makers[self._place.role], pages, feed]
        text = TextService(
            LocalSource(self.context),
            text_model_of(self._model.source),
            clock=self.context.clock,
            context_tokens=lambda: self.context.max_model_tokens,
        )
        return [*makers["prefill"], *makers["decode"], pages, feed, inference_service(text)]


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
