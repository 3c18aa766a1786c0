"""Order in which the priority bands of a queue are served: strictly by priority, or by shares (`band_shares`)."""

import heapq
from collections.abc import Callable
from typing import Protocol


class BandOrder(Protocol):
    """Order of the bands of one queue, or of several that share it."""

    def served(self, priority: int) -> float:
        """Return the number by which bands of different queues are ordered first; equal numbers leave the order to the
        priorities."""
        ...

    def open(self, priority: int) -> None:
        """Note that a band has its first request in a queue."""
        ...

    def enter(self, priority: int) -> None:
        """Note that a band becomes backlogged in a queue."""
        ...

    def close(self, priority: int) -> None:
        """Note that a band has no more requests in a queue, queued or running."""
        ...

    def first(self, is_backlogged: Callable[[int], bool]) -> int | None:
        """Return the band that is served next; `None` if no band is backlogged.

        Args:
            is_backlogged: returns whether a band is backlogged.
        """
        ...

    def begin(self, priority: int, cost: float) -> None:
        """Charge a dispatched request of `cost` tokens to its band."""
        ...

    def charge(self, priority: int, tokens: float) -> None:
        """Add tokens to the charge of a band, or subtract them if `tokens` is negative."""
        ...


class StrictOrder:
    """The smallest priority number first. Implements `BandOrder` for one queue."""

    def __init__(self) -> None:
        self._priorities: list[int] = []
        """Heap of priorities, each at most once; those of bands that are no longer backlogged are skipped."""
        self._listed: set[int] = set()
        """The priorities in the heap."""

    def served(self, priority: int) -> float:
        """Return 0: bands are ordered by priority."""
        return 0.0

    def open(self, priority: int) -> None:
        """See `BandOrder.open`."""

    def enter(self, priority: int) -> None:
        """See `BandOrder.enter`."""
        if priority not in self._listed:
            self._listed.add(priority)
            heapq.heappush(self._priorities, priority)

    def close(self, priority: int) -> None:
        """See `BandOrder.close`."""

    def first(self, is_backlogged: Callable[[int], bool]) -> int | None:
        """See `BandOrder.first`."""
        while self._priorities:
            if is_backlogged(self._priorities[0]):
                return self._priorities[0]
            self._listed.discard(heapq.heappop(self._priorities))
        return None

    def begin(self, priority: int, cost: float) -> None:
        """See `BandOrder.begin`."""

    def charge(self, priority: int, tokens: float) -> None:
        """See `BandOrder.charge`."""
