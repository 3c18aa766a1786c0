"""Definition of a metric: name, kind, labels and help.

Names include the unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class MetricKind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; empty for other kinds."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """All values of each label whose values are known in advance; other labels, such as `worker`, can have any."""

    def checked(self, *values: str) -> Sequence[str]:
        """Return the values of the labels, in order.

        Raises:
            ValueError: a value is not in the label's set.
        """
        for label, value in zip(self.labels, values, strict=True):
            if value not in self.values.get(label, (value,)):
                raise ValueError(
                    f"label {label} of {self.name} has no value {value!r}; add it to `values` in core/metrics"
                )
        return values


LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
COUNT_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
LENGTH_BUCKETS = (*COUNT_BUCKETS, 16384.0, 32768.0, 65536.0, 131072.0)
