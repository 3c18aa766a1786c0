"""Rate at which the queue drains, and the time after which a refused client may retry."""

import math

_MEMORY_SECONDS = 30.0
"""Time constant of the average, seconds."""
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


class DrainRate:
    """Exponentially weighted rate of dispatched requests."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._updated = 0.0
        self._started: float | None = None

    def note(self, now: float) -> None:
        """Count one dispatched request at `now`, monotonic seconds."""
        if self._started is None:
            self._started = self._updated = now
        self._decay(now)
        self._weight += 1.0

    def per_second(self, now: float) -> float:
        """Return the rate in requests per second; 0 before the first dispatch.

        Args:
            now: monotonic seconds.
        """
        if self._started is None:
            return 0.0
        self._decay(now)
        # Normalize by the total exponential weight of the window since the first dispatch (minimum 1 s).
        age = max(1.0, now - self._started)
        return self._weight / (_MEMORY_SECONDS * (1.0 - math.exp(-age / _MEMORY_SECONDS)))

    def retry_after(self, num_ahead: int, now: float) -> float:
        """Return the time to dispatch `num_ahead` requests at the present rate in seconds, clamped to 1 to 60.

        Args:
            num_ahead: number of requests that are dispatched first.
            now: monotonic seconds.
        """
        rate = self.per_second(now)
        if rate <= 0.0:
            return MAX_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, num_ahead / rate))

    def _decay(self, now: float) -> None:
        self._weight *= math.exp(-max(0.0, now - self._updated) / _MEMORY_SECONDS)
        self._updated = max(self._updated, now)
