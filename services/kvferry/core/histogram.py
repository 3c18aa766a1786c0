"""A histogram with fixed buckets, which one thread fills and any thread may read."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket, and their sum. A reader may miss the latest value."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """
        Args:
            bounds: upper bounds of the buckets, ascending; a bucket includes its bound.
        """
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Number of values per bucket; the last one has the values above all bounds."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float) -> None:
        """Add a value.

        Args:
            value: value in the unit of `bounds`.
        """
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)
