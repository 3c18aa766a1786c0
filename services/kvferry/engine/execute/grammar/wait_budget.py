"""Limits the time for which steps wait for masks, as a share of all time."""

from dataclasses import dataclass

LATE_SECONDS = 0.002
"""Time in seconds for which a step waits for a mask. A mask takes 0.05 ms on average, and is computed while the step's
kernels run."""
LATE_SHARE = 0.05
"""Largest share of all time that steps may wait for masks."""


@dataclass(slots=True)
class WaitBudget:
    """Token bucket of seconds: in any period, waits take at most `burst_seconds` plus `share` of the period."""

    burst_seconds: float
    """Longest wait."""
    share: float
    """Share of the time, above 0 and at most 1."""
    _available: float = 0.0
    _updated_at: float = float("-inf")

    def available(self, now: float) -> float:
        """Return how long a wait that begins now may take, in seconds.

        Args:
            now: time of a monotonic clock, in seconds.
        """
        self._available = min(self.burst_seconds, self._available + self.share * (now - self._updated_at))
        self._updated_at = now
        return max(0.0, self._available)

    def spend(self, seconds: float) -> None:
        """Record the duration of a wait; it may be longer than was available, since threads wake late."""
        self._available -= seconds
