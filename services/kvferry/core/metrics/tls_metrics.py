"""Metrics of certificates, of all processes."""

from kvferry.core.metrics.metric import Metric, MetricKind

NOT_AFTER = Metric(
    "kvferry_tls_certificate_not_after_seconds",
    MetricKind.GAUGE,
    "Expiry of the process's certificate in seconds since the epoch, by use (pool, clients).",
    ("use",),
    values={"use": ("pool", "clients")},
)
