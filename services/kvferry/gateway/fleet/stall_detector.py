"""Detects a worker that answers but whose engine makes no steps. No I/O."""


class StallDetector:
    """The statuses of one worker since its last sign of progress."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: number of statuses without progress at which the worker counts as stalled.
        """
        self._limit = limit
        self._last: tuple[str, int] | None = None
        self.count = 0
        """Number of consecutive statuses without progress."""

    def observe(self, incarnation: str, num_steps: int, num_running: int) -> None:
        """Note a status. Without running sequences, no step is due.

        Args:
            incarnation: incarnation of the worker.
            num_steps: number of steps that the worker has completed.
            num_running: number of running sequences.
        """
        now = incarnation, num_steps
        # Worker versions that do not report steps report 0.
        self.count = self.count + 1 if num_running and num_steps and now == self._last else 0
        self._last = now

    @property
    def is_stalled(self) -> bool:
        """Whether running sequences have waited too long for a step."""
        return self.count >= self._limit
