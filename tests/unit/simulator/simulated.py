"""Small pools for the tests of the simulator."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvferry.bench.workload.arrivals import Arrivals
from kvferry.bench.workload.lengths import LengthMix
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.simulator.fleet.fleet import Failure, SimulatedPool, SimulatedPoolSpec, SimulatedRoleSpec
from kvferry.simulator.fleet.members import SimulatedMember
from kvferry.simulator.fleet.runs import GatewaySettings
from kvferry.simulator.requests.demand import Demand
from kvferry.simulator.requests.tokens import Tape
from kvferry.simulator.worker.device import DeviceProfile, LinkProfile
from kvferry.simulator.worker.jobs import ReplicaSettings

DEVICE = DeviceProfile(step=0.008, token=2e-5, kv_token=1e-8, pair=1e-10)
ENGINE = ReplicaSettings(num_blocks=2048, block_bytes=16 * 1024, load_policy=LoadPolicy.ALWAYS)
GATEWAY = GatewaySettings(slo={"ttft": 0.5, "itl": 0.05})


def a_demand(count: int = 120, rate: float = 20.0, lengths: LengthMix | None = None, **more: object) -> Demand:
    return Demand(lengths or LengthMix(num_input=120, num_output=40, spread=0.8), count, Arrivals(rate=rate), **more)


def a_pool(
    demand: Demand,
    roles: Mapping[str, int],
    *,
    engine: ReplicaSettings = ENGINE,
    gateway: GatewaySettings = GATEWAY,
    failures: tuple[Failure, ...] = (),
    limits: SchedulerLimits | None = None,
    seed: int = 3,
    on_join: Callable[[SimulatedMember], None] | None = None,
) -> SimulatedPool:
    engine = engine if limits is None else replace(engine, limits=limits)
    specs = tuple(SimulatedRoleSpec(role, count, DEVICE, engine) for role, count in roles.items())
    spec = SimulatedPoolSpec(specs, LinkProfile(), gateway, failures)
    return SimulatedPool(spec, demand.requests(Tape(seed), seed), on_join=on_join)


def seen(pool: SimulatedPool) -> dict[str, object]:
    """Return all measures of the pool's clients, including every bucket of the histograms."""
    result = pool.run()
    m = result.measures
    return {
        "ttft": m.ttft._buckets, "itl": m.itl._buckets, "e2e": m.e2e._buckets, "good": m.good, "ended": m.ended_at,
        "totals": (m.completed, m.output_tokens, m.hit_tokens, m.queried_tokens, result.preemptions),
        "steps": {role: totals.counts.steps for role, totals in result.roles.items()},
    }  # fmt: skip


def check_idle(pool: SimulatedPool) -> None:
    """Run the remaining events; check that no worker holds a page."""
    pool.clock.run()
    for member in pool.gateway.members:
        member.replica.allocator.check_integrity()
        member.replica.retaining.clear()
        assert member.replica.allocator.pool.is_idle, member.name
        assert member.replica.scheduler.is_idle
        assert member.desk.book.is_idle
        assert member.loader.num_active == 0
