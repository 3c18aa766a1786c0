"""Metrics of the operator."""

from kvferry.core.metrics.metric import STEP_BUCKETS, Metric, MetricKind

RECONCILE = Metric(
    "kvferry_operator_reconcile_seconds",
    MetricKind.HISTOGRAM,
    "Duration of a reconcile of a pool in seconds.",
    buckets=STEP_BUCKETS,
)
FAILURES = Metric(
    "kvferry_operator_failures_total", MetricKind.COUNTER, "Reconciles that failed and are retried.", ("reason",)
)
LEADS = Metric("kvferry_operator_is_leader", MetricKind.GAUGE, "1 while this operator holds the lease.")
CALLS = Metric("kvferry_operator_api_calls_total", MetricKind.COUNTER, "Calls to the API server.", ("method", "kind"))
QUEUE = Metric("kvferry_operator_queued_pools", MetricKind.GAUGE, "Pools waiting for a reconcile.")
