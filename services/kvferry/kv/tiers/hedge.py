"""When to ask a second time for what is late: after the 95th percentile of recent loads, and seldom. Pure.

A second request helps against one slow connection, and makes a slow server slower. So hedges come out of a budget that
only finished loads fill, one for every `LOADS_PER_HEDGE`: when everything is late, nearly nothing is hedged.
"""

from bisect import bisect_left, insort
from collections import deque

WINDOW = 128
"""Recent loads that count."""
MIN_SAMPLES = 20
"""Fewer say nothing about a 95th percentile."""
LOADS_PER_HEDGE = 10
_MAX_BUDGET = 3 * LOADS_PER_HEDGE


class Quantile:
    """A quantile of the last `window` samples, exactly (nearest rank)."""

    def __init__(self, share: float, window: int = WINDOW) -> None:
        """
        Raises:
            ValueError: `share` is not between 0 and 1, or the window is empty.
        """
        if not 0.0 < share <= 1.0 or window < 1:
            raise ValueError(f"no quantile {share} of {window} samples")
        self._share = share
        self._window = window
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """Samples that count now."""
        return len(self._recent)

    def add(self, sample: float) -> None:
        """The newest sample; the oldest beyond the window goes."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(sample)
        insort(self._sorted, sample)

    def value(self) -> float | None:
        """The quantile; `None` before the first sample."""
        if not self._sorted:
            return None
        rank = -(-self._share * len(self._sorted) // 1)  # ceiling
        return self._sorted[int(rank) - 1]


class HedgePolicy:
    """One server's. One owner."""

    def __init__(self, share: float = 0.95) -> None:
        self._seconds = Quantile(share)
        self._budget = 0
        self.num_hedges = 0
        """Second requests sent."""
        self.num_won = 0
        """Second requests that were answered first."""

    def wait_seconds(self) -> float | None:
        """How long to wait for the first request before a second may be sent; `None`: do not send one."""
        if len(self._seconds) < MIN_SAMPLES or self._budget < LOADS_PER_HEDGE:
            return None
        return self._seconds.value()

    def spend(self) -> bool:
        """Take one hedge out of the budget; `False` when another thread took the last."""
        if self._budget < LOADS_PER_HEDGE:
            return False
        self._budget -= LOADS_PER_HEDGE
        self.num_hedges += 1
        return True

    def loaded(self, seconds: float, *, hedged: bool = False, by_second: bool = False) -> None:
        """A load finished after `seconds`.

        A load that was hedged is no sample: had it not been, it would have taken longer.
        """
        if not hedged:
            self._seconds.add(seconds)
            self._budget = min(self._budget + 1, _MAX_BUDGET)
        self.num_won += by_second
