"""The routing of one gateway: its decisions, with the state that they share."""

from dataclasses import dataclass

from kvferry.core.clock import Clock
from kvferry.core.hashing import BlockNamers
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.config import DispatchConfig
from kvferry.gateway.decide.estimates.estimates import Commitments, Estimates
from kvferry.gateway.decide.routing.policies import RoutingPolicies
from kvferry.gateway.dispatch.route_selection import RouteSelection, WorkRecords
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.observe.instruments import GatewayInstruments


@dataclass(frozen=True, slots=True)
class Routing:
    """Parts that choose workers. The queue asks them for the cost of a prompt, the dispatcher for routes."""

    namers: BlockNamers
    commitments: Commitments
    """Work that is dispatched and not yet in a worker's status."""
    records: WorkRecords
    routes: RouteSelection
    instruments: GatewayInstruments


def build_routing(
    fleet: Fleet,
    clock: Clock,
    config: DispatchConfig,
    instruments: GatewayInstruments,
    cache_map: CacheMap | None = None,
) -> Routing:
    """Build the routing of one gateway.

    Args:
        fleet: the workers.
        clock: clock of estimates.
        config: settings of routing, and the key of block names.
        instruments: metrics of routing decisions.
        cache_map: predicts what the workers have cached; `None` predicts from the gateway's own history.
    """
    namers = BlockNamers(config.tenant_key)
    estimates, commitments = Estimates(), Commitments(clock)
    records = WorkRecords(fleet, estimates, commitments)
    policies = RoutingPolicies(config.routing.policy, estimates, commitments, load_factor=config.routing.load_factor)
    known = cache_map or CacheMap(clock, max_blocks=0)
    routes = RouteSelection(fleet, config.routing, namers, known, policies, records, instruments)
    return Routing(namers, commitments, records, routes, instruments)
