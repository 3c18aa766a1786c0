"""How often names were asked for lately, in little memory: a count-min sketch that halves itself now and then.

Four rows of counters; a name adds one to one counter of each row and its estimate is the smallest of its four, so it
is never too low. After ten counts for each name that the cache can hold everything is halved, so that yesterday's
favourites fade (Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017, section 3).
"""

from array import array

_ROWS = 4
_MOST = 0xFFFF
_LEAST_CAPACITY = 128
_WIDTH_PER_NAME = 8
"""Counters of a row for each name; names that are only asked for once fill the sketch too, and must not blur it."""


class FrequencySketch:
    """Estimated counts of names. Not safe for several threads; its owner locks."""

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: names whose counts should not blur, about those the cache can hold.
        """
        capacity = max(capacity, _LEAST_CAPACITY)
        self._mask = (1 << (_WIDTH_PER_NAME * capacity - 1).bit_length()) - 1
        self._rows = [array("H", bytes(2 * (self._mask + 1))) for _ in range(_ROWS)]
        self._counted = 0
        self._halve_after = 10 * capacity

    def count(self, name: bytes) -> None:
        """One more request for a name of at least 32 uniformly distributed bytes."""
        for row, index in zip(self._rows, self._indexes(name), strict=True):
            if row[index] < _MOST:
                row[index] += 1
        self._counted += 1
        if self._counted >= self._halve_after:
            self._halve()

    def estimate(self, name: bytes) -> int:
        """About how often the name was counted lately; never too low but for halving."""
        return min(row[index] for row, index in zip(self._rows, self._indexes(name), strict=True))

    def _indexes(self, name: bytes) -> list[int]:
        # Names are keyed hashes already: four of their own words do for four hash functions.
        return [int.from_bytes(name[8 * i : 8 * i + 8], "little") & self._mask for i in range(_ROWS)]

    def _halve(self) -> None:
        for i, row in enumerate(self._rows):
            self._rows[i] = array("H", [c >> 1 for c in row])
        self._counted = 0
