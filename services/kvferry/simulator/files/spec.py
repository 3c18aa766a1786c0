"""Fleet files: converts TOML to the values of a simulation. docs/simulator.md lists the fields."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from kvferry.bench.workload.arrivals import POISSON, PROCESSES, Arrivals
from kvferry.bench.workload.lengths import MIXES, UNIFORM, LengthMix
from kvferry.bench.workload.measures import parse_slo
from kvferry.bench.workload.requests import BenchRequest
from kvferry.bench.workload.traces import read_trace
from kvferry.core.errors import UsageError
from kvferry.core.process.toml_text import parse_toml
from kvferry.core.retention import MAX_RETENTION_SECONDS
from kvferry.core.settings.class_weights import weights_in_use
from kvferry.core.settings.engine import EngineSettings, SchedulerLimits
from kvferry.engine.schedule.policies.policy import POLICIES as SCHEDULING
from kvferry.gateway.decide.config import POLICIES, PolicyName, RoutingConfig
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.simulator.files.tables import Table, wrong
from kvferry.simulator.fleet.fleet import Failure, SimulatedPoolSpec, SimulatedRoleSpec
from kvferry.simulator.fleet.members import BOTH, ROLES
from kvferry.simulator.fleet.runs import GatewaySettings
from kvferry.simulator.requests.demand import MAX_REQUESTS, Demand, SimRequest, Tenant, of_trace
from kvferry.simulator.requests.tokens import Tape
from kvferry.simulator.worker.device import DeviceProfile, LinkProfile
from kvferry.simulator.worker.jobs import ReplicaSettings

MAX_REPLICAS = 10_000
MAX_POOLS = 1000
MAX_FILE_BYTES = 1 << 20
_MAX_SECONDS = 1e7
ReadText = Callable[[str], str]
"""Function that returns the text of a file that a fleet file names."""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A simulation, as a fleet file describes it."""

    seed: int
    pools: int
    """Number of equal pools, which share the requests evenly and share nothing else."""
    pool: SimulatedPoolSpec
    demand: Demand | None
    trace: tuple[BenchRequest, ...]
    repeat: int
    """Number of copies of each request of the trace."""
    prices: dict[str, float]
    """Price of a worker per hour, by role."""

    @property
    def num_requests(self) -> int:
        """Number of requests of one pool."""
        return self.demand.count if self.demand is not None else len(self.trace) * self.repeat // self.pools

    def requests(self, pool: int) -> Iterator[SimRequest]:
        """Return the requests of one pool, in order of arrival; each pool draws its own.

        Args:
            pool: index of the pool, from 0.
        """
        tape = Tape(self.seed + pool)
        if self.demand is not None:
            return self.demand.requests(tape, self.seed + pool)
        return of_trace(self.trace[pool :: self.pools], tape, repeat=self.repeat)


def read_fleet(text: str, read: ReadText) -> FleetSpec:
    """Parse a fleet file.

    Args:
        text: its content.
        read: reads the files that it names: traces and device profiles.

    Raises:
        UsageError: the file is not TOML, or a field is invalid; the message names field, value and remedy.
    """
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(f"the fleet file has {len(text)} characters; at most {MAX_FILE_BYTES} are read", field="fleet")
    try:
        top = Table("", parse_toml(text))
    except ValueError as error:
        raise UsageError(f"the fleet file is not TOML: {error}", field="fleet") from None
    seed = top.whole("seed", 1, 0, 1 << 53)
    pools = top.whole("pools", 1, 1, MAX_POOLS)
    slo = parse_slo(top.text("slo", ""))
    of_link, of_engine, of_device = top.table("link"), top.table("engine"), top.table("device")
    of_roles, workload, of_tenants = top.tables("role", 16), top.table("workload"), top.tables("tenant", 1000)
    of_gateway, of_failures, machine = top.table("gateway"), top.tables("failure", 100_000), top.table("machine")
    top.end()  # before missing fields are reported, since a field may be there under a wrong name
    link = _link(of_link)
    roles, prices = _roles(of_roles, of_engine, of_device, read)
    tenants = _tenants(of_tenants)
    demand, trace, repeat = _demand(workload, tenants, read, pools)
    gateway = _gateway(of_gateway, slo, link, tenants, seed, roles[0].engine.limits)
    failures = _failures(of_failures, roles)
    cores = machine.number("cores", 1.0, 0.01, 1e6) if "cores" in machine else None
    machine.end()
    return FleetSpec(
        seed, pools, SimulatedPoolSpec(roles, link, gateway, failures, cores), demand, trace, repeat, prices
    )


def read_profile(text: str) -> DeviceProfile:
    """Parse a device profile: `step_ms`, `token_us`, `kv_token_ns`, `pair_ns`.

    Raises:
        UsageError: the file is not TOML, or a field is invalid.
    """
    try:
        table = Table("device", parse_toml(text))
    except ValueError as error:
        raise UsageError(f"the device profile is not TOML: {error}", field="device.profile") from None
    table.table("measured")  # the origin of the numbers, for human readers
    return _coefficients(table)


def _coefficients(table: Table) -> DeviceProfile:
    profile = DeviceProfile(
        step=table.number("step_ms", 0.0, 0.0, 1e6) * 1e-3,
        token=table.number("token_us", 0.0, 0.0, 1e9) * 1e-6,
        kv_token=table.number("kv_token_ns", 0.0, 0.0, 1e9) * 1e-9,
        pair=table.number("pair_ns", 0.0, 0.0, 1e9) * 1e-9,
    )
    table.end()
    return profile


def _device(table: Table, read: ReadText) -> DeviceProfile:
    if "profile" in table:
        name = table.text("profile", "")
        table.end()
        return read_profile(read(name))
    return _coefficients(table)


def _link(table: Table) -> LinkProfile:
    profile = LinkProfile(
        bytes_per_second=table.number("gbps", 10.0, 1e-3, 1e6) * 1.25e8,
        latency=table.number("latency_ms", 0.2, 0.0, 60_000.0) * 1e-3,
    )
    table.end()
    return profile


def _engine(table: Table) -> ReplicaSettings:
    default = SchedulerLimits()
    block_tokens = table.whole("block_tokens", 16, 1, 1024)
    settings = ReplicaSettings(
        num_blocks=table.whole("blocks", 4096, 1, 1 << 24),
        block_tokens=block_tokens,
        block_bytes=block_tokens * table.whole("kv_bytes_per_token", 1, 1, 1 << 32),
        limits=SchedulerLimits(
            token_budget=table.whole("token_budget", default.token_budget, 1, 1 << 20),
            max_chunk_tokens=table.whole("max_chunk_tokens", default.max_chunk_tokens, 1, 1 << 20),
            max_mixed_tokens=table.whole("max_mixed_tokens", default.max_mixed_tokens, 1, 1 << 20),
            max_num_seqs=table.whole("max_num_seqs", default.max_num_seqs, 1, 1 << 16),
            scheduling=table.text("scheduling", default.scheduling, SCHEDULING),
            class_weights=table.text("class_weights", default.class_weights),
            reserve_share=table.number("reserve_share", default.reserve_share, 0.0, 0.5),
        ),
        retention_share=table.number("retention_share", EngineSettings(model="").retention_share, 0.0, 1.0),
        load_policy=LoadPolicy(table.text("load_policy", LoadPolicy.PRICE.value, [p.value for p in LoadPolicy])),
    )
    table.end()
    return settings


def _roles(
    tables: Iterable[Table], engine: Table, device: Table, read: ReadText
) -> tuple[tuple[SimulatedRoleSpec, ...], dict[str, float]]:
    roles: list[SimulatedRoleSpec] = []
    prices: dict[str, float] = {}
    for table in tables:
        role = table.text("role", BOTH, ROLES)
        roles.append(
            SimulatedRoleSpec(
                role=role,
                replicas=table.whole("replicas", 1, 1, MAX_REPLICAS),
                device=_device(table.table("device") if "device" in table else device.over(Table("", {})), read),
                engine=_engine(table.table("engine").over(engine)),
                start_at=table.number("start_at", 0.0, 0.0, _MAX_SECONDS),
                jitter=table.numbers("jitter", 1000, 0.0, 1e3),
            )
        )
        prices[role] = table.number("price_per_hour", 0.0, 0.0, 1e6)
        table.end()
    names = [role.role for role in roles]
    if not roles or len(set(names)) != len(names):
        raise wrong("role", names, "use one [[role]] for each role of the fleet: prefill, decode, both")
    if set(names) == {"prefill"}:
        raise wrong("role", names, 'add a role that generates: [[role]] with role = "decode" or "both"')
    return tuple(roles), prices


def _tenants(tables: Iterable[Table]) -> tuple[Tenant, ...]:
    found: list[Tenant] = []
    for table in tables:
        found.append(
            Tenant(
                name=table.text("name", ""),
                share=table.number("share", 1.0, 1e-6, 1e6),
                weight=table.number("weight", 1.0, 1e-3, 1e6),
                priority=table.whole("priority", 0, -1000, 1000),
                num_turns=table.whole("num_turns", 1, 1, 10_000) if "num_turns" in table else None,
                turn_seconds=table.number("turn_seconds", 0.0, 0.0, 86_400.0) if "turn_seconds" in table else None,
                retain_seconds=table.number("retain_seconds", 0.0, 0.0, MAX_RETENTION_SECONDS),
            )
        )
        table.end()
    names = [tenant.name for tenant in found]
    if len(set(names)) != len(names):
        raise wrong("tenant.name", names, "use a different name for each tenant")
    return tuple(found) or (Tenant(),)


def _gateway(
    table: Table,
    slo: dict[str, float],
    link: LinkProfile,
    tenants: tuple[Tenant, ...],
    seed: int,
    limits: SchedulerLimits,
) -> GatewaySettings:
    default = RoutingConfig()
    settings = GatewaySettings(
        routing=RoutingConfig(
            policy=cast("PolicyName", table.text("policy", default.policy, POLICIES)),
            prefix_blocks=table.whole("prefix_blocks", default.prefix_blocks, 1, 4096),
            load_factor=table.number("load_factor", default.load_factor, 1.0001, 1e6),
            skip_prefill_below_tokens=table.whole("skip_prefill_below_tokens", 0, 0, 1 << 20),
        ),
        max_streams=table.whole("max_streams", 1 << 20, 1, 1 << 24),
        max_queued=table.whole("max_queued", 1 << 20, 1, 1 << 24),
        status_seconds=table.number("status_seconds", 0.5, 0.01, 60.0),
        exact_status=table.flag("exact_status", default=True),
        seed=seed,
        latency=link.latency,
        has_map=table.flag("cache_map", default=True),
        slo=slo,
        weights={tenant.name: tenant.weight for tenant in tenants},
        class_weights=weights_in_use(limits.scheduling, limits.class_weights),
    )
    table.end()
    return settings


def _demand(
    table: Table, tenants: tuple[Tenant, ...], read: ReadText, pools: int
) -> tuple[Demand | None, tuple[BenchRequest, ...], int]:
    if "trace" in table:
        limit = table.whole("requests", 1_000_000, 1, 1_000_000)
        repeat = table.whole("repeat", 1, 1, 10_000)
        speed = table.number("trace_speed", 1.0, 1e-6, 1e6)
        trace = read_trace(read(table.text("trace", "")).splitlines(), limit=limit, speed=speed)
        table.end()
        _check_pools(pools, len(trace))
        return None, tuple(trace), repeat
    count = table.whole("requests", 1000, 1, MAX_REQUESTS)
    _check_pools(pools, count)
    arrivals = Arrivals(
        process=table.text("arrivals", POISSON, PROCESSES),
        rate=table.number("rate", 1.0, 1e-6, 1e9) / pools,
        burstiness=table.number("burstiness", 1.0, 1e-3, 1e3),
        burst_size=table.whole("burst_size", 8, 1, 1 << 20),
    )
    most_tokens = table.whole("most_tokens", 1 << 20, 2, 1 << 22)
    mix = LengthMix(
        kind=table.text("lengths", UNIFORM, MIXES),
        num_input=table.whole("num_input", 512, 1, 1 << 20),
        num_output=table.whole("num_output", 128, 1, 1 << 20),
        spread=table.number("spread", 0.0, 0.0, 0.999),
    )
    demand = Demand(
        lengths=mix,
        count=count // pools,
        arrivals=arrivals,
        num_prefix=table.whole("num_prefix", 0, 0, 1 << 20),
        num_prefixes=table.whole("num_prefixes", 1, 1, 1 << 16),
        num_turns=table.whole("num_turns", 1, 1, 10_000),
        turn_seconds=table.number("turn_seconds", 5.0, 0.0, 86_400.0),
        most_tokens=most_tokens,
        tenants=tenants,
    )
    table.end()
    return demand, (), 1


def _check_pools(pools: int, num_requests: int) -> None:
    if pools > num_requests:
        raise wrong("pools", pools, f"use at most one for each of the {num_requests} requests")


def _failures(tables: Iterable[Table], roles: tuple[SimulatedRoleSpec, ...]) -> tuple[Failure, ...]:
    known = {role.role: role.replicas for role in roles}
    found: list[Failure] = []
    for table in tables:
        role = table.text("role", roles[0].role, known)
        found.append(
            Failure(
                at=table.number("at", 0.0, 0.0, _MAX_SECONDS),
                role=role,
                index=table.whole("index", 0, 0, known[role] - 1),
                restart_seconds=table.number("restart_seconds", 60.0, 0.0, _MAX_SECONDS),
            )
        )
        table.end()
    return tuple(found)
