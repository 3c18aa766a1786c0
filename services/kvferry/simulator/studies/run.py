"""Runs one pool of a fleet file."""

from kvferry.simulator.files.spec import FleetSpec
from kvferry.simulator.fleet.fleet import PoolResult, Progress, SimulatedPool


def simulate_pool(spec: FleetSpec, index: int, progress: Progress | None = None) -> PoolResult:
    """Simulate the pool with an index below `spec.pools`.

    Raises:
        UsageError: a request can never be served, for example because it needs more pages than a worker has.
    """
    return SimulatedPool(spec.pool, spec.requests(index)).run(progress)
