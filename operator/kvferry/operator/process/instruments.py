"""Metrics of the operator."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core.clock import Clock
from kvferry.core.metrics import operator_metrics
from kvferry.core.metrics.metric import Metric
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
            *named(operator_metrics.RECONCILE),
            registry=self.registry,
            buckets=operator_metrics.RECONCILE.buckets,
        )
        self.failures = Counter(*named(operator_metrics.FAILURES), registry=self.registry)
        self.leads = Gauge(*named(operator_metrics.LEADS), registry=self.registry)
        self.registry.register(_Calls(api, queue, clock))


class _Calls(Collector):
    """Metrics that are read from the API client and the queue at scrape time."""

    def __init__(self, api: KubeApi, queue: WorkQueue[Key], clock: Clock) -> None:
        self._api = api
        self._queue = queue
        self._clock = clock

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        calls = CounterMetricFamily(
            operator_metrics.CALLS.name,
            operator_metrics.CALLS.help,
            labels=operator_metrics.CALLS.labels,
        )
        for counted, n in dict(self._api.num_calls).items():
            calls.add_metric(counted.split(" "), n)
        yield calls
        waiting = GaugeMetricFamily(operator_metrics.QUEUE.name, operator_metrics.QUEUE.help)
        waiting.add_metric([], self._queue.num_waiting(self._clock.monotonic()))
        yield waiting
