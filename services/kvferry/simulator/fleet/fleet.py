"""One pool on a virtual clock: gateway, workers, links, and starts and failures of workers.

Pools share nothing, so that several of them can be simulated in different processes and their measures merged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.core.hashing import BlockNamer, BlockNamers
from kvferry.gateway.decide.routing.routes import RoutingPolicy
from kvferry.kv.handoff.offers import OfferTimes
from kvferry.kv.handoff.transfers import TransferTimes
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.fleet.gateway import SimulatedGateway
from kvferry.simulator.fleet.measures import Measures
from kvferry.simulator.fleet.members import SimulatedMember, candidate_of, feed_of
from kvferry.simulator.fleet.runs import GatewaySettings
from kvferry.simulator.requests.demand import SimRequest
from kvferry.simulator.worker.cores import SharedCores
from kvferry.simulator.worker.device import DeviceProfile, LinkProfile
from kvferry.simulator.worker.handoff import SimulatedLinks, SimulatedLoader, SimulatedOfferDesk, TransferCounts
from kvferry.simulator.worker.jobs import ReplicaCounts, ReplicaSettings
from kvferry.simulator.worker.replica import SimulatedReplica

Progress = Callable[[Measures, float], None]
"""Called with the measures and the virtual time, after each thousand events."""
_EVENTS_PER_CALL = 1000
MAX_PAGES = 1 << 25
"""Maximum number of pages of all workers of a pool; a page takes about 90 bytes."""
MAX_SECONDS = 1e10
"""Latest arrival: a float of this size still distinguishes microseconds."""


@dataclass(frozen=True, slots=True)
class SimulatedRoleSpec:
    """The workers of one role."""

    role: str
    replicas: int
    device: DeviceProfile
    engine: ReplicaSettings
    start_at: float = 0.0
    """Time at which the workers accept requests, seconds."""
    jitter: tuple[float, ...] = ()
    """Factors of the duration of steps, drawn with equal probability; if empty, steps have the durations of the device
    profile.
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """The loss of a worker: it stops at once, and another worker takes its place."""

    at: float
    role: str
    index: int = 0
    restart_seconds: float = 60.0
    """Seconds until its successor accepts requests, with an empty cache."""


@dataclass(frozen=True, slots=True)
class SimulatedPoolSpec:
    """One pool."""

    roles: tuple[SimulatedRoleSpec, ...]
    link: LinkProfile = LinkProfile()  # noqa: RUF009  frozen
    gateway: GatewaySettings = GatewaySettings()  # noqa: RUF009  frozen
    failures: tuple[Failure, ...] = ()
    cores: float | None = None
    """Processor cores that all workers share; `None` if each worker has its own device."""


@dataclass(slots=True)
class RoleTotals:
    """Totals of all workers of a role."""

    counts: ReplicaCounts = field(default_factory=ReplicaCounts)
    pages: int = 0
    """Pages of all its workers."""
    replicas: int = 0

    def merge(self, other: "RoleTotals") -> None:
        """Add the totals of the same role of another pool."""
        for name in (
            "steps", "tokens", "sampled", "retained", "unretained", "busy_seconds", "page_seconds", "sequence_seconds",
        ):  # fmt: skip
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        self.pages += other.pages
        self.replicas += other.replicas


@dataclass(slots=True)
class PoolResult:
    """Results of one pool, or of several that were merged."""

    measures: Measures
    roles: dict[str, RoleTotals]
    transfers: TransferCounts
    preemptions: int
    events: int

    def merge(self, other: "PoolResult") -> None:
        """Add the results of another pool."""
        self.measures.merge(other.measures)
        for role, totals in other.roles.items():
            self.roles.setdefault(role, RoleTotals()).merge(totals)
        for name in ("transfers", "failures", "num_bytes", "seconds"):
            setattr(self.transfers, name, getattr(self.transfers, name) + getattr(other.transfers, name))
        self.preemptions += other.preemptions
        self.events += other.events


class SimulatedPool:
    """A simulated pool."""

    def __init__(
        self, spec: SimulatedPoolSpec, requests: Iterator[SimRequest], *, policy: RoutingPolicy | None = None,
        on_join: Callable[[SimulatedMember], None] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            spec: roles, links and gateway of the pool.
            requests: the requests, in order of arrival.
            policy: the routing policy; `None` uses the one in the gateway's settings.
            on_join: called with each worker when it joins, for experiments.

        Raises:
            UsageError: the workers have too many pages, or the first request can never be served.
        """
        pages = sum(role.replicas * role.engine.num_blocks for role in spec.roles)
        if pages > MAX_PAGES:
            raise UsageError(
                f"the workers of a pool have {pages} blocks; at most {MAX_PAGES} are simulated: lower engine.blocks or "
                "role.replicas, or divide the fleet into pools",
                field="engine.blocks",
            )
        self.clock = VirtualClock()
        self._spec = spec
        self._requests = requests
        self._namers = BlockNamers(b"simulator")
        self.gateway = SimulatedGateway(self.clock, spec.gateway, self._namers, policy)
        self._links = SimulatedLinks(spec.link)
        self._cores = None if spec.cores is None else SharedCores(self.clock, spec.cores)
        self._desks: dict[str, SimulatedOfferDesk] = {}
        self._transfers = TransferCounts()
        self._left: list[SimulatedMember] = []
        self._on_join = on_join
        self._incarnations = 0
        for role in spec.roles:
            for index in range(role.replicas):
                start = partial(self._start, role, f"{role.role}-{index}")
                if role.start_at > 0.0:
                    self.clock.at(role.start_at, start)
                else:
                    start()
        for failure in spec.failures:
            self.clock.at(failure.at, partial(self._fail, failure))
        self._next()

    def run(self, progress: Progress | None = None) -> PoolResult:
        """Simulate until all requests have ended.

        Raises:
            InvariantBroken: no events are left, but some requests have not ended.
            UsageError: a request can never be served.
        """
        clock, measures, gateway = self.clock, self.gateway.measures, self.gateway
        while (gateway.num_open or self._has_next) and clock.step():
            if progress is not None and clock.num_events % _EVENTS_PER_CALL == 0:
                progress(measures, clock.now)
        if gateway.num_open:
            raise InvariantBroken(
                f"{gateway.num_open} requests can never end; their prompts may need more pages than a worker has"
            )
        return self.result()

    def result(self) -> PoolResult:
        """Return the results up to now."""
        measures = self.gateway.measures
        measures.hit_tokens = measures.queried_tokens = preemptions = 0
        roles = {role.role: RoleTotals() for role in self._spec.roles}
        for member in (*self.gateway.members, *self._left):
            replica = member.replica
            is_present = not replica.is_stopped  # the successor of a lost worker counts in its place
            own = RoleTotals(replica.counts, is_present * replica.allocator.pool.num_blocks, int(is_present))
            roles[member.role].merge(own)
            preemptions += replica.scheduler.num_preemptions
            hits, queried = replica.hits
            if member.role != "decode" or not self._is_split:
                measures.hit_tokens += hits
                measures.queried_tokens += queried
        return PoolResult(measures, roles, self._transfers, preemptions, self.clock.num_events)

    # ------------------------------------------------------------------ internals

    @property
    def _is_split(self) -> bool:
        return {"prefill", "decode"} <= {role.role for role in self._spec.roles}

    def _next(self) -> None:
        """Plan the arrival of the next request."""
        request = next(self._requests, None)
        self._has_next = request is not None
        if request is not None:
            self._check(request)
            self.clock.at(request.at, partial(self._arrive, request))

    def _check(self, request: SimRequest) -> None:
        """Check that every worker can hold a request, and that the clock can distinguish its times."""
        if request.at > MAX_SECONDS:
            raise UsageError(
                f"request {request.index} arrives {request.at:g} s after the start; at most {MAX_SECONDS:g} s are "
                "simulated: raise workload.rate, or trace_speed of a trace",
                field="workload.rate",
            )
        num_prompt, num_output = len(request.prompt), request.output.count
        for role in self._spec.roles:
            needed = -(-(num_prompt + num_output) // role.engine.block_tokens)
            if needed > role.engine.num_blocks:
                raise UsageError(
                    f"request {request.index} has {num_prompt} prompt and {num_output} output tokens, which need "
                    f"{needed} blocks; engine.blocks of role {role.role} is {role.engine.num_blocks}; use at least "
                    f"{needed}, or shorter requests",
                    field="engine.blocks",
                )

    def _arrive(self, request: SimRequest) -> None:
        self._next()
        self.gateway.arrive(request)

    def _start(self, role: SimulatedRoleSpec, name: str) -> None:
        self._incarnations += 1
        incarnation = f"{name}#{self._incarnations}"
        clock, engine, gateway = self.clock, role.engine, self.gateway
        loader = SimulatedLoader(
            clock, incarnation, self._links, self._desks, TransferTimes(), engine.block_bytes, self._transfers
        )
        feed = None
        if gateway.settings.has_map:
            feed = feed_of(clock, gateway.cache_map, name, incarnation, gateway.settings.latency)
        replica = SimulatedReplica(
            clock, engine, role.device, gateway, self._namer(name, engine.block_tokens), loader=loader, on_changes=feed,
            cores=self._cores, jitter=_jitter(role, incarnation, gateway.settings.seed),
        )  # fmt: skip
        loader.replica = replica
        desk = self._desks[incarnation] = SimulatedOfferDesk(clock, incarnation, replica, OfferTimes())
        candidate = candidate_of(name, engine.block_tokens)
        member = SimulatedMember(name, incarnation, role.role, replica, desk, loader, candidate)
        if self._on_join is not None:
            self._on_join(member)
        gateway.join(member)

    def _namer(self, name: str, block_tokens: int) -> Callable[[str], BlockNamer]:
        fingerprint = candidate_of(name, block_tokens).layout_fingerprint
        return lambda tenant: self._namers.of(tenant, fingerprint=fingerprint, block_tokens=block_tokens)

    def _fail(self, failure: Failure) -> None:
        name = f"{failure.role}-{failure.index}"
        member = self.gateway.members.by_name.get(name)
        role = next(one for one in self._spec.roles if one.role == failure.role)
        if member is None:
            return  # it has not started, or has failed before
        self._left.append(member)
        self.clock.after(failure.restart_seconds, partial(self._start, role, name))
        self.gateway.lose(member, member.replica.stop())


def _jitter(role: SimulatedRoleSpec, name: str, seed: int) -> Callable[[], float] | None:
    if not role.jitter:
        return None
    draw = Random(f"jitter {name} {seed}")  # noqa: S311  a simulation needs no secret numbers
    return lambda: draw.choice(role.jitter)
