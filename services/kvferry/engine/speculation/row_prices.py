"""Price of a step by its number of rows, learned from the steps that an engine runs.

A decoding step reads all weights once for any number of rows, so that a further row costs less than the first one; how
much less depends on the machine, the weights and the batch. Prices between two measured numbers of rows are
interpolated; before anything is measured, a further row of a step of R rows costs 1 / (R + 3) of half the step.
"""

import bisect

_WEIGHT = 0.25
"""Weight of the newest measurement."""
_SPREAD = 0.1
"""Share of a relative change that other numbers of rows follow: contexts grow, and other processes take the memory's
bandwidth."""
_MAX_CHANGE = 3.0
"""A measurement counts as at most this many times the estimate or its reciprocal; a step may be delayed for other
reasons."""
_MAX_ROWS = 4096


class RowPrices:
    """Seconds of a decoding step by its number of rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: list[float] = []

    def observe(self, rows: int, seconds: float) -> None:
        """Record that a decoding step of this many rows took this long."""
        if not 0 < rows <= _MAX_ROWS or seconds <= 0.0:
            return
        at = bisect.bisect_left(self._rows, rows)
        if at == len(self._rows) or self._rows[at] != rows:
            self._rows.insert(at, rows)
            self._seconds.insert(at, seconds)
            return
        ratio = min(max(seconds / self._seconds[at], 1.0 / _MAX_CHANGE), _MAX_CHANGE)
        change = 1.0 + _WEIGHT * (ratio - 1.0)
        others = 1.0 + _SPREAD * (change - 1.0)
        self._seconds = [s * (change if i == at else others) for i, s in enumerate(self._seconds)]

    def seconds(self, rows: int) -> float:
        """Estimate the seconds of a step of this many rows; 1 before the first measurement, and relative to that."""
        if not self._rows:
            return _scaled(1.0, 1, rows)
        at = bisect.bisect_left(self._rows, rows)
        if at == len(self._rows):
            return _scaled(self._seconds[-1], self._rows[-1], rows)
        if self._rows[at] == rows or at == 0:
            return self._seconds[at]
        low, high = self._rows[at - 1], self._rows[at]
        share = (rows - low) / (high - low)
        return (1.0 - share) * self._seconds[at - 1] + share * self._seconds[at]


def _scaled(seconds: float, measured_rows: int, rows: int) -> float:
    return seconds * (1.0 + 0.5 * max(0, rows - measured_rows) / (measured_rows + 3))
