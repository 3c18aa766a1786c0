"""Metrics of flow control: gauges of the queue, counters by tenant with a bounded number of labels."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core import metrics
from kvferry.gateway.decide.flow.controller import FlowController, QueueSize
from kvferry.gateway.observe.instruments import Instruments

MAX_TENANT_LABELS = 100
"""Number of tenants that get their own label, in order of their first requests; further ones share the label
`other`."""
BANDS = ("high", "normal", "low")


def band_label(priority: int) -> str:
    """Return the label of a priority: `high` below 0, `normal` for 0, `low` above."""
    return "high" if priority < 0 else "low" if priority else "normal"


class FlowMetrics:
    """Counters and histograms of one gateway's flow control."""

    def __init__(self, instruments: Instruments) -> None:
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
        for metric, field in ((metrics.GATEWAY_QUEUE, "requests"), (metrics.GATEWAY_QUEUE_BYTES, "num_bytes")):
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for label, size in sizes.items():
                family.add_metric(metric.checked(label), getattr(size, field))
            yield family
        running = GaugeMetricFamily(metrics.GATEWAY_DISPATCHED.name, metrics.GATEWAY_DISPATCHED.help)
        running.add_metric((), self._controller.num_dispatched)
        yield running
