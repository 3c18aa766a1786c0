"""Which pods of a role are the cheapest to lose, as Kubernetes' pod deletion cost. Pure."""

from collections.abc import Iterable, Mapping

from kvferry.operator.facts import WorkerReport

_REQUEST_COST = 1000
"""One running request weighs as much as this many blocks of cached KV: it would have to go on elsewhere."""
_MAX_COST = 2**31 - 1


def deletion_costs(workers: Iterable[WorkerReport], now: Mapping[str, int]) -> dict[str, int]:
    """The costs to write, by pod, where they differ from `now`: requests held, exports outstanding, blocks in use.

    A pod that takes no work costs nothing.
    """
    wanted = {
        worker.name: min(_MAX_COST, _REQUEST_COST * (worker.load + worker.exports) + _blocks(worker))
        if worker.takes_work
        else 0
        for worker in workers
        if worker.name in now
    }
    return {name: cost for name, cost in wanted.items() if cost != now[name]}


def _blocks(worker: WorkerReport) -> int:
    return max(0, worker.blocks_total - worker.blocks_free)
