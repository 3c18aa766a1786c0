"""Worker unit: an engine with its services. A process has one unit, or two with role `split`."""

import asyncio
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.core.hashing import BlockNamer, BlockNamers, check_name
from kvferry.core.ids import Incarnation, WorkerId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.build import EnginePages, LoadedModel, build_engine, engine_pages
from kvferry.engine.engine import Engine
from kvferry.engine.execute.tensors.device import device_title
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.kv.fetcher import Fetcher
from kvferry.kv.interface.connector import PageMemory, TransportSetup
from kvferry.kv.interface.mirror import SAME_PAGES
from kvferry.kv.interface.ticket import Keyring
from kvferry.kv.populate import populate_in_background
from kvferry.kv.registry import open_transport
from kvferry.model.source import ModelSource
from kvferry.rpc.access.call_keys import CallSigner, CallVerifier, role_key
from kvferry.rpc.access.table import CallerRole
from kvferry.rpc.inference.inference import inference_service
from kvferry.rpc.server import RpcServer, Service, start_server
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.model_text import open_text_model, text_model_of
from kvferry.serving.text_process import TextProcess
from kvferry.serving.text_service import TextService
from kvferry.v1 import (
    common_pb2,
    decode_pb2_grpc,
    kv_events_pb2_grpc,
    kv_transfer_pb2_grpc,
    prefill_pb2_grpc,
    worker_admin_pb2_grpc,
)
from kvferry.v1.worker_admin_pb2 import StatusResponse
from kvferry.workers.adapters.adapter_loader import AdapterLoader
from kvferry.workers.adapters.listed_adapters import ListedAdapters
from kvferry.workers.calls.context import WorkerContext, sequence_id
from kvferry.workers.config import DIGEST, WorkerConfig
from kvferry.workers.handoff.kv_prefetch import KvPrefetcher
from kvferry.workers.handoff.offer_desk import OfferDesk
from kvferry.workers.handoff.page_publisher import PagePublisher
from kvferry.workers.handoff.peers import GrpcPeerControl
from kvferry.workers.handoff.prefill_progress import PrefillProgress
from kvferry.workers.local_source import LocalSource
from kvferry.workers.services.admin import AdminService
from kvferry.workers.services.decode import DecodeService
from kvferry.workers.services.kv_events import CacheFeed, KvEventsService
from kvferry.workers.services.prefill import PrefillService
from kvferry.workers.services.transfer import TransferService
from kvferry.workers.unit_parts import RunningServers, UnitParts
from kvferry.workers.worker_tiers import open_tier_stack

LIVENESS = "liveness"
"""Health service name for liveness, independent of readiness."""
_WARM_UP_TOKENS = 2
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class UnitEndpoint:
    """Role and addresses of a unit of a process."""

    role: str
    listen: str
    admin: str


class WorkerUnit:
    """An engine with its thread, its transport and its two gRPC servers."""

    context: WorkerContext
    """State shared by the unit's services; set by `start`."""

    def __init__(
        self,
        config: WorkerConfig,
        endpoint: UnitEndpoint,
        model: LoadedModel,
        *,
        incarnation: Incarnation,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
        tls: PoolTls | None = None,
        make_pages: Callable[[LoadedModel, PageMemory], EnginePages] = engine_pages,
    ) -> None:
        """
        Args:
            config: settings of the process.
            endpoint: role and addresses of this unit.
            model: the loaded model.
            incarnation: incarnation of this unit.
            clock: clock of all components.
            on_failure: called on the event loop after the engine has raised an unexpected error; the process should
                exit.
            tls: TLS of the pool; `None` for plain connections.
            make_pages: creates the engine's pages, separate from the memory that transports access.
        """
        self._make_pages, self._tls = make_pages, tls
        self._config, self._endpoint, self._model = config, endpoint, model
        self._incarnation = incarnation
        self._clock = clock
        self._on_failure = on_failure
        self._keyring = Keyring(config.ticket_secrets)
        self._signer = CallSigner(CallerRole.WORKER, role_key(config.ticket_secrets[0], CallerRole.WORKER))
        self._namers = BlockNamers(config.tenant_key)
        self._cache = CacheFeed(incarnation)
        self._cache.check_name = check_name(
            self._namers, fingerprint=model.layout.fingerprint, block_tokens=model.layout.block_tokens
        )
        self._worker_id = WorkerId("")
        self._running: RunningServers | None = None
        open_text = functools.partial(open_text_model, config.engine.model, config.engine.served_name)
        self._text_process, self._constraints = TextProcess(open_text), ConstraintCheck(open_text)
        self._stopped = threading.Event()
        self._service: AdminService | None = None
        self._listed: ListedAdapters | None = None

    async def start(self) -> None:
        """Create the engine, bind both servers, and start the engine's thread. The unit is not ready before `warm_up`.

        Raises:
            UsageError: an address cannot be bound, or the KV memory is too small for one request.
        """
        self._parts = parts = await asyncio.to_thread(self._build)
        self._loop = EngineLoop(
            parts.engine,
            parts.commands,
            name=f"engine-{self._endpoint.role}",
            on_failure=self._on_failure,
            on_cache_changes=self._cache.apply,
            stream_interval=self._config.engine.stream_interval,
        )
        self.context = WorkerContext(
            incarnation=self._incarnation,
            role=self._endpoint.role,
            model=self._model.config.name,
            model_digest=self._source.digest,
            layout=self._model.layout,
            connector=self._config.connector,
            domain=parts.transport.domain,
            max_model_tokens=parts.engine.max_model_tokens,
            max_sequences=self._config.engine.limits.max_sequences,
            device=device_title(self._model.model.device),
            is_staged=parts.pages.mirror is not SAME_PAGES,
            loop=self._loop,
            clock=self._clock,
        )
        self._desk = OfferDesk(self.context, self._keyring, self._config.offers, parts.transport)
        self._loop.start()
        hosts = [self._config.advertise_host] if self._config.advertise_host else []
        credentials = None if self._tls is None else self._tls.server_credentials
        work = await start_server(
            self._endpoint.listen,
            self._services(),
            credentials=credentials,
            verifier=self._verifier(),
            advertised_hosts=hosts,
        )
        host, _, port = work.address.rpartition(":")
        self.context.address = f"{_in_address(self._config.advertise_host or host)}:{port}"
        self.context.worker_id = self._worker_id = WorkerId(self._config.worker_id or self.context.address)

        async def not_ready() -> None:
            await work.set_ready(False)

        admin_verifier = self._verifier()
        adapters = AdapterLoader(self._model, self._loop, self._config.adapter_folder)
        if self._config.adapters_file:
            self._listed = ListedAdapters(Path(self._config.adapters_file), adapters, self._clock)
        service = AdminService(
            self.context,
            self._desk,
            work.calls,
            admin_verifier,
            parts.tiers,
            adapters,
            self._listed,
            on_drain=not_ready,
        )
        try:
            admin = await start_server(
                self._endpoint.admin,
                [
                    Service(
                        "kvferry.v1.WorkerAdmin",
                        lambda s: worker_admin_pb2_grpc.add_WorkerAdminServicer_to_server(service, s),
                    )
                ],
                credentials=credentials,
                verifier=admin_verifier,
                advertised_hosts=hosts,
            )
        except KvferryError:
            await work.stop(0)
            raise
        self._service = service
        self._running = RunningServers(work, admin, service, [asyncio.create_task(self._desk.run())])
        await admin.set_ready(True)
        for server in (work, admin):
            await server.set_ready(True, LIVENESS)

    def _build(self) -> UnitParts:
        """Create all components; blocks. Loader and tiers are created before the engine and use the same queue."""
        config, model = self._config, self._model
        model.check_serves()
        layout, num_blocks = model.layout, model.num_blocks
        setup = TransportSetup(
            listen_host=host_of(self._endpoint.listen),
            advertise_host=config.advertise_host.strip("[]"),
            secrets=config.ticket_secrets,
        )
        transport = open_transport(config.connector, self._incarnation, setup)
        memory = transport.allocate(num_blocks, layout.block_bytes)
        pages = self._make_pages(model, memory)
        commands = CommandQueue()
        control = GrpcPeerControl(self._identity, self._signer, self._keyring, self._tls)
        fetcher = Fetcher(
            transport,
            control,
            layout,
            commands.put,
            clock=self._clock,
            pages=memory.pages,
            mirror=pages.mirror,
            requires_digests=config.verify_kv == DIGEST,
        )
        tiers = open_tier_stack(config, memory, pages.mirror, layout, commands, self._clock)
        engine = build_engine(
            model,
            pages.runner,
            namers=BlockNamers(config.tenant_key),
            epochs=memory.epochs,
            loader=fetcher,
            tiers=tiers,
            post=commands.put,
        )
        return UnitParts(engine, commands, memory, pages, transport, control, fetcher, tiers)

    def _identity(self) -> common_pb2.WorkerIdentity:
        return common_pb2.WorkerIdentity(worker_id=self._worker_id, incarnation=self._incarnation)

    @property
    def _source(self) -> ModelSource:
        assert self._model.source is not None, "workers serve models with files"
        return self._model.source

    async def warm_up(self) -> None:
        """Generate a few tokens, then report ready and accept requests.

        Raises:
            Unavailable: the worker was stopped meanwhile.
        """
        request = EngineRequest(
            request_id=sequence_id("warm-up", 0),
            token_ids=[0] * min(self._model.layout.block_tokens + 1, self.context.max_model_tokens - _WARM_UP_TOKENS),
            sampling=SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True),
        )
        with self._loop.submit(request) as stream:
            async for _ in stream:
                pass
        if self._running is None:
            raise Unavailable("the worker was stopped while it started")
        if self._listed is not None:
            await self._listed.refresh()
            self._running.tasks.append(asyncio.create_task(self._listed.run()))
        self.context.ready = True
        populate_in_background(self._parts.memory.pages, self._stopped)
        if not self.context.draining:
            await self._running.work.set_ready(True)

    async def stop(self, drain_seconds: float) -> None:
        """Drain, then stop all components; unfinished requests resume on other workers. Idempotent."""
        self._stopped.set()
        running, self._running = self._running, None
        if running is None:
            return
        self._cache.close()  # ends the event streams; otherwise the drain would wait for them
        if not await running.admin_service.drain(drain_seconds):
            self._loop.cut(Unavailable("this worker is stopping; retry on a different worker", reason="DRAINING"))
        await running.work.stop(_FLUSH_SECONDS)
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        await running.admin.stop(_FLUSH_SECONDS)
        await asyncio.gather(self._text_process.stop(), self._constraints.stop())
        await self._loop.stop()  # first, so that no further fetches start
        parts = self._parts
        parts.fetcher.close()
        if parts.tiers is not None:
            parts.tiers.close()
        parts.pages.mirror.close()
        parts.transport.close()
        parts.control.close()

    def stop_draining(self) -> None:
        """End draining if it is in progress; otherwise, let `stop` skip draining."""
        if self._service is not None:
            self._service.stop_draining()

    def status(self) -> StatusResponse:
        """Return the current status, as reported by WorkerAdmin."""
        return StatusResponse() if self._service is None else self._service.status()

    @property
    def engine(self) -> Engine:
        """The engine, for reading its statistics; only its thread may call other methods."""
        return self._parts.engine

    async def report_health(self, address: str) -> RpcServer:
        """Serve the unit's health at another address without TLS, for probes. Call it after `start`.

        Raises:
            UsageError: the address cannot be bound.
            Unavailable: the worker was stopped while it started.
        """
        if self._running is None:
            raise Unavailable("the worker was stopped while it started")
        return await start_server(address, [], statuses=self._running.work.statuses)

    @property
    def admin_address(self) -> str:
        """Bound address of WorkerAdmin, `host:port`; empty before `start`."""
        return "" if self._running is None else self._running.admin.address

    def _namer(self, tenant: str) -> BlockNamer:
        """Return the tenant's block namer with the engine's parameters, for use on the event loop's thread."""
        layout = self._model.layout
        return self._namers.of(tenant, fingerprint=layout.fingerprint, block_tokens=layout.block_tokens)

    def _verifier(self) -> CallVerifier:
        """Create the verifier of one server's incoming calls."""
        return CallVerifier(self._config.ticket_secrets)

    def _services(self) -> list[Service]:
        following = PrefillProgress()
        publisher = PagePublisher(
            self._parts.memory.pages,
            self._model.layout.block_bytes,
            self._parts.pages.mirror,
            with_digests=self._config.verify_kv == DIGEST,
        )
        prefill = PrefillService(self.context, self._desk, self._keyring, following, publisher)
        transfer = TransferService(self.context, self._desk, self._keyring, self._parts.transport, following, publisher)
        prefetcher = KvPrefetcher(self.context, self._namer, self._signer, self._keyring, self._tls)
        decode = DecodeService(self.context, self._keyring, self._parts.control, prefetcher, publisher)
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
        if self._endpoint.role != "both":
            return [*makers[self._endpoint.role], pages, feed]
        source = LocalSource(self.context)
        text = TextService(
            source,
            text_model_of(self._source, self._config.parsers),
            clock=self.context.clock,
            context_tokens=lambda: self.context.max_model_tokens,
            process=self._text_process,
            constraints=self._constraints,
            adapters=lambda: [info.adapter for info in self._loop.adapters if info.retired_until is None],
            vectors=source,
            tracer=lambda: self.context.tracer,
        )
        return [*makers["prefill"], *makers["decode"], pages, feed, inference_service(text)]


def host_of(address: str) -> str:
    """Return the host of `host:port`; an IPv6 address is returned without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
