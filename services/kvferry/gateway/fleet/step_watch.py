"""Detects a worker that answers, but whose engine makes no step. No I/O."""


class StepWatch:
    """The statuses of one worker since its last sign of progress."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: number of statuses without progress from which the worker counts as stalled.
        """
        self._most = most
        self._last: tuple[str, int] | None = None
        self.count = 0
        """Number of consecutive statuses without progress."""

    def observe(self, incarnation: str, num_steps: int, num_running: int) -> None:
        """Note a status. Without running sequences, no step is due."""
        now = incarnation, num_steps
        # Versions of the worker that do not report steps report 0.
        self.count = self.count + 1 if num_running and num_steps and now == self._last else 0
        self._last = now

    @property
    def is_stalled(self) -> bool:
        """Whether running sequences have waited for a step for too long."""
        return self.count >= self._most
