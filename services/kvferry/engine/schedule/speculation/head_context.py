"""Hidden states of a sequence that an EAGLE head has not read, and where its context begins. Pure.

    positions   0 ..... start ......... first ........ end
                        read by head    pending        known to the engine

A head reads the rows of a context in order. It begins at the first position whose hidden state is known; the states of
tokens whose KV was loaded or cached are unknown. After a gap, or if more rows are pending than are worth computing, the
context begins again at the first pending row.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

MAX_NEW_ROWS = 512
"""Maximum number of rows that a head reads when a context begins: the end of a prompt."""
MAX_LAG_ROWS = 32
"""Maximum number of rows that a head reads to continue a context after steps in which it did not draft."""


class HeadContext:
    """Context of one sequence. Rows are counted from the context's start."""

    __slots__ = ("_parts", "first", "limit", "num_pending", "num_read")

    def __init__(self) -> None:
        self._parts: list[Floats] = []
        self.first = 0
        """Position of the first pending row."""
        self.num_pending = 0
        self.num_read = 0
        """Number of rows that the head has read, directly before the first pending one."""
        self.limit = MAX_NEW_ROWS
        """Maximum number of pending rows that are worth computing."""

    @property
    def start(self) -> int:
        """Position of the context's first row."""
        return self.first - self.num_read

    @property
    def end(self) -> int:
        """Position after the last known row."""
        return self.first + self.num_pending

    def add(self, position: int, hidden: Floats) -> None:
        """Add hidden states, [N, width], of accepted tokens from a position on. States that are already known are left
        out.

        Args:
            position: position of the first state.
            hidden: hidden states of accepted tokens, [N, width] float32.
        """
        known = self.end - position
        if known < 0 or not (self.num_read or self.num_pending):
            self._parts, self.first, self.num_read, self.num_pending = [], position, 0, 0
            known = 0
        if known < len(hidden):
            self._parts.append(hidden[known:].copy())  # the step's array has the rows of all sequences
            self.num_pending += len(hidden) - known
        if self.num_pending > 2 * self.limit:  # not every time, since each cut copies
            self.keep(self.limit)

    def keep(self, count: int) -> None:
        """Keep at most the last `count` pending rows; if any are dropped, the context begins with the kept ones."""
        dropped = self.num_pending - count
        if dropped > 0:
            self._parts = [np.concatenate(self._parts)[dropped:]]
            self.first += dropped
            self.num_pending, self.num_read = count, 0

    def restart(self) -> None:
        """Begin the context with the first pending row."""
        self.num_read = 0

    def take(self) -> Floats:
        """Return all pending rows, [N, width], which the head reads now."""
        taken = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        self._parts, self.limit = [], MAX_LAG_ROWS
        self.first, self.num_read, self.num_pending = self.end, self.num_read + self.num_pending, 0
        return taken
