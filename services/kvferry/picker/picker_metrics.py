"""Metrics of a picker process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.core.metrics import picker_metrics
from kvferry.core.metrics.metric import Metric
from kvferry.picker.decide.choice import Picked
from kvferry.picker.decide.endpoints import Trust
from kvferry.picker.decide.exchange import Refusal
from kvferry.picker.decide.prompt_body import BYTES_PER_TOKEN, CHUNK_BYTES, BodyProblem


class PickerMetrics:
    """The metrics; each instance has its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._picks = self._counter(picker_metrics.PICKS)
        self._refusals = self._counter(picker_metrics.REFUSALS)
        self._bodies = self._counter(picker_metrics.BODIES)
        self._cached = self._counter(picker_metrics.CACHED_TOKENS)
        self._prompt = self._counter(picker_metrics.PROMPT_TOKENS)
        self._served = self._counter(picker_metrics.SERVED)
        self._scrapes = self._counter(picker_metrics.SCRAPES)
        self._endpoints = self._gauge(picker_metrics.ENDPOINTS)
        self._open = self._gauge(picker_metrics.OPEN)
        self._queued = self._gauge(picker_metrics.QUEUED)
        seconds = picker_metrics.SECONDS
        self._seconds = Histogram(seconds.name, seconds.help, buckets=seconds.buckets, registry=self.registry)

    def read(self, problem: BodyProblem) -> None:
        """Record how a body was read."""
        self._bodies.labels(problem.value).inc()

    def picked(self, picked: Picked, seconds: float) -> None:
        """Record a decision for an endpoint.

        Args:
            picked: the decision.
            seconds: duration of the decision, in seconds.
        """
        self._picks.labels("pair" if picked.route.prefill else "one", picked.trust.value).inc()
        self._seconds.observe(seconds)
        tokens = CHUNK_BYTES // BYTES_PER_TOKEN
        self._cached.inc(picked.num_cached * tokens)
        self._prompt.inc(len(picked.names) * tokens)

    def refused(self, refusal: Refusal) -> None:
        """Record a refusal."""
        self._refusals.labels(refusal.reason).inc()

    def served(self, outcome: str) -> None:
        """Record which endpoint served a request: `picked`, `fallback` or `unknown`."""
        self._served.labels(outcome).inc()

    def scraped(self, outcome: str) -> None:
        """Record a scrape: `ok`, `unknown` or `failed`."""
        self._scrapes.labels(outcome).inc()

    def queued(self, count: int) -> None:
        """Set the number of waiting requests."""
        self._queued.set(count)

    def pool(self, by_trust: dict[Trust, int], num_open: int) -> None:
        """Set the state of the pool.

        Args:
            by_trust: number of endpoints by trust.
            num_open: number of requests in flight.
        """
        for trust in Trust:
            self._endpoints.labels(trust.value).set(by_trust.get(trust, 0))
        self._open.set(num_open)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)
