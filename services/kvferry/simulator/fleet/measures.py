"""Measures of a simulation in bounded memory: histograms with logarithmic buckets, and goodput."""

import math
from dataclasses import dataclass, field

_MIN_VALUE = 1e-6
_RATIO = 1.01
"""Ratio of the bounds of a bucket; a percentile is off by at most half a percent."""
_LOG_RATIO = math.log(_RATIO)
PERCENTILES = (50, 90, 99)


class WeightedHistogram:
    """Weighted values above 0, in buckets whose bounds grow by one percent."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Add a value `weight` times.

        Args:
            value: the value, in the unit of the histogram.
            weight: number of times to add it.
        """
        bucket = int(math.log(value / _MIN_VALUE) / _LOG_RATIO) + 1 if value > _MIN_VALUE else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + weight
        self.count += weight
        self.total += value * weight
        if value > self.largest:
            self.largest = value

    def merge(self, other: "WeightedHistogram") -> None:
        """Add all values of another histogram."""
        for bucket, weight in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + weight
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        """Mean of the values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile, with a relative error of about half a percent; 0 without values.

        Args:
            percent: percentage of the values, from 0 to 100.
        """
        wanted, seen = percent / 100.0 * self.count, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                middle = _MIN_VALUE * _RATIO ** (bucket - 0.5) if bucket else 0.0
                return min(middle, self.largest)
        return 0.0

    def shares(self) -> list[tuple[float, float]]:
        """Return (value, share of values up to it) for each bucket, ascending."""
        seen, found = 0, []
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            found.append((min(_MIN_VALUE * _RATIO**bucket, self.largest), seen / self.count))
        return found

    def in_ms(self) -> dict[str, float]:
        """Return the percentiles of values in seconds, in milliseconds."""
        return {f"p{p}": round(1e3 * self.percentile(p), 3) for p in PERCENTILES}


@dataclass(slots=True)
class TenantMeasures:
    """Measurements of one tenant's requests."""

    ttft: WeightedHistogram = field(default_factory=WeightedHistogram)
    e2e: WeightedHistogram = field(default_factory=WeightedHistogram)


@dataclass(slots=True)
class Measures:
    """Measurements of a simulation's clients. All times count from the arrival of the request at the gateway."""

    ttft: WeightedHistogram = field(default_factory=WeightedHistogram)
    itl: WeightedHistogram = field(default_factory=WeightedHistogram)
    e2e: WeightedHistogram = field(default_factory=WeightedHistogram)
    queue: WeightedHistogram = field(default_factory=WeightedHistogram)
    """Seconds in the gateway's queue."""
    arrived: int = 0
    completed: int = 0
    refused: int = 0
    good: int = 0
    """Completed requests that met all latency targets."""
    resumed: int = 0
    """Number of times that a request continued on another worker after a loss."""
    input_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens found in the prefix caches of the workers that computed the prompts."""
    queried_tokens: int = 0
    normalized: float = 0.0
    """Sum over completed requests of the end-to-end time per output token, in seconds."""
    ended_at: float = 0.0
    """Time of the last completion, seconds."""
    tenants: dict[str, TenantMeasures] = field(default_factory=dict)

    def of_tenant(self, name: str) -> TenantMeasures:
        """Return the measures of a tenant."""
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantMeasures()
        return found

    def merge(self, other: "Measures") -> None:
        """Add the measures of another part of the fleet, which ran at the same time."""
        for name in ("ttft", "itl", "e2e", "queue"):
            getattr(self, name).merge(getattr(other, name))
        for name in (
            "arrived", "completed", "refused", "good", "resumed", "input_tokens", "output_tokens", "hit_tokens",
            "queried_tokens", "normalized",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ended_at = max(self.ended_at, other.ended_at)
        for name, measures in other.tenants.items():
            mine = self.of_tenant(name)
            mine.ttft.merge(measures.ttft)
            mine.e2e.merge(measures.e2e)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in prefix caches."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def goodput(self) -> float:
        """Requests per second that met all latency targets."""
        return self.good / self.ended_at if self.ended_at else 0.0
