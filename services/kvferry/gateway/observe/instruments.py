"""The gateway's metrics, created from the table in `core.metrics.gateway_metrics`; each gateway has its own registry.

Counters by tenant have a bounded number of labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core.errors import TicketRejected
from kvferry.core.handoffs import HandoffOutcome
from kvferry.core.inference.chunks import KvReport, Timing, Usage
from kvferry.core.metrics import gateway_metrics
from kvferry.core.metrics.metric import Metric
from kvferry.gateway.decide.flow.controller import FlowController, QueueSize
from kvferry.gateway.decide.lifecycle.ledger import Ledger
from kvferry.gateway.decide.lifecycle.prompt_sources import prompt_sources
from kvferry.gateway.decide.lifecycle.sample_states import State
from kvferry.gateway.decide.routing.routes import PredictedPrefix
from kvferry.gateway.observe.dashboard.history import Totals
from kvferry.gateway.observe.dashboard.quantiles import Buckets

SOURCES = ("computed", "cached", "peer", "tier")
"""Sources of the KV of prompt tokens, as in `PromptSources`."""
MAX_TENANT_LABELS = 100
"""Number of tenants that get their own label, in order of their first requests; further ones share the label
`other`."""
PROBES = frozenset({"/health", "/ready", "/ping"})
"""Paths of probes, which are no requests of clients."""
BANDS = ("high", "normal", "low")


class CheckedCounter(Counter):
    """A counter whose labels have the values of the table only."""

    metric: Metric | None = None
    """Definition of the counter; `None` in the counters of single label values, which the library creates."""

    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Self:
        """Return the counter of label values, which are given in order.

        Raises:
            ValueError: a value is not in the label's set.
        """
        if self.metric is not None:
            self.metric.checked(*labelvalues)
        return super().labels(*labelvalues, **labelkwargs)


class GatewayInstruments:
    """Counters, gauges and histograms of one gateway."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # Otherwise each counter and histogram has a further series, `_created`.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client has no annotation for it
        self.registry = CollectorRegistry() if registry is None else registry
        self.ledger = Ledger()
        """Tokens by tenant and adapter."""
        self.requests = self._counter(gateway_metrics.REQUESTS)
        self.streams = self._counter(gateway_metrics.STREAMS)
        self.streams_open = self._gauge(gateway_metrics.STREAMS_OPEN)
        self.routes = self._counter(gateway_metrics.ROUTES)
        self.retries = self._counter(gateway_metrics.RETRIES)
        self.resumes = self._counter(gateway_metrics.RESUMES)
        self.reconnections = self._counter(gateway_metrics.RECONNECTIONS)
        self.stream_record_failures = self._counter(gateway_metrics.RECORD_FAILURES)
        self.response_store_failures = self._counter(gateway_metrics.RESPONSE_FAILURES)
        self.stream_record_bytes = self._counter(gateway_metrics.RECORD_BYTES)
        self.file_store_failures = self._counter(gateway_metrics.FILE_FAILURES)
        self.state_calls = self._counter(gateway_metrics.STATE_CALLS)
        self.quota_wait_seconds = self._histogram(gateway_metrics.STATE_SECONDS)
        self.quotas_alone = self._gauge(gateway_metrics.STATE_ALONE)
        self.releases = self._counter(gateway_metrics.RELEASES)
        self.handoffs = self._counter(gateway_metrics.HANDOFFS)
        self.retentions = self._counter(gateway_metrics.RETENTIONS)
        self.kv_decisions = self._counter(gateway_metrics.KV_DECISIONS)
        self.predictions = self._counter(gateway_metrics.CACHE_PREDICTIONS)
        self.predicted_tokens = self._counter(gateway_metrics.CACHE_PREDICTED)
        self.overpredicted_tokens = self._counter(gateway_metrics.CACHE_OVERPREDICTED)
        self.underpredicted_tokens = self._counter(gateway_metrics.CACHE_UNDERPREDICTED)
        self.prompt_tokens = self._counter(gateway_metrics.PROMPT_TOKENS)
        self.cached_tokens = self._counter(gateway_metrics.CACHED_TOKENS)
        self.prompt_source_tokens = self._counter(gateway_metrics.PROMPT_SOURCES)
        self.computed_tokens = self._counter(gateway_metrics.COMPUTED_TOKENS)
        self.seen_tokens = self._counter(gateway_metrics.SEEN_TOKENS)
        self.seen_exact = self._gauge(gateway_metrics.SEEN_EXACT)
        self.seen_exact.set(1)
        self.handoff_tokens = self._counter(gateway_metrics.HANDOFF_TOKENS)
        self.output_tokens = self._counter(gateway_metrics.OUTPUT_TOKENS)
        self.first_token_seconds = self._histogram(gateway_metrics.FIRST_TOKEN_SECONDS)
        self.token_gap_seconds = self._histogram(gateway_metrics.INTER_TOKEN_SECONDS)
        self.stream_seconds = self._histogram(gateway_metrics.STREAM_SECONDS)
        self.handoff_seconds = self._histogram(gateway_metrics.HANDOFF_SECONDS)
        self.queue_seconds = self._histogram(gateway_metrics.QUEUE_SECONDS)
        self.refusals = self._counter(gateway_metrics.REFUSALS)
        self.ignored_fields = self._counter(gateway_metrics.IGNORED_FIELDS)
        self.tenant_requests = self._counter(gateway_metrics.TENANT_REQUESTS)
        self.tenant_tokens = self._counter(gateway_metrics.TENANT_TOKENS)
        self.batch_lines = self._counter(gateway_metrics.BATCH_LINES)
        self.batches = self._counter(gateway_metrics.BATCHES)

    def tokens_arrived(self, count: int, first_token_seconds: float | None) -> None:
        """Record output tokens of a sample when they arrive.

        Args:
            count: number of tokens.
            first_token_seconds: seconds from the arrival of the request, for the first tokens of the sample; `None` for
                later ones.
        """
        self.output_tokens.inc(count)
        if first_token_seconds is not None:
            self.first_token_seconds.observe(first_token_seconds)

    def stream_ended(self, outcome: str, usage: Usage, timing: Timing) -> None:
        """Record the outcome, usage and timing of an ended sample; its prompt and output are counted before.

        Args:
            outcome: final state of the sample, a value of `State`.
            usage: its tokens.
            timing: its durations and sources of KV.
        """
        self.streams.labels(outcome).inc()
        num_local = usage.cached_tokens - usage.loaded_tokens
        self.cached_tokens.inc(num_local)
        if usage.output_tokens or outcome == State.DONE:
            sources = prompt_sources(usage.prompt_tokens, num_local, timing)
            for source in SOURCES:
                self.prompt_source_tokens.labels(source).inc(getattr(sources, source))
            self.handoff_tokens.inc(sources.handed_off)
        self.stream_seconds.observe(timing.total_seconds)

    def prompt_routed(self, num_tokens: int, *, num_named: int, num_seen: int, is_exact: bool) -> None:
        """Record which tokens of a prompt were in an earlier prompt, when its first route is chosen.

        Args:
            num_tokens: length of the prompt.
            num_named: number of its tokens in blocks that a cache can give.
            num_seen: number of those tokens whose block was in an earlier prompt.
            is_exact: whether no block of an earlier prompt was forgotten.
        """
        self.seen_exact.set(is_exact)
        parts = {"seen": num_seen, "new": num_named - num_seen, "unnamed": num_tokens - num_named}
        for kind, count in parts.items():
            self.seen_tokens.labels(kind).inc(count)

    def kv_reported(self, reports: Sequence[KvReport]) -> None:
        """Record the decisions whether to load KV."""
        for report in reports:
            self.kv_decisions.labels(report.source, "load" if report.num_chosen else "compute").inc()

    def prior_turn_reported(self, reports: Sequence[KvReport]) -> None:
        """Record the hand-offs of a prior turn's KV from a decode worker to a prefill worker."""
        for report in reports:
            if report.source == "peer":
                outcome = HandoffOutcome.FETCHED if report.num_chosen else HandoffOutcome.RECOMPUTED
                self.handoffs.labels(HandoffOutcome.FAILED if report.failure else outcome).inc()

    def ticket_rejected(self, error: TicketRejected) -> None:
        """Record a hand-off whose ticket the decode worker did not accept."""
        is_unknown = error.reason == "TICKET_KEY_UNKNOWN"
        self.handoffs.labels(HandoffOutcome.KEY_UNKNOWN if is_unknown else HandoffOutcome.REJECTED).inc()

    def prefix_predicted(self, predicted: PredictedPrefix, actual_tokens: int) -> None:
        """Compare the prediction of a prompt's cached tokens with the number that the worker reports.

        Args:
            predicted: the prediction at the time of routing.
            actual_tokens: number of cached tokens that the worker reports.
        """
        error = predicted.tokens - actual_tokens
        outcome = "equal" if not error else "over" if error > 0 else "under"
        self.predictions.labels(predicted.basis.value, outcome).inc()
        self.predicted_tokens.labels(predicted.basis.value).inc(predicted.tokens)
        self.overpredicted_tokens.labels(predicted.basis.value).inc(max(0, error))
        self.underpredicted_tokens.labels(predicted.basis.value).inc(max(0, -error))

    def handoff_counts(self) -> dict[str, int]:
        """Return the number of hand-offs by outcome, a value of `HandoffOutcome`; outcomes that have not occurred are
        absent."""
        return {labels["outcome"]: n for labels, n in _totals(self.handoffs)}

    def totals(self) -> Totals:
        """Return a reading of the histograms and counters that the dashboard shows over time."""
        sources = {labels["source"]: n for labels, n in _totals(self.prompt_source_tokens)}
        answers = [(labels["status"], n) for labels, n in _totals(self.requests) if labels["path"] not in PROBES]
        return Totals(
            first_token=_buckets(self.first_token_seconds),
            token_gap=_buckets(self.token_gap_seconds),
            output_tokens=_total(self.output_tokens),
            requests=sum(n for _, n in answers),
            errors=sum(n for status, n in answers if int(status) >= 500),
            streams={labels["outcome"]: n for labels, n in _totals(self.streams)},
            sources={source: sources.get(source, 0) for source in SOURCES},
            handoff_tokens=_total(self.handoff_tokens),
            computed={labels["cause"]: n for labels, n in _totals(self.computed_tokens)},
            seen={labels["kind"]: n for labels, n in _totals(self.seen_tokens)},
        )

    def _counter(self, metric: Metric) -> Counter:
        counter = CheckedCounter(metric.name, metric.help, metric.labels, registry=self.registry)
        counter.metric = metric
        return counter

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)


def _totals(counter: Counter) -> Iterator[tuple[Mapping[str, str], int]]:
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, int(sample.value)


def _total(counter: Counter) -> int:
    """Return the value of a counter without labels."""
    return sum(n for _, n in _totals(counter))


def _buckets(histogram: Histogram) -> Buckets:
    """Return a reading of a histogram without labels."""
    samples = [sample for family in histogram.collect() for sample in family.samples if sample.name.endswith("_bucket")]
    return Buckets(tuple(float(s.labels["le"]) for s in samples), tuple(s.value for s in samples))


def band_label(priority: int) -> str:
    """Return the label of a priority: `high` below 0, `normal` for 0, `low` above."""
    return "high" if priority < 0 else "low" if priority else "normal"


class FlowMetrics:
    """Counters and histograms of one gateway's flow control."""

    def __init__(self, instruments: GatewayInstruments) -> None:
        self._instruments = instruments
        self._labels: dict[str, str] = {}

    def tenant_label(self, tenant: str) -> str:
        """Return the label of a tenant: its name, `default` if that is empty, or `other` for new tenants once
        `MAX_TENANT_LABELS` names are in use."""
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) >= MAX_TENANT_LABELS:
                return "other"
            label = self._labels[tenant] = tenant or "default"
        return label

    def refused(self, tenant: str, reason: str) -> None:
        """Count a request that was not admitted.

        Args:
            tenant: name of the tenant.
            reason: reason of the error.
        """
        self._instruments.refusals.labels(reason).inc()
        self._instruments.tenant_requests.labels(self.tenant_label(tenant), "refused").inc()

    def admitted(self, tenant: str, priority: int, seconds: float) -> None:
        """Count an admitted request, which waited `seconds`.

        Args:
            tenant: name of the tenant.
            priority: priority of the request.
            seconds: time that it waited in the queue.
        """
        self._instruments.queue_seconds.labels(band_label(priority)).observe(seconds)
        self._instruments.tenant_requests.labels(self.tenant_label(tenant), "admitted").inc()

    def used(self, tenant: str, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of a request that has ended.

        Args:
            tenant: name of the tenant; `tenant_label` bounds the number of its label values.
            prompt: number of prompt tokens, cached ones included.
            cached: number of prompt tokens that were cached.
            output: number of output tokens, over all samples.
        """
        label = self.tenant_label(tenant)
        for kind, count in (("prompt", prompt), ("cached", cached), ("output", output)):
            if count:
                self._instruments.tenant_tokens.labels(label, kind).inc(count)


class QueueCollector(Collector):
    """Gauges read from the controller at each scrape."""

    def __init__(self, controller: FlowController, registry: CollectorRegistry) -> None:
        self._controller = controller
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        sizes = {label: QueueSize() for label in BANDS}
        for priority, size in self._controller.by_band.items():
            total = sizes[band_label(priority)]
            total.requests += size.requests
            total.num_bytes += size.num_bytes
        for metric, field in (
            (gateway_metrics.QUEUE, "requests"),
            (gateway_metrics.QUEUE_BYTES, "num_bytes"),
        ):
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for label, size in sizes.items():
                family.add_metric(metric.checked(label), getattr(size, field))
            yield family
        running = GaugeMetricFamily(gateway_metrics.DISPATCHED.name, gateway_metrics.DISPATCHED.help)
        running.add_metric((), self._controller.num_dispatched)
        yield running
