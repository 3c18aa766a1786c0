"""Sizes of a fleet by load: the smallest number of workers of each role with which enough requests meet the latency
targets.

    for each rate, ascending, from the sizes of the previous rate:
        grow     add workers to the role where it helps most, until enough requests meet the targets
        shrink   remove single workers, the most expensive first, as long as enough requests meet the targets

A role that grew too much is shrunk again, so that no single worker can be removed from the resulting fleet; the
prefill:decode ratio follows from the workload.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.core.errors import UsageError
from kvferry.simulator.files.spec import FleetSpec
from kvferry.simulator.fleet.fleet import PoolResult

MAX_WORKERS = 4096
"""Largest number of workers of a role that is tried."""
_STRIDE = 4
"""A role grows by its size divided by this number, at least by one worker."""
Sizes = Mapping[str, int]
"""Number of workers by role."""
Attain = Callable[[FleetSpec], float]
"""Simulates a fleet; returns the share of requests that meet the targets."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The fleet for one rate."""

    rate: float
    """Requests per second of one pool."""
    sizes: Sizes
    attained: float
    """Share of the requests that meet the latency targets."""
    is_enough: bool
    """Whether the share is at least `min_share`; if not, no fleet within the limits reached it."""
    price_per_hour: float


def attained_share(result: PoolResult) -> float:
    """Return the share of all requests that were completed within the targets; refused requests count as missed."""
    measures = result.measures
    return measures.good / measures.arrived if measures.arrived else 0.0


class PoolPlanner:
    """Plans the sizes of one fleet for several rates."""

    def __init__(
        self,
        spec: FleetSpec,
        attain: Attain,
        *,
        min_share: float,
        max_simulations: int,
        on_try: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            spec: the fleet; the numbers of its workers are ignored.
            attain: simulates a fleet.
            min_share: share of the requests that must meet the targets, above 0, at most 1.
            max_simulations: maximum number of simulations for one rate.
            on_try: called with the sizes and the share of each simulation.

        Raises:
            UsageError: the workload is a trace, which has its own rate.
        """
        if spec.demand is None:
            raise UsageError(
                "a trace has its own rate; use a fleet file with a [workload] that sets a rate", field="workload"
            )
        self._spec, self._attain, self._min_share, self._max_simulations, self._on_try = (
            spec,
            attain,
            min_share,
            max_simulations,
            on_try,
        )
        self._known: dict[tuple[int, ...], float] = {}
        self._roles = tuple(role.role for role in spec.pool.roles)
        self._rate = 0.0
        self.num_simulations = 0

    def plan(self, rates: Sequence[float]) -> list[PlanRow]:
        """Return the fleet for each rate, in ascending order of rates."""
        rows: list[PlanRow] = []
        sizes = dict.fromkeys(self._roles, 1)
        for rate in sorted(rates):
            self._rate = rate
            self._known.clear()
            sizes = self._shrunk(self._grown(sizes))
            attained = self._share(sizes)
            price = sum(self._spec.prices.get(role, 0.0) * count for role, count in sizes.items())
            rows.append(PlanRow(rate, dict(sizes), attained, attained >= self._min_share, price))
        return rows

    def _grown(self, sizes: dict[str, int]) -> dict[str, int]:
        while self._share(sizes) < self._min_share:
            larger = [
                {**sizes, role: count + max(1, count // _STRIDE)}
                for role, count in sizes.items()
                if count < MAX_WORKERS
            ]
            if not larger or len(self._known) >= self._max_simulations:
                return sizes
            sizes = max(larger, key=self._share)
        return sizes

    def _shrunk(self, sizes: dict[str, int]) -> dict[str, int]:
        while self._share(sizes) >= self._min_share and len(self._known) < self._max_simulations:
            dearest = sorted(sizes, key=lambda role: -self._spec.prices.get(role, 0.0))
            smaller = [{**sizes, role: sizes[role] - 1} for role in dearest if sizes[role] > 1]
            found = next((one for one in smaller if self._share(one) >= self._min_share), None)
            if found is None:
                return sizes
            sizes = found
        return sizes

    def _share(self, sizes: Sizes) -> float:
        key = tuple(sizes[role] for role in self._roles)
        if key not in self._known:
            self._known[key] = self._attain(with_sizes(self._spec, sizes, self._rate))
            self.num_simulations += 1
            self._on_try(f"{self._rate:g} requests/s, {named(sizes)}: {self._known[key]:.1%}")
        return self._known[key]


def with_sizes(spec: FleetSpec, sizes: Sizes, rate: float) -> FleetSpec:
    """Return the fleet with different numbers of workers and a different rate.

    Args:
        spec: the fleet.
        sizes: number of workers by role.
        rate: requests per second.
    """
    assert spec.demand is not None
    demand = replace(spec.demand, arrivals=replace(spec.demand.arrivals, rate=rate))
    roles = tuple(replace(role, replicas=sizes[role.role]) for role in spec.pool.roles)
    return replace(spec, pool=replace(spec.pool, roles=roles), demand=demand)


def named(sizes: Sizes) -> str:
    """Return sizes as text, such as `2 prefill, 5 decode`."""
    return ", ".join(f"{count} {role}" for role, count in sizes.items())
