"""Decides which of many equal log lines are written: one of each kind per interval. No I/O."""

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.clock import Clock

LINE_SECONDS = 60.0
_MAX_KINDS = 64


@dataclass(slots=True)
class _Kind:
    next_at: float
    num_left_out: int = 0


class RareLines:
    """The kinds of lines of one object. Not thread-safe."""

    def __init__(self, clock: Clock, seconds: float = LINE_SECONDS) -> None:
        """
        Args:
            clock: monotonic time.
            seconds: interval between two lines of a kind.
        """
        self._clock, self._seconds = clock, seconds
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()

    def left_out(self, kind: str) -> int | None:
        """Return the number of lines of this kind that were left out since the last one, if a line is due; otherwise
        count one more and return `None`.

        Args:
            kind: what the lines have in common; the least recent of 64 kinds is forgotten.
        """
        now = self._clock.monotonic()
        found = self._kinds.get(kind)
        if found is not None and now < found.next_at:
            found.num_left_out += 1
            return None
        self._kinds[kind] = _Kind(now + self._seconds)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        return 0 if found is None else found.num_left_out


def more(left_out: int) -> str:
    """Return the end of a line, which says how many others it stands for."""
    return f"; {left_out} more since the last line" if left_out else ""
