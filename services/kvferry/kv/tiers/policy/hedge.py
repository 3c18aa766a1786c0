"""Hedging policy: a load that takes longer than the 95th percentile of recent loads gets a hedged request. Pure.

A hedged request helps if one connection is slow, but makes a slow server slower. A budget therefore limits hedges to
one per `LOADS_PER_HEDGE` finished loads: if all loads are late, only a few are hedged.
"""

from bisect import bisect_left, insort
from collections import deque

WINDOW = 128
"""Number of recent loads from which the quantile is computed."""
MIN_SAMPLES = 20
"""Minimum number of samples for a 95th percentile."""
LOADS_PER_HEDGE = 10
_MAX_BUDGET = 3 * LOADS_PER_HEDGE


class Quantile:
    """Exact quantile (nearest rank) of the last `window` samples."""

    def __init__(self, share: float, window: int = WINDOW) -> None:
        """
        Args:
            share: share of the samples at or below the quantile, above 0 and at most 1.
            window: maximum number of samples.

        Raises:
            ValueError: `share` is not between 0 and 1, or the window is empty.
        """
        if not 0.0 < share <= 1.0 or window < 1:
            raise ValueError(f"share must be above 0 and at most 1, and window at least 1, not {share} and {window}")
        self._share = share
        self._window = window
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """Return the number of samples in the window."""
        return len(self._recent)

    def add(self, sample: float) -> None:
        """Add a sample; the oldest sample is dropped if the window is full."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(sample)
        insort(self._sorted, sample)

    def value(self) -> float | None:
        """Return the current quantile; `None` before the first sample."""
        if not self._sorted:
            return None
        rank = -(-self._share * len(self._sorted) // 1)  # ceiling
        return self._sorted[int(rank) - 1]


class HedgePolicy:
    """Hedging policy of one server. Not thread-safe."""

    def __init__(self, share: float = 0.95) -> None:
        self._seconds = Quantile(share)
        self._budget = 0
        self.num_hedges = 0
        """Number of hedged requests sent."""
        self.num_won = 0
        """Number of hedged requests that completed before the first request."""

    def wait_seconds(self) -> float | None:
        """Return how long to wait for the first request before sending a hedged request, in seconds; `None` to send
        none."""
        if len(self._seconds) < MIN_SAMPLES or self._budget < LOADS_PER_HEDGE:
            return None
        return self._seconds.value()

    def spend(self) -> bool:
        """Take one hedge from the budget; return `False` if the budget is exhausted."""
        if self._budget < LOADS_PER_HEDGE:
            return False
        self._budget -= LOADS_PER_HEDGE
        self.num_hedges += 1
        return True

    def loaded(self, seconds: float, *, hedged: bool = False, by_second: bool = False) -> None:
        """Record a load that finished after `seconds`.

        A hedged load is not used as a measurement, since it would have taken longer without the hedge.

        Args:
            seconds: duration of the load.
            hedged: whether a hedged request was sent.
            by_second: whether the hedged request completed first.
        """
        if not hedged:
            self._seconds.add(seconds)
            self._budget = min(self._budget + 1, _MAX_BUDGET)
        self.num_won += by_second
