"""The admin API of a gateway, from the parts that its routes show and change."""

from collections.abc import Awaitable, Callable, Mapping

from kvferry.core.clock import Clock
from kvferry.gateway.decide.config import GatewayConfig
from kvferry.gateway.dispatch.dispatcher import Dispatcher
from kvferry.gateway.fleet.adapter_changes import AdapterChanges
from kvferry.gateway.fleet.pins.fleet_pins import FleetPins
from kvferry.gateway.fleet.pool_generation import PoolGeneration
from kvferry.gateway.http.admin_access import AdminAccess
from kvferry.gateway.http.admin_api import AdminApi
from kvferry.gateway.http.browsers import BrowserRules, is_loopback_address
from kvferry.gateway.http.generation_routes import GenerationRoutes
from kvferry.gateway.http.ledger_route import LedgerRoute
from kvferry.gateway.http.pin_routes import PinRoutes
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.status import GatewayStatus
from kvferry.serving.text_service import TextService


def build_admin_api(
    config: GatewayConfig,
    clock: Clock,
    instruments: GatewayInstruments,
    service: TextService,
    dispatcher: Dispatcher,
    status: GatewayStatus,
    adapters: AdapterChanges,
    pins: FleetPins,
    generation: PoolGeneration,
    reset_caches: Callable[[], Awaitable[Mapping[str, int]]],
) -> AdminApi:
    """Build the admin API, and warn of what it lets everybody do."""
    access = AdminAccess(is_loopback_address(config.admin_address), config.admin_token_file, clock)
    access.warn()
    return AdminApi(
        instruments.registry,
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
        LedgerRoute(instruments.ledger),
        BrowserRules.of(config.admin_address, config.http.allowed_hosts),
        access,
    )
