"""Builds the parts of a gateway from its configuration, in the order in which they need each other."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.core.ids import new_incarnation
from kvferry.core.traces.spans import Tracer
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.admission.quota_sync import QuotaSync
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.batches.batch_run import RunParts
from kvferry.gateway.batches.batch_runner import BatchRunner
from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.batches.folder import BatchFolder
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.shared.shared_calls import SharedCalls
from kvferry.gateway.batches.shared.shared_storage import SharedStorage
from kvferry.gateway.batches.storage import BatchStorage
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.config import (
    BatchConfig,
    DispatchConfig,
    FlowConfig,
    GatewayConfig,
    StateConfig,
    StoreLimits,
)
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.dispatch.dispatcher import Dispatcher
from kvferry.gateway.dispatch.routing_parts import build_routing
from kvferry.gateway.fleet.adapter_changes import AdapterChanges
from kvferry.gateway.fleet.cache_feeds.cache_feeds import CacheFeeds
from kvferry.gateway.fleet.cache_feeds.map_metrics import CacheMapCollector
from kvferry.gateway.fleet.cache_reset import CacheReset
from kvferry.gateway.fleet.endpoint_slices import EndpointSlices
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.membership import Membership
from kvferry.gateway.fleet.pins.fleet_pins import FleetPins
from kvferry.gateway.fleet.pool_api import PoolApi
from kvferry.gateway.fleet.pool_generation import PoolGeneration
from kvferry.gateway.fleet.readiness import FleetCollector, PoolCollector
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.gateway.http.admin_access import AdminAccess
from kvferry.gateway.http.admin_api import AdminApi
from kvferry.gateway.http.batches.inner_call import InnerCall
from kvferry.gateway.http.browsers import BrowserRules, is_loopback_address
from kvferry.gateway.http.client_api import ClientApi
from kvferry.gateway.http.generation_routes import GenerationRoutes
from kvferry.gateway.http.pin_routes import PinRoutes
from kvferry.gateway.http.responses.shared_store import SharedResponses
from kvferry.gateway.http.server.tls import Certificate
from kvferry.gateway.observe.certificate_metrics import CertificateCollector
from kvferry.gateway.observe.dashboard.history import History
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.observe.request_trace.trace_file import TraceFile
from kvferry.gateway.observe.request_trace.trace_line import TracedSample
from kvferry.gateway.resume.resumption import StreamResumption
from kvferry.gateway.resume.stream_records import StreamRecords
from kvferry.gateway.resume.stream_store import RecordLimits, StreamStore
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient
from kvferry.gateway.state.state_url import parse_state_url
from kvferry.gateway.status import GatewayStatus
from kvferry.rpc.otlp import open_tracer
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess
from kvferry.serving.text_service import TextService

_MAX_LINES = 256
"""Maximum number of lines of batches that run at a time, if no setting has another one."""


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The finished parts of a gateway, none of which runs yet."""

    config: GatewayConfig
    clock: Clock
    pool: PoolApi | None
    certificate: Certificate | None
    pool_tls: PoolTls | None
    instruments: GatewayInstruments
    fleet: Fleet
    membership: Membership
    cache_map: CacheMap
    cache_feeds: CacheFeeds
    waker: Waker | None
    tenants: Tenants
    gate: FlowGate
    dispatcher: Dispatcher
    pins: FleetPins
    generation: PoolGeneration
    service: TextService
    tracer: Tracer | None
    request_trace: TraceFile | None
    status: GatewayStatus
    batches: BatchService | None
    """Files and batches; `None` if they are not served."""
    batch_runner: BatchRunner | None
    client_api: ClientApi
    client_app: ASGIApp
    """The application of `client_api`."""
    admin_api: AdminApi
    shared: "SharedState | None" = None
    """What this gateway shares with others; `None` if it has its own state."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """The parts of a gateway whose state all gateways of the pool share."""

    client: StateClient
    resumption: StreamResumption
    """Records and continues streams."""
    quotas: QuotaSync
    responses: SharedResponses


def build_gateway(
    config: GatewayConfig,
    model: TextModel,
    clock: Clock,
    *,
    pool: PoolApi | None = None,
    text_process: TextProcess | None = None,
    constraints: ConstraintCheck | None = None,
    keys: WorkerKeys | None = None,
) -> GatewayParts:
    """Build the parts of a gateway; see `Gateway.start` for the arguments.

    Args:
        config: configuration of the gateway.
        model: tokenizer, chat template and limits of the served model.
        clock: clock of all parts.
        pool: the pool in a cluster whose workers are followed; `None` for listed workers.
        text_process: reads large requests.
        constraints: checks constraints.
        keys: sign the calls to workers.

    Raises:
        UsageError: the API keys or certificates cannot be read.
    """
    certificate = None if config.tls is None else Certificate(*config.tls)
    pool_tls = None if config.pool_tls is None else PoolTls(config.pool_tls, is_worker=False)
    incarnation, instruments = new_incarnation(), GatewayInstruments()
    registry = instruments.registry
    fleet = Fleet(config.fleet, model.name, keys, pool_tls, clock=clock)
    membership = Membership(fleet, None if pool is None else EndpointSlices(pool, clock))
    cache_map = CacheMap(clock, config.cache_map.max_blocks)
    cache_feeds = CacheFeeds(fleet, cache_map, config.cache_map, clock, config.tenant_key)
    holding = Holding(config.hold, str(config.fleet.pool))
    waker = None if pool is None else Waker(pool, holding, clock)
    tenants = Tenants.load(config.tenants_file, config.http.api_keys_file, clock, config.probe_key)
    CertificateCollector({"pool": pool_tls, "clients": certificate}, registry)
    FleetCollector(fleet, model.name, registry, clock)
    CacheMapCollector(cache_map, cache_feeds, registry)
    PoolCollector(membership, holding, waker, registry)

    shared = None if config.state is None else _shared(config, config.state, clock, instruments, str(incarnation))
    dispatching = DispatchConfig(config.routing, config.retry, config.max_streams, config.tenant_key)
    routing = build_routing(fleet, clock, dispatching, instruments, cache_map)
    gate = FlowGate(
        fleet,
        clock,
        FlowConfig(
            config.max_queued,
            config.max_queued_bytes,
            config.class_weights,
            config.max_streams,
            config.retry.request_timeout_seconds,
            config.is_small_first,
        ),
        tenants,
        instruments,
        uncached=routing.routes.uncached_tokens,
        holding=None if pool is None else holding,
        waker=waker,
        shared=None if shared is None else shared.quotas,
    )
    request_trace = None if config.request_trace is None else TraceFile(*config.request_trace, config.tenant_key)
    dispatcher = Dispatcher(
        fleet,
        clock,
        dispatching,
        routing=routing,
        gate=None if pool is None else gate,
        step_places=gate.room.step_places,
        on_end=None if request_trace is None else _traced_into(request_trace, clock),
    )
    tracer = open_tracer(config.traces, "kvferry-gateway", incarnation, clock)
    adapters = AdapterChanges(fleet)
    service = TextService(
        dispatcher,
        model,
        clock,
        context_tokens=fleet.context_tokens,
        tenant_of=tenants.keys.tenant_of,
        process=text_process,
        constraints=constraints,
        adapters=adapters.served,
        vectors=dispatcher,
        searches=dispatcher,
        admission=gate,
        tracer=lambda: tracer,
    )
    status = GatewayStatus(
        incarnation, clock, clock.monotonic(), model.name, model.max_model_tokens, fleet, membership, pool, holding,
        waker, gate, cache_map, instruments, History(), pool_tls, lambda: dispatcher.runs,
    )  # fmt: skip
    pins = FleetPins(fleet, clock)
    generation = PoolGeneration(fleet, clock, lambda: _forget_cached(dispatcher, pins))
    reset_caches = CacheReset(fleet, lambda: _forget_cached(dispatcher, pins)).run
    batches = _batch_service(config, clock, instruments, str(incarnation))
    access = AdminAccess(is_loopback_address(config.admin_address), config.admin_token_file, clock)
    access.warn()
    client_api = ClientApi(
        service,
        config.http,
        instruments,
        status.readiness,
        dispatcher.journal,
        needs_key=tenants.keys.are_required,
        secret=config.tenant_key,
        batches=batches,
        resumption=None if shared is None else shared.resumption,
        stored=None if shared is None else shared.responses,
    )
    client_app = client_api.app()
    admin_api = AdminApi(
        registry,
        dispatcher.journal,
        status.report,
        reset_caches,
        adapters.load,
        adapters.unload,
        status.overview,
        status.running,
        status.readiness,
        PinRoutes(service, pins, config.http),
        GenerationRoutes(generation, reset_caches, clock),
        BrowserRules.of(config.admin_address, config.http.allowed_hosts),
        access,
    )
    return GatewayParts(
        config, clock, pool, certificate, pool_tls, instruments, fleet, membership, cache_map, cache_feeds, waker,
        tenants, gate, dispatcher, pins, generation, service, tracer, request_trace, status, batches,
        None if batches is None else _batch_runner(batches, service, client_app, gate, tenants, instruments),
        client_api, client_app, admin_api, shared,
    )  # fmt: skip


def _shared(
    config: GatewayConfig, state: StateConfig, clock: Clock, instruments: GatewayInstruments, gateway: str
) -> SharedState:
    """Return what the gateways of the pool share.

    Raises:
        UsageError: the URL is malformed, a package is missing, or the pool has no key.
    """
    server = parse_state_url(state.url)
    if not config.tenant_key:
        raise UsageError(
            "--state needs the pool's key, with which records are sealed; set --tenant-key-file to the same file for "
            "all gateways",
            field="tenant_key",
        )
    seal = PoolSeal(config.tenant_key)
    client = StateClient(server, lambda part, outcome: instruments.state_calls.labels(part, outcome).inc())
    records = StreamRecords(StreamStore(client, seal.pool, RecordLimits(state.total_bytes)), clock, instruments)
    return SharedState(
        client,
        StreamResumption(records, seal, clock, instruments, config.retry.request_timeout_seconds),
        QuotaSync(client, seal, gateway, clock, instruments),
        SharedResponses(
            client,
            seal,
            gateway,
            StoreLimits(tenant_bytes=state.total_bytes // 8, total_bytes=state.total_bytes),
            clock,
            on_failure=lambda reason: instruments.response_store_failures.labels(reason).inc(),
        ),
    )


def _batch_service(
    config: GatewayConfig, clock: Clock, instruments: GatewayInstruments, gateway: str
) -> BatchService | None:
    """Return the service of files and batches; `None` if they are off."""
    if config.batches is None:
        return None
    return BatchService(_batch_storage(config, config.batches, clock, instruments, gateway), config.batches, clock)


def _batch_storage(
    config: GatewayConfig, batches: BatchConfig, clock: Clock, instruments: GatewayInstruments, gateway: str
) -> BatchStorage:
    """Return what keeps files and batches.

    Raises:
        UsageError: no folder is set, and no state.
    """
    if batches.folder is not None:
        return BatchFolder(batches.folder)
    if config.state is None:
        raise UsageError("batch_folder is 'state', which needs --state redis://HOST:6379/0", field="batch_folder")
    client = BlockingStateClient(
        parse_state_url(config.state.url),
        clock,
        "files",
        lambda part, outcome: instruments.state_calls.labels(part, outcome).inc(),
    )
    calls = SharedCalls(
        client,
        PoolSeal(config.tenant_key),
        gateway,
        config.state.file_bytes,
        clock,
        on_failure=lambda reason: instruments.file_store_failures.labels(reason).inc(),
    )
    return SharedStorage(calls, client.close)


def _batch_runner(
    batches: BatchService,
    service: TextService,
    client_app: ASGIApp,
    gate: FlowGate,
    tenants: Tenants,
    instruments: GatewayInstruments,
) -> BatchRunner:
    """Return what runs the batches; lines take the way of requests of their tenants."""

    def check_model(tenant: str, name: str) -> None:
        adapter = service.adapter_of(name)
        service.check_access(tenant, service.model.name if adapter is None else adapter.name)

    def tenant_lines(tenant: str) -> int:
        most = tenants.policy(tenant).concurrent_requests
        return _MAX_LINES if most is None else max(1, most // 2)

    given = batches.config.lines
    parts = RunParts(
        batches.storage,
        batches.config,
        service.clock,
        LineSlots(lambda: given or max(1, min(_MAX_LINES, gate.room.now().sequences // 2))),
        InnerCall(client_app),
        check_model=check_model,
        has_tenant=lambda tenant: not tenants.keys.are_required or tenant in tenants.keys.tenants,
        tenant_lines=tenant_lines,
        on_line=lambda outcome: instruments.batch_lines.labels(outcome).inc(),
        on_state=lambda state: instruments.batches.labels(state.value).inc(),
    )
    return BatchRunner(parts, batches.changed)


def _forget_cached(dispatcher: Dispatcher, pins: FleetPins) -> None:
    """Drop the gateway's references to KV in the workers' caches, which are being reset."""
    dispatcher.turns.clear()
    pins.clear()


def _traced_into(trace: TraceFile, clock: Clock) -> Callable[[SampleRun], None]:
    """Return a function that adds an ended sample to the request trace, unless it got no tokens: such a request had no
    effect."""

    def add(run: SampleRun) -> None:
        request = run.request
        if run.emitted:
            at = clock.wall() - (clock.monotonic() - request.caller.arrived)
            trace.add(TracedSample(at, request.token_ids, tuple(run.emitted), request.caller.scope))

    return add
