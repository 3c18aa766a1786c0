"""The last minutes of a gateway: percentiles of latency and token rates at regular intervals, in bounded memory."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.causes import CAUSE_HELP, ComputeCause
from kvferry.gateway.observe.dashboard.quantiles import Buckets, quantiles

INTERVAL_SECONDS = 2.0
"""Interval in seconds between two readings."""
WINDOW_SECONDS = 30.0
"""A point covers the observations of this many seconds before it; single intervals have too few for a percentile."""
MAX_POINTS = 300
"""Number of points: 10 minutes."""
_WINDOW_READINGS = round(WINDOW_SECONDS / INTERVAL_SECONDS) + 1
_SHARES = (0.5, 0.95)
_RATES = ("output_tokens_per_second", "requests_per_second", "errors_per_second", "failed_streams_per_second")


@dataclass(frozen=True, slots=True)
class Totals:
    """Reading of a gateway's histograms and counters, cumulative since its start."""

    first_token: Buckets
    token_gap: Buckets
    output_tokens: float
    requests: int
    """Number of answered HTTP requests, without probes."""
    errors: int
    """Number of those with a status of 500 or above."""
    streams: Mapping[str, int]
    """Number of ended samples by outcome."""
    sources: Mapping[str, int]
    """Number of prompt tokens by the source of their KV; see `gateway.decide.lifecycle.prompt_sources`."""
    handoff_tokens: int
    """Number of prompt tokens whose KV a decode worker fetched from the prefill worker."""
    computed: Mapping[str, int] = field(default_factory=dict)
    """Number of prompt tokens that workers computed, by cause; see `core.causes`."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens of routed prompts, by whether an earlier prompt had their block (seen, new, unnamed)."""


@dataclass(frozen=True, slots=True)
class Point:
    """State of the window that ends at `at`."""

    at: float
    """Monotonic seconds."""
    first_token: tuple[float | None, ...]
    """Median and 95th percentile of the time to first token in seconds; `None` without observations."""
    token_gap: tuple[float | None, ...]
    """Median and 95th percentile of the time between messages with tokens in seconds."""
    output_tokens_per_second: float
    requests_per_second: float
    errors_per_second: float
    """Answers with a status of 500 or above."""
    failed_streams_per_second: float
    """Samples that ended with an error, those of an answer whose status was sent before included."""


@dataclass(slots=True)
class History:
    """Points of the last minutes. Memory is bounded by `MAX_POINTS` points and the readings of one window."""

    _points: deque[Point] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    _readings: deque[tuple[float, Totals]] = field(default_factory=lambda: deque(maxlen=_WINDOW_READINGS))

    def add(self, now: float, totals: Totals) -> None:
        """Add a reading, taken at `now` (monotonic seconds). The first one makes no point. A reading less than half an
        interval after the last one is left out: rates over very short times are meaningless."""
        if self._readings:
            if now - self._readings[-1][0] < INTERVAL_SECONDS / 2:
                return
            while len(self._readings) > 1 and now - self._readings[0][0] > WINDOW_SECONDS + INTERVAL_SECONDS:
                self._readings.popleft()  # too old, for example after a pause of the process
            begun, earlier = self._readings[0]
            self._points.append(
                Point(
                    now,
                    tuple(quantiles(earlier.first_token, totals.first_token, _SHARES)),
                    tuple(quantiles(earlier.token_gap, totals.token_gap, _SHARES)),
                    *(max(0.0, new - old) / (now - begun) for old, new in _counts(earlier, totals)),
                )
            )
        self._readings.append((now, totals))

    def overview(self, now: float, totals: Totals) -> dict[str, Any]:
        """Build the body of `GET /debug/overview`: the points, oldest first, and totals since the start.

        Args:
            now: monotonic seconds, by which the age of the points is computed.
            totals: the current totals.
        """
        points = self._points
        return {
            "interval_seconds": INTERVAL_SECONDS,
            "window_seconds": WINDOW_SECONDS,
            "max_points": MAX_POINTS,
            "series": {
                "seconds_ago": [round(now - point.at, 3) for point in points],
                "first_token_p50": [point.first_token[0] for point in points],
                "first_token_p95": [point.first_token[1] for point in points],
                "token_gap_p50": [point.token_gap[0] for point in points],
                "token_gap_p95": [point.token_gap[1] for point in points],
                **{name: [round(getattr(point, name), 3) for point in points] for name in _RATES},
            },
            "totals": {
                "output_tokens": int(totals.output_tokens),
                "requests": totals.requests,
                "errors": totals.errors,
                "streams": dict(totals.streams),
                "prompt_tokens_by_source": dict(totals.sources),
                "handoff_tokens": totals.handoff_tokens,
                "computed_tokens_by_cause": [
                    {"cause": cause, "help": CAUSE_HELP[cause], "num_tokens": totals.computed[cause]}
                    for cause in ComputeCause
                    if totals.computed.get(cause)
                ],
                "prompt_tokens_seen": dict(totals.seen),
            },
        }


def _counts(earlier: Totals, later: Totals) -> list[tuple[float, float]]:
    """Return the counts of two readings whose differences are the rates of a point, in the order of `_RATES`."""
    return [
        (earlier.output_tokens, later.output_tokens),
        (earlier.requests, later.requests),
        (earlier.errors, later.errors),
        (earlier.streams.get("failed", 0), later.streams.get("failed", 0)),
    ]
