"""Proof that the watches live: for each watched kind an object is touched, and its change must come back. Pure.

A watch can end in silence while its process looks healthy. So once in a period one object of each kind that has any
is marked with the time, and liveness fails when a mark has not been seen within the next period. Where there is no
object of a kind there is nothing to be late with.
"""

from dataclasses import dataclass, field
from typing import TypeVar

_GRACE = 1.0

K = TypeVar("K")


@dataclass(slots=True)
class Heartbeat:
    """One watch. Times are seconds of one monotonic clock."""

    period: float
    _mark: str = ""
    _marked_at: float | None = None
    _last_mark_at: float = field(default=float("-inf"))

    def is_due(self, now: float) -> bool:
        """Whether a new mark is to be written."""
        return self._marked_at is None and now - self._last_mark_at >= self.period

    def marked(self, mark: str, now: float) -> None:
        """`mark` was written."""
        self._mark, self._marked_at, self._last_mark_at = mark, now, now

    def unmarked(self) -> None:
        """The object is gone, or the write failed: nothing is awaited."""
        self._marked_at = None

    def saw(self, mark: str) -> None:
        """An event of this watch carried `mark`."""
        if mark == self._mark:
            self._marked_at = None

    def late_seconds(self, now: float) -> float:
        """For how long a mark has been awaited beyond the period; 0: in time."""
        if self._marked_at is None:
            return 0.0
        return max(0.0, now - self._marked_at - self.period * _GRACE)
