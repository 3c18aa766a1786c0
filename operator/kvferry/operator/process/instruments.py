"""Metrics of the operator."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core import metrics
from kvferry.core.clock import Clock
from kvferry.core.metrics import Metric
from kvferry.operator.api import KubeApi
from kvferry.operator.plan.process.work_queue import WorkQueue
from kvferry.operator.pool.facts import Key


class OperatorInstruments:
    """Metrics and registry of an operator."""

    def __init__(self, api: KubeApi, queue: WorkQueue[Key], clock: Clock) -> None:
        # Otherwise each counter and histogram has a further series, `_created`.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client has no annotation for it
        self.registry = CollectorRegistry()

        def named(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
            return metric.name, metric.help, metric.labels

        self.reconcile_seconds = Histogram(
            *named(metrics.OPERATOR_RECONCILE), registry=self.registry, buckets=metrics.OPERATOR_RECONCILE.buckets
        )
        self.failures = Counter(*named(metrics.OPERATOR_FAILURES), registry=self.registry)
        self.leads = Gauge(*named(metrics.OPERATOR_LEADS), registry=self.registry)
        self.registry.register(_Calls(api, queue, clock))


class _Calls(Collector):
    """Metrics that are read from the API client and the queue at scrape time."""

    def __init__(self, api: KubeApi, queue: WorkQueue[Key], clock: Clock) -> None:
        self._api = api
        self._queue = queue
        self._clock = clock

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        calls = CounterMetricFamily(
            metrics.OPERATOR_CALLS.name, metrics.OPERATOR_CALLS.help, labels=metrics.OPERATOR_CALLS.labels
        )
        for counted, n in dict(self._api.num_calls).items():
            calls.add_metric(counted.split(" "), n)
        yield calls
        waiting = GaugeMetricFamily(metrics.OPERATOR_QUEUE.name, metrics.OPERATOR_QUEUE.help)
        waiting.add_metric([], self._queue.num_waiting(self._clock.monotonic()))
        yield waiting
