"""Builds the parts of a gateway from its configuration, in the order in which they need each other."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from kvferry.core.clock import Clock
from kvferry.core.ids import new_incarnation
from kvferry.core.traces.spans import Tracer
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.batches.batch_runner import BatchRunner
from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.build.admin_parts import build_admin_api
from kvferry.gateway.build.batch_parts import build_batch_runner, build_batch_service
from kvferry.gateway.build.shared_state import SharedState, build_shared
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.config import (
    DispatchConfig,
    FlowConfig,
    GatewayConfig,
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
from kvferry.gateway.http.admin_api import AdminApi
from kvferry.gateway.http.client_api import ClientApi
from kvferry.gateway.http.server.tls import Certificate
from kvferry.gateway.observe.certificate_metrics import CertificateCollector
from kvferry.gateway.observe.dashboard.history import History
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.observe.request_trace.trace_file import TraceFile
from kvferry.gateway.observe.request_trace.trace_line import TracedSample
from kvferry.gateway.status import GatewayStatus
from kvferry.rpc.otlp import open_tracer
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess
from kvferry.serving.text_service import TextService


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
    shared: SharedState | None = None
    """What this gateway shares with others; `None` if it has its own state."""


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

    shared = None if config.state is None else build_shared(config, config.state, clock, instruments, str(incarnation))
    dispatching = DispatchConfig(config.routing, config.retry, config.max_streams, config.tenant_key)
    routing = build_routing(fleet, clock, dispatching, instruments, cache_map)
    gate = FlowGate(
        fleet,
        clock,
        _flow_config(config),
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
        step_slots=gate.room.step_slots,
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
    batches = build_batch_service(config, clock, instruments, str(incarnation))
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
    admin_api = build_admin_api(
        config, clock, instruments, service, dispatcher, status, adapters, pins, generation, reset_caches
    )
    return GatewayParts(
        config, clock, pool, certificate, pool_tls, instruments, fleet, membership, cache_map, cache_feeds, waker,
        tenants, gate, dispatcher, pins, generation, service, tracer, request_trace, status, batches,
        None if batches is None else build_batch_runner(batches, service, client_app, gate, tenants, instruments),
        client_api, client_app, admin_api, shared,
    )  # fmt: skip


def _flow_config(config: GatewayConfig) -> FlowConfig:
    """Return the configuration of flow control."""
    return FlowConfig(
        config.max_queued,
        config.max_queued_bytes,
        config.class_weights,
        config.max_streams,
        config.retry.request_timeout_seconds,
        config.is_small_first,
    )


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
