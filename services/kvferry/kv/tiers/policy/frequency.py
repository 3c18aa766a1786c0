"""TinyLFU frequency sketch: recent request counts of names in little memory, using a count-min sketch with aging.

There are four rows of counters. A request for a name increments one counter in each row; the estimate is the smallest
of these four counters, so it is never too low. After ten requests per unit of capacity, all counters are halved, so
that old counts decay (Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017, section
3).
"""

from array import array

_ROWS = 4
_MAX_COUNT = 0xFFFF
_MIN_CAPACITY = 128
_WIDTH_PER_NAME = 8
"""Number of counters per row and cached name; more than 1, since names that are requested only once also use
counters."""


class FrequencySketch:
    """Estimates of request counts by name. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: number of names to count accurately, about the capacity of the cache.
        """
        capacity = max(capacity, _MIN_CAPACITY)
        self._mask = (1 << (_WIDTH_PER_NAME * capacity - 1).bit_length()) - 1
        self._rows = [array("H", bytes(2 * (self._mask + 1))) for _ in range(_ROWS)]
        self._counted = 0
        self._halve_after = 10 * capacity

    def count(self, name: bytes) -> None:
        """Count one request for a name; `name` must have at least 32 uniformly distributed bytes."""
        for row, index in zip(self._rows, self._indexes(name), strict=True):
            if row[index] < _MAX_COUNT:
                row[index] += 1
        self._counted += 1
        if self._counted >= self._halve_after:
            self._halve()

    def estimate(self, name: bytes) -> int:
        """Estimate the recent request count of a name; apart from the halving, the estimate is never too low."""
        return min(row[index] for row, index in zip(self._rows, self._indexes(name), strict=True))

    def _indexes(self, name: bytes) -> list[int]:
        # Names are keyed hashes: four 64-bit parts of the name serve as four hash functions.
        return [int.from_bytes(name[8 * i : 8 * i + 8], "little") & self._mask for i in range(_ROWS)]

    def _halve(self) -> None:
        for i, row in enumerate(self._rows):
            self._rows[i] = array("H", [c >> 1 for c in row])
        self._counted = 0
