"""Deletion costs of a role's worker pods: Kubernetes removes the pods with the lowest cost first. Pure."""

from collections.abc import Iterable, Mapping

from kvferry.operator.pool.facts import WorkerReport

_REQUEST_COST = 1000
"""Cost of a running request, expressed in blocks of cached KV; high, because a different worker must continue the
request."""
_MAX_COST = 2**31 - 1


def deletion_costs(workers: Iterable[WorkerReport]) -> dict[str, int]:
    """Compute the deletion cost by pod: the weighted number of running requests and open exports, plus the blocks in
    use.

    A pod that accepts no requests has cost 0.
    """
    return {
        worker.name: min(_MAX_COST, _REQUEST_COST * (worker.num_requests + worker.load.num_tickets) + _blocks(worker))
        if worker.takes_work
        else 0
        for worker in workers
    }


def changed_costs(costs: Mapping[str, int], current: Mapping[str, int]) -> dict[str, int]:
    """Return the costs to write: for existing pods, each cost that differs from the pod's cost in `current`."""
    return {name: cost for name, cost in costs.items() if name in current and cost != current[name]}


def _blocks(worker: WorkerReport) -> int:
    return max(0, worker.load.blocks_total - worker.load.blocks_free)
