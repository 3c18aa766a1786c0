"""Assembles a gateway from fleet, dispatcher, HTTP, gRPC and admin servers; starts and drains it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.ids import new_incarnation
from kvferry.core.process.open_files import max_connections
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.config import DispatchConfig, FlowConfig, GatewayConfig
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.dispatch.dispatcher import Dispatcher
from kvferry.gateway.fleet.adapter_changes import AdapterChanges
from kvferry.gateway.fleet.cache_feeds.cache_feeds import CacheFeeds
from kvferry.gateway.fleet.cache_feeds.map_metrics import CacheMapCollector
from kvferry.gateway.fleet.cache_reset import CacheReset
from kvferry.gateway.fleet.endpoint_slices import EndpointSlices
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.fleet_report import fleet_report
from kvferry.gateway.fleet.membership import Knowledge, Membership
from kvferry.gateway.fleet.pins.fleet_pins import FleetPins
from kvferry.gateway.fleet.pool_api import PoolApi
from kvferry.gateway.fleet.readiness import FleetCollector, PoolCollector, can_serve, notes
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.gateway.http.admin_api import AdminApi
from kvferry.gateway.http.client_api import ClientApi
from kvferry.gateway.http.pin_routes import PinRoutes
from kvferry.gateway.http.server.http_server import HttpServer
from kvferry.gateway.http.server.tls import Certificate
from kvferry.gateway.observe.certificate_metrics import CertificateCollector
from kvferry.gateway.observe.dashboard.history import INTERVAL_SECONDS, History
from kvferry.gateway.observe.instruments import Instruments
from kvferry.gateway.observe.request_trace.trace_file import TraceFile
from kvferry.gateway.observe.request_trace.trace_line import TracedSample
from kvferry.rpc.channel import MAX_CLIENT_MESSAGE_BYTES
from kvferry.rpc.inference.inference import inference_service
from kvferry.rpc.otlp import open_tracer
from kvferry.rpc.server import MAX_CONNECTIONS, RpcServer, start_server
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess
from kvferry.serving.text_service import TextService

_log = logging.getLogger(__name__)
_SHARE_OF_FILES = 0.25
"""Share of the open files that is reserved for clients' gRPC connections."""
_IDLE_SECONDS = 60.0
"""Seconds without a call after which a client's gRPC connection is closed; its next call opens a new one."""
_CERTIFICATE_SECONDS = 10.0
"""Interval in seconds between checks for a renewed certificate."""
_TENANTS_SECONDS = 1.0
"""Interval in seconds between checks for a changed tenants file."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses that a gateway listens on, each `host:port`."""

    http: str
    grpc: str
    admin: str


class Gateway:
    """A running gateway: create it with `start`, drain it with `stop`."""

    def __init__(
        self,
        config: GatewayConfig,
        model: TextModel,
        clock: Clock,
        pool: PoolApi | None = None,
        text_process: TextProcess | None = None,
        constraints: ConstraintCheck | None = None,
        keys: WorkerKeys | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._certificate = None if config.tls is None else Certificate(*config.tls)
        self._pool_tls = None if config.pool_tls is None else PoolTls(config.pool_tls, is_worker=False)
        self._draining = False
        self._incarnation = new_incarnation()
        self._clock = clock
        self.instruments = Instruments()
        self._history = History()
        self.fleet = Fleet(config.fleet, model.name, keys, self._pool_tls, clock=clock)
        CertificateCollector({"pool": self._pool_tls, "clients": self._certificate}, self.instruments.registry)
        FleetCollector(self.fleet, model.name, self.instruments.registry)
        self.membership = Membership(self.fleet, None if pool is None else EndpointSlices(pool, clock))
        self.cache_map = CacheMap(clock, config.cache_map.max_blocks)
        self.cache_feeds = CacheFeeds(self.fleet, self.cache_map, config.cache_map, clock, config.tenant_key)
        CacheMapCollector(self.cache_map, self.cache_feeds, self.instruments.registry)
        self._holding = Holding(config.hold, str(config.fleet.pool))
        self._waker = None if pool is None else Waker(pool, self._holding, clock)
        PoolCollector(self.membership, self._holding, self._waker, self.instruments.registry)
        self._tenants = Tenants.load(config.tenants_file, config.http.api_keys_file, clock, config.probe_key)
        self.gate = FlowGate(
            self.fleet,
            clock,
            FlowConfig(
                config.max_queued,
                config.max_queued_bytes,
                config.class_weights,
                config.max_streams,
                config.retry.request_timeout_seconds,
            ),
            self._tenants,
            self.instruments,
            uncached=lambda scope, token_ids: self.dispatcher.uncached_tokens(scope, token_ids),
            holding=None if pool is None else self._holding,
            waker=self._waker,
        )
        self._request_trace = (
            None if config.request_trace is None else TraceFile(*config.request_trace, config.tenant_key)
        )
        self.dispatcher = Dispatcher(
            self.fleet,
            clock,
            DispatchConfig(config.routing, config.retry, config.max_streams, config.tenant_key),
            instruments=self.instruments,
            gate=None if pool is None else self.gate,
            cache_map=self.cache_map,
            step_places=self.gate.room.step_places,
            on_end=None if self._request_trace is None else self._trace_request,
        )
        self._tracer = open_tracer(config.traces, "kvferry-gateway", self._incarnation, clock)
        adapters = AdapterChanges(self.fleet)
        self.service = TextService(
            self.dispatcher,
            model,
            clock,
            context_tokens=self.fleet.context_tokens,
            tenant_of=self._tenants.keys.tenant_of,
            process=text_process,
            constraints=constraints,
            adapters=adapters.served,
            vectors=self.dispatcher,
            searches=self.dispatcher,
            admission=self.gate,
            tracer=lambda: self._tracer,
        )
        self.client_api = ClientApi(
            self.service,
            config.http,
            self.instruments,
            self._readiness,
            self.dispatcher.journal,
            needs_key=self._tenants.keys.are_required,
        )
        self.pins = FleetPins(self.fleet, clock)
        self.admin_api = AdminApi(
            self.instruments.registry,
            self.dispatcher.journal,
            self._report,
            CacheReset(self.fleet, self._forget_cached).run,
            adapters.load,
            adapters.unload,
            self._overview,
            self._readiness,
            PinRoutes(self.service, self.pins, config.http),
        )

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        model: TextModel,
        clock: Clock,
        *,
        keys: WorkerKeys | None = None,
        text_process: TextProcess | None = None,
        constraints: ConstraintCheck | None = None,
    ) -> "Gateway":
        """Bind all ports, then start polling the workers.

        Args:
            config: configuration of the gateway.
            model: tokenizer, chat template and limits of the served model.
            clock: clock of all parts.
            keys: sign the calls to workers; `None` for workers that do not check them, in tests.
            text_process: reads large requests; started and stopped with the gateway. `None` uses a thread.
            constraints: checks constraints; stopped with the gateway. `None` uses a thread.

        Raises:
            UsageError: an address cannot be bound, the API keys cannot be read, or the cluster cannot be accessed.
        """
        name = config.fleet.pool
        pool = None if name is None else await asyncio.to_thread(PoolApi.connect, name)
        gateway = cls(config, model, clock, pool, text_process, constraints, keys)
        certificate = gateway._certificate
        credentials = None if certificate is None else certificate.grpc_credentials
        gateway._rpc = await start_server(
            config.grpc_address,
            [inference_service(gateway.service)],
            credentials=credentials,
            max_request_bytes=MAX_CLIENT_MESSAGE_BYTES,
            max_connections=max_connections(MAX_CONNECTIONS, _SHARE_OF_FILES),
            idle_seconds=_IDLE_SECONDS,
            shares_port=config.shares_ports,
        )
        try:
            gateway._http = await HttpServer.start(
                gateway.client_api.app(),
                config.http.address,
                field="http",
                drain_seconds=config.drain_seconds,
                certificate=certificate,
                shares_port=config.shares_ports,
            )
        except BaseException:
            await gateway._rpc.stop(0)
            raise
        try:
            gateway._admin = await HttpServer.start(
                gateway.admin_api.app(), config.admin_address, field="admin", drain_seconds=1.0
            )
        except BaseException:
            await asyncio.gather(gateway._rpc.stop(0), gateway._http.stop())
            raise
        gateway.listening = Listening(gateway._http.address, gateway._rpc.address, gateway._admin.address)
        if text_process is not None:
            text_process.start()
        gateway.fleet.start()
        gateway._following = [
            asyncio.create_task(gateway.membership.run(), name="membership"),
            asyncio.create_task(gateway.cache_feeds.run(), name="cache feeds"),
            asyncio.create_task(gateway._follow_totals(), name="history"),
            asyncio.create_task(gateway.pins.run(), name="pins"),
        ]
        if gateway._waker is not None:
            gateway._following.append(asyncio.create_task(gateway._waker.run(), name="waker"))
        if config.tenants_file is not None:
            gateway._following.append(asyncio.create_task(gateway._follow_tenants(), name="tenants"))
        if certificate is not None:
            gateway._following.append(asyncio.create_task(_renew(certificate), name="certificate"))
        if gateway._pool_tls is not None:
            gateway._following.append(asyncio.create_task(gateway._pool_tls.follow(), name="pool tls"))
        gateway._health = asyncio.create_task(gateway._follow_readiness(), name="readiness")
        return gateway

    listening: Listening
    _rpc: RpcServer
    _http: HttpServer
    _admin: HttpServer
    _health: asyncio.Task[None]
    _following: list[asyncio.Task[None]]

    async def linger(self, seconds: float) -> None:
        """Report not ready, but accept requests for another `seconds` seconds."""
        self._draining = True
        await self._stop_tasks([self._health])
        await self._rpc.set_ready(False)
        if seconds:
            _log.info("lingering for %g s", seconds)
            await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """Report not ready, reject new requests, wait for running streams up to `drain_seconds`, close all servers."""
        await self.linger(0)
        await asyncio.gather(self._rpc.stop(self._config.drain_seconds), self._http.stop())
        if self.service.process is not None:
            await self.service.process.stop()
        if self.service.constraints is not None:
            await self.service.constraints.stop()
        await self.dispatcher.wait_idle()
        await self._admin.stop()
        await self._stop_tasks(self._following)
        await self.gate.stop()
        await self.fleet.stop()
        if self._pool is not None:
            self._pool.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        if self._request_trace is not None:
            await asyncio.to_thread(self._request_trace.close)

    async def _stop_tasks(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _would_take(self) -> bool:
        """Whether a new request is accepted; true even for a pool scaled to zero, since a held request scales it up."""
        if self._pool is not None:
            return self.membership.state.state is not Knowledge.UNKNOWN
        return can_serve(self.fleet)

    def _readiness(self) -> tuple[bool, Sequence[str]]:
        if self._draining:
            return False, ["this gateway is draining"]
        found = [*self.membership.notes(), *notes(self.fleet)]
        if self._pool is not None and not can_serve(self.fleet):
            found.append(
                f"pool {self._pool.pool} has no workers that accept requests; {self._holding.num_held} requests are "
                "waiting"
            )
        return self._would_take, found

    def _report(self) -> Mapping[str, object]:
        return fleet_report(
            self.fleet.views(),
            gateway=self._incarnation,
            pool=str(self._config.fleet.pool or ""),
            held=self._holding.num_held,
            source=self.membership.state,
            wake_failure="" if self._waker is None else self._waker.failure,
            handoffs=self.instruments.handoff_counts(),
            model_tokens=self.service.model.max_model_tokens,
            cache_map=self.cache_map,
            flow=self.gate.report(),
            certificate_not_after=0.0 if self._pool_tls is None else self._pool_tls.not_after,
        )

    def _forget_cached(self) -> None:
        """Drop the gateway's references to KV in the workers' caches, which are being reset."""
        self.dispatcher.turns.clear()
        self.pins.clear()

    def _trace_request(self, run: SampleRun) -> None:
        """Add an ended sample to the request trace, unless it got no tokens: such a request had no effect."""
        if self._request_trace is not None and run.emitted:
            request = run.request
            at = self._clock.wall() - (self._clock.monotonic() - request.caller.arrived)
            self._request_trace.add(TracedSample(at, request.token_ids, tuple(run.emitted), request.caller.scope))

    def _overview(self) -> Mapping[str, object]:
        return self._history.overview(self._clock.monotonic(), self.instruments.totals())

    async def _follow_totals(self) -> None:
        """Add a reading of the instruments to the history at regular intervals, until cancelled."""
        while True:
            self._history.add(self._clock.monotonic(), self.instruments.totals())
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _follow_tenants(self) -> None:
        """Read the tenants file again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(_TENANTS_SECONDS)
            table = await asyncio.to_thread(self._tenants.read)
            if table is not None:
                self.gate.use_tenants(table)

    async def _follow_readiness(self) -> None:
        """Keep the status of `grpc.health.v1.Health` equal to that of /ready."""
        ready = False
        while True:
            await self.fleet.wait_until(lambda _, was=ready: self._would_take != was)  # type: ignore[misc]
            ready = not ready
            await self._rpc.set_ready(ready)
            _log.info("readiness changed: requests can %sbe served", "" if ready else "not ")


async def _renew(certificate: Certificate) -> None:
    while True:
        await asyncio.sleep(_CERTIFICATE_SECONDS)
        certificate.renew()
