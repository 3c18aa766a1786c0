"""Price of a step by its number of rows, learned from the steps that an engine runs.

    seconds(rows)  =  (a + b * rows) * ratio(rows)

A decoding step reads all weights once for any number of rows, so each further row costs less than the first; how much
less depends on the machine, the weights and the batch. The line is fitted to the latest steps; before steps with two
numbers of rows are measured, a further row costs 0.5 / (R + 3) of a step of R rows. The ratio of a number of rows is
the deviation of its steps from the line, which occurs with kernels that compute rows in groups; without recent steps,
it returns to 1, so that one delayed step does not rule out a number of rows forever.
"""

_MEMORY = 0.98
"""Factor by which the weight of older steps in the line decreases at each step; about the last fifty matter."""
_SLOPE_WEIGHT = 4.0
"""Weight of the assumed slope, in squared rows of one step."""
_RATIO_MEMORY = 0.99
"""Factor by which the weight of older steps in the ratios decreases at each step. Steps of all numbers of rows count.
"""
_RATIO_WEIGHT = 3.0
"""Weight of the assumed ratio 1, in steps of the same number of rows."""
_MAX_CHANGE = 3.0
"""Maximum factor between a step's estimate and the duration that is recorded, since steps may be delayed for other
reasons."""
_MAX_ROWS = 4096


class RowPrices:
    """Estimated duration of a decoding step by its number of rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._products = 0.0
        self._ratios: dict[int, tuple[float, float, int]] = {}
        """By number of rows: the decayed sum and count of the ratios, and the step at which they were updated."""
        self._num_steps = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Record that a decoding step of this many rows took this long.

        Args:
            rows: number of rows of the step, draft tokens included.
            seconds: its duration.
        """
        if not 0 < rows <= _MAX_ROWS or seconds <= 0.0:
            return
        if self._num_steps:
            expected = self.seconds(rows)
            seconds = min(max(seconds, expected / _MAX_CHANGE), expected * _MAX_CHANGE)
        self._num_steps += 1
        self._weight = _MEMORY * self._weight + 1.0
        self._rows = _MEMORY * self._rows + rows
        self._seconds = _MEMORY * self._seconds + seconds
        self._rows_squared = _MEMORY * self._rows_squared + rows * rows
        self._products = _MEMORY * self._products + rows * seconds
        total, count = self._ratio(rows)
        self._ratios[rows] = (total + seconds / self._line(rows), count + 1.0, self._num_steps)

    def seconds(self, rows: int) -> float:
        """Estimate the duration of a step of this many rows in seconds; before the first measurement, relative to a
        step of one row."""
        if not self._num_steps:
            return 1.0 + 0.5 * max(0, rows - 1) / 4.0
        total, count = self._ratio(rows)
        return self._line(rows) * (total + _RATIO_WEIGHT) / (count + _RATIO_WEIGHT)

    def _ratio(self, rows: int) -> tuple[float, float]:
        total, count, updated = self._ratios.get(rows, (0.0, 0.0, self._num_steps))
        memory = _RATIO_MEMORY ** (self._num_steps - updated)
        return total * memory, count * memory

    def _line(self, rows: int) -> float:
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        spread = max(0.0, self._rows_squared - self._weight * mean_rows * mean_rows)
        slope = 0.5 * mean_seconds / (mean_rows + 3.0)
        slope = (self._products - self._weight * mean_rows * mean_seconds + _SLOPE_WEIGHT * slope) / (
            spread + _SLOPE_WEIGHT
        )
        min_seconds = 0.1 * mean_seconds  # the line may cross 0 beyond the measured numbers of rows
        return max(min_seconds, mean_seconds + max(0.0, slope) * (rows - mean_rows))
