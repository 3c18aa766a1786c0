"""Progress of one pooled vector: the rows that it needs, and the sum of their hidden states so far.

    positions   [ 0 1 2 3 | 4 5 6 7 | 8 ]        chunks of a prompt of N = 9 tokens
    last                             [8]         one row
    mean        [ 0 .............. 8 ]           all rows, summed over chunks
    cls         [0]                              one row

A row whose KV is cached has no hidden state, so cached tokens are reused only up to the first row that is still needed.
If the sequence is preempted, its sum is kept, and the rows in it are not added again.
"""

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.core.inference.pooling import Pooling, PoolingParams

Sums = npt.NDArray[np.float64]
NO_ROWS = range(0)


class PromptPooling:
    """Pooled vector of one prompt while it is being computed."""

    def __init__(self, params: PoolingParams, num_prompt: int) -> None:
        """
        Args:
            params: parameters of the vector.
            num_prompt: number of tokens of the prompt, at least 1.
        """
        self._params = params
        self._last = num_prompt - 1
        self._needed = {
            Pooling.LAST: range(self._last, num_prompt),
            Pooling.MEAN: range(num_prompt),
            Pooling.CLS: range(1),
        }[params.pooling]
        self._next = self._needed.start
        self._sum: Sums | None = None

    @property
    def num_reusable(self) -> int:
        """Maximum number of leading tokens whose KV may be taken from a cache."""
        return min(self._next, self._last) if self._next < self._needed.stop else self._last

    @property
    def may_load(self) -> bool:
        """Whether only the prompt's last row is needed, so that KV of peers and tiers can be loaded."""
        return self.num_reusable == self._last

    def positions(self, start: int, count: int) -> range:
        """Return the positions to pool if the tokens `start` .. `start` + `count` - 1 are computed."""
        first, end = max(start, self._next), min(start + count, self._needed.stop)
        return range(first, end) if first < end else NO_ROWS

    def add(self, hidden: Sums | None, positions: range) -> None:
        """Add the sum of the hidden states of the rows at `positions`.

        Args:
            hidden: sum of the hidden states, [hidden] float64; `None` if the step has none.
            positions: positions of the summed rows.

        Raises:
            InvariantBroken: the rows do not follow the rows so far, or have no sum.
        """
        if hidden is None or positions.start != self._next or positions.stop > self._needed.stop:
            rows = f"rows {positions.start} to {positions.stop - 1}"
            raise InvariantBroken(
                f"{rows} were pooled, with{'out' if hidden is None else ''} a sum; rows from {self._next} to "
                f"{self._needed.stop - 1} are expected"
            )
        self._sum = hidden if self._sum is None else self._sum + hidden
        self._next = positions.stop

    def vector(self) -> npt.NDArray[np.float32]:
        """Return the vector, [dimensions] float32: the mean, shortened, then normalized.

        Raises:
            InvariantBroken: rows are missing.
        """
        if self._sum is None or self._next != self._needed.stop:
            raise InvariantBroken(f"prompt rows {self._next} to {self._needed.stop - 1} were not pooled")
        made = self._sum[: self._params.dimensions] / len(self._needed)
        if self._params.normalize:
            made = made / (float(np.linalg.norm(made)) or 1.0)
        return made.astype(np.float32)
