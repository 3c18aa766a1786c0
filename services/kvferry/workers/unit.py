"""A running worker unit: an engine with its services. A process has one unit, or two with role `split`."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.core.ids import Incarnation, WorkerId
from kvferry.core.sampling import SamplingParams
from kvferry.core.traces.spans import Tracer
from kvferry.engine.build import EnginePages, LoadedModel, engine_pages
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.kv.interface.connector import PageMemory
from kvferry.kv.populate import populate_in_background
from kvferry.rpc.access.call_keys import CallVerifier
from kvferry.rpc.server import RpcServer, Service, start_server
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import worker_admin_pb2_grpc
from kvferry.v1.worker_admin_pb2 import StatusResponse
from kvferry.workers.build import UnitEndpoint, UnitParts, build_unit
from kvferry.workers.calls.context import WorkerContext, sequence_id
from kvferry.workers.config import WorkerConfig
from kvferry.workers.services.admin import AdminService

LIVENESS = "liveness"
"""Health service name for liveness, independent of readiness."""
_WARM_UP_TOKENS = 2
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Servers:
    """The bound servers of a unit."""

    work: RpcServer
    admin: RpcServer
    administration: AdminService

    @classmethod
    async def bind(cls, parts: UnitParts) -> "_Servers":
        """Bind both ports, or none; the unit's id and address are then known.

        Raises:
            UsageError: an address cannot be bound.
        """
        config, context = parts.config, parts.context
        hosts = [config.advertise_host] if config.advertise_host else []
        credentials = None if parts.tls is None else parts.tls.server_credentials
        work = await start_server(
            parts.endpoint.listen,
            list(parts.services),
            credentials=credentials,
            verifier=CallVerifier(config.ticket_secrets),
            advertised_hosts=hosts,
        )
        host, _, port = work.address.rpartition(":")
        address = f"{_in_address(config.advertise_host or host)}:{port}"
        context.unit.bind(WorkerId(config.worker_id or address), address)

        async def not_ready() -> None:
            await work.set_ready(False)

        verifier = CallVerifier(config.ticket_secrets)
        service = AdminService(
            context, parts.desk, work.calls, verifier, parts.tiers, parts.adapters, parts.listed,
            pauses=parts.pauses, weights=parts.weights, on_drain=not_ready,
        )  # fmt: skip
        administration = Service(
            "kvferry.v1.WorkerAdmin", lambda s: worker_admin_pb2_grpc.add_WorkerAdminServicer_to_server(service, s)
        )
        try:
            admin = await start_server(
                parts.endpoint.admin,
                [administration],
                credentials=credentials,
                verifier=verifier,
                advertised_hosts=hosts,
            )
        except KvferryError:
            await work.stop(0)
            raise
        return cls(work, admin, service)


class WorkerUnit:
    """An engine with its thread, its transport and its two gRPC servers: create it with `start`, end it with `stop`."""

    def __init__(self, parts: UnitParts, servers: _Servers) -> None:
        """Start the tasks of a unit on the running event loop.

        Args:
            parts: the finished parts; the engine's thread runs.
            servers: the servers that serve them.
        """
        self.parts = parts
        self._servers = servers
        self._tasks = [asyncio.create_task(parts.desk.run())]
        self._stopped = threading.Event()

    @classmethod
    async def start(
        cls,
        config: WorkerConfig,
        endpoint: UnitEndpoint,
        model: LoadedModel,
        *,
        incarnation: Incarnation,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
        tls: PoolTls | None = None,
        tracer: Tracer | None = None,
        make_pages: Callable[[LoadedModel, PageMemory], EnginePages] = engine_pages,
    ) -> "WorkerUnit":
        """Build the parts (see `build_unit`), start the engine's thread, and bind both servers. The unit is not ready
        before `warm_up`.

        Raises:
            UsageError: an address cannot be bound, or the KV memory is too small for one request.
        """
        parts = await asyncio.to_thread(
            build_unit,
            config,
            endpoint,
            model,
            incarnation=incarnation,
            clock=clock,
            on_failure=on_failure,
            tls=tls,
            tracer=tracer,
            make_pages=make_pages,
        )
        parts.loop.start()
        servers = await _Servers.bind(parts)
        unit = cls(parts, servers)
        await servers.admin.set_ready(True)
        for server in (servers.work, servers.admin):
            await server.set_ready(True, LIVENESS)
        return unit

    async def warm_up(self) -> None:
        """Generate a few tokens, then report ready and accept requests.

        Raises:
            Unavailable: the worker was stopped meanwhile.
        """
        parts, context = self.parts, self.context
        request = EngineRequest(
            request_id=sequence_id("warm-up", 0),
            token_ids=[0] * min(context.layout.block_tokens + 1, context.max_model_tokens - _WARM_UP_TOKENS),
            sampling=SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True),
        )
        with parts.loop.submit(request) as stream:
            async for _ in stream:
                pass
        self._check_runs()
        if parts.listed is not None:
            await parts.listed.refresh()
            self._tasks.append(asyncio.create_task(parts.listed.run()))
        context.ready = True
        populate_in_background(parts.memory.pages, self._stopped)
        if not context.draining:
            await self._servers.work.set_ready(True)

    async def stop(self, drain_seconds: float) -> None:
        """Drain, then stop all parts; unfinished requests resume on other workers. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        parts, servers = self.parts, self._servers
        parts.cache.close()  # ends the event streams; otherwise the drain would wait for them
        if not await servers.administration.drain(drain_seconds):
            parts.loop.cut(Unavailable("this worker is stopping; retry on a different worker", reason="DRAINING"))
        await servers.work.stop(_FLUSH_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await servers.admin.stop(_FLUSH_SECONDS)
        await asyncio.gather(parts.text_process.stop(), parts.constraints.stop())
        await parts.loop.stop()  # first, so that no further fetches start
        parts.fetcher.close()
        if parts.tiers is not None:
            parts.tiers.close()
        parts.pages.mirror.close()
        parts.transport.close()
        parts.control.close()

    def stop_draining(self) -> None:
        """End draining if it is in progress; otherwise, let `stop` skip draining."""
        self._servers.administration.stop_draining()

    def status(self) -> StatusResponse:
        """Return the current status, as reported by WorkerAdmin."""
        return self._servers.administration.status()

    async def report_health(self, address: str) -> RpcServer:
        """Serve the unit's health at another address without TLS, for probes.

        Raises:
            UsageError: the address cannot be bound.
            Unavailable: the worker was stopped while it started.
        """
        self._check_runs()
        return await start_server(address, [], statuses=self._servers.work.statuses)

    @property
    def context(self) -> WorkerContext:
        """State shared by the unit's services."""
        return self.parts.context

    @property
    def engine(self) -> Engine:
        """The engine, for reading its statistics; only its thread may call other methods."""
        return self.parts.engine

    @property
    def admin_address(self) -> str:
        """Bound address of WorkerAdmin, `host:port`."""
        return self._servers.admin.address

    def _check_runs(self) -> None:
        if self._stopped.is_set():
            raise Unavailable("the worker was stopped while it started")


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
