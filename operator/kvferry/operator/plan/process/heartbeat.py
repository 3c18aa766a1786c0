"""Heartbeat of a watch: an object of each watched kind is marked, and the watch must deliver the change. Pure.

A watch can stall while its process appears healthy. Once per period, one object of each kind is therefore marked with
the time, and liveness fails if the mark is not received within the next period. Kinds without objects are skipped.
"""

from dataclasses import dataclass, field
from typing import TypeVar

_GRACE = 1.0

K = TypeVar("K")


@dataclass(slots=True)
class Heartbeat:
    """Heartbeat of one watch. All times are seconds by the same monotonic clock."""

    period: float
    _mark: str = ""
    _marked_at: float | None = None
    _last_mark_at: float = field(default=float("-inf"))

    def is_due(self, now: float) -> bool:
        """Return whether a new mark is due."""
        return self._marked_at is None and now - self._last_mark_at >= self.period

    def marked(self, mark: str, now: float) -> None:
        """Record that `mark` was written."""
        self._mark, self._marked_at, self._last_mark_at = mark, now, now

    def unmarked(self) -> None:
        """Record that no mark is expected, since the object was deleted or the write failed."""
        self._marked_at = None

    def saw(self, mark: str) -> None:
        """Record that the watch delivered `mark`."""
        if mark == self._mark:
            self._marked_at = None

    def late_seconds(self, now: float) -> float:
        """Return by how many seconds the mark is overdue; 0 if it is not."""
        if self._marked_at is None:
            return 0.0
        return max(0.0, now - self._marked_at - self.period * _GRACE)
