"""Metric for the expiry of the gateway's certificates."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core.metrics import tls_metrics


class HasExpiry(Protocol):
    """A certificate that may be renewed."""

    @property
    def not_after(self) -> float:
        """End of its validity, wall-clock seconds since the epoch."""
        ...


class CertificateCollector(Collector):
    """Gauge of the end of each certificate's validity, read at each scrape."""

    def __init__(self, certificates: Mapping[str, HasExpiry | None], registry: CollectorRegistry) -> None:
        """
        Args:
            certificates: certificate by its use, `pool` or `clients`; `None` without TLS for this use.
            registry: registry in which the collector is registered.
        """
        self._certificates = {use: found for use, found in certificates.items() if found is not None}
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self._certificates:
            metric = tls_metrics.NOT_AFTER
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for use, certificate in self._certificates.items():
                gauge.add_metric(metric.checked(use), certificate.not_after)
            yield gauge
