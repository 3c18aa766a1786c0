"""Quantiles of the observations that a histogram with fixed buckets received between two readings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Buckets:
    """Reading of a histogram."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending; the last one may be infinite."""
    counts: tuple[float, ...]
    """Number of observations up to each bound since the histogram was created: cumulative, as in Prometheus."""


def quantiles(earlier: Buckets, later: Buckets, shares: Sequence[float]) -> list[float | None]:
    """Return the quantile of each share (0 to 1) of the observations between two readings of one histogram.

    Observations are assumed to be evenly spread inside a bucket, as in Prometheus' `histogram_quantile`. A quantile in
    the infinite bucket is the highest finite bound. `None` means no observations, or a histogram that was reset between
    the readings.

    Args:
        earlier: the first reading.
        later: the second reading.
        shares: share of the observations below each quantile, 0 to 1; 0.5 for the median.

    Raises:
        ValueError: the readings have different buckets.
    """
    if earlier.bounds != later.bounds:
        raise ValueError(f"buckets {later.bounds} cannot be compared with {earlier.bounds}")
    counts = [new - old for new, old in zip(later.counts, earlier.counts, strict=True)]
    if not counts or counts[-1] <= 0 or counts[0] < 0 or any(high < low for low, high in pairwise(counts)):
        return [None for _ in shares]
    return [_quantile(later.bounds, counts, share) for share in shares]


def _quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float:
    rank = share * counts[-1]
    number = next(i for i, count in enumerate(counts) if count >= rank and count > 0)
    low, high = (bounds[number - 1] if number else 0.0), bounds[number]
    if high == float("inf"):
        return low
    before = counts[number - 1] if number else 0.0
    return low + (high - low) * (rank - before) / (counts[number] - before)
