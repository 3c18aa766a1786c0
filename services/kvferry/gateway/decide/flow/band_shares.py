"""Shares of priorities in the fleet: start-time fair queueing between priority bands, by the weights of the policy
`weighted` (Goyal et al., SIGCOMM 1996).

Each band has a counter of its service in tokens divided by its weight, and the band with the smallest counter is served
next. A band that becomes backlogged starts at the virtual time, the largest counter at a dispatch, so that idle time
earns no credit, and no band starves.
"""

from collections.abc import Callable, Mapping


class BandShares:
    """Service counters of the bands of one or several queues. Implements `BandOrder`."""

    def __init__(self, weights: Mapping[int, int]) -> None:
        """
        Args:
            weights: weight by priority; other priorities have weight 1.
        """
        self._weights = weights
        self._num_open: dict[int, int] = {}
        """Number of queues in which a band has requests, queued or running."""
        self._served: dict[int, float] = {}
        """Counters in tokens per weight, of the bands that have requests or whose counter exceeds the virtual time."""
        self._time = 0.0

    def served(self, priority: int) -> float:
        """Return the counter of a band that has requests."""
        return self._served[priority]

    def open(self, priority: int) -> None:
        """Note that a band has its first request in a queue."""
        self._num_open[priority] = self._num_open.get(priority, 0) + 1

    def enter(self, priority: int) -> None:
        """Raise the counter of a band that becomes backlogged to the virtual time."""
        self._served[priority] = max(self._served.get(priority, 0.0), self._time)

    def close(self, priority: int) -> None:
        """Note that a band has no more requests in a queue. If it has none in any queue, the counters are dropped that
        have no effect on the next request of their band: all when no band has requests, else those of bands without
        requests that the virtual time has reached."""
        self._num_open[priority] -= 1
        if self._num_open[priority]:
            return
        del self._num_open[priority]
        if not self._num_open:
            self._served.clear()
            self._time = 0.0
            return
        reached = [band for band, served in self._served.items() if served <= self._time and band not in self._num_open]
        for band in reached:
            del self._served[band]

    def first(self, is_backlogged: Callable[[int], bool]) -> int | None:
        """Return the band that is served next: the backlogged one with the smallest counter, then the smallest priority
        number; `None` without any.

        Args:
            is_backlogged: returns whether a band is backlogged.
        """
        backlogged = filter(is_backlogged, self._num_open)
        return min(backlogged, key=lambda priority: (self._served[priority], priority), default=None)

    def begin(self, priority: int, cost: float) -> None:
        """Charge a dispatched request of `cost` tokens to its band.

        Args:
            priority: the band.
            cost: expected tokens of the request.
        """
        self._time = max(self._time, self._served[priority])
        self.charge(priority, cost)

    def charge(self, priority: int, tokens: float) -> None:
        """Add tokens, or subtract them if a request used fewer than its cost.

        Args:
            priority: the band.
            tokens: number of tokens; negative to subtract.
        """
        self._served[priority] += tokens / self._weights.get(priority, 1)
