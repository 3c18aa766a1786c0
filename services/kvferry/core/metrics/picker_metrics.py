"""Metrics of endpoint pickers."""

from kvferry.core.metrics.metric import Metric, MetricKind

PICKS = Metric(
    "kvferry_picker_picks_total",
    MetricKind.COUNTER,
    "Requests for which an endpoint was chosen: one, or a pair with a prefill endpoint; by trust in the load.",
    ("kind", "trust"),
    values={"kind": ("one", "pair"), "trust": ("fresh", "stale", "lost")},
)
REFUSALS = Metric(
    "kvferry_picker_refusals_total",
    MetricKind.COUNTER,
    "Requests that were refused, by reason.",
    ("reason",),
    values={"reason": ("no_endpoints", "subset_empty", "shed", "queue_full", "displaced")},
)
BODIES = Metric(
    "kvferry_picker_bodies_total",
    MetricKind.COUNTER,
    "Bodies read, by the reason why a prompt was not found in it (none: it was).",
    ("problem",),
    values={"problem": ("none", "no_body", "too_large", "not_json", "no_prompt")},
)
SERVED = Metric(
    "kvferry_picker_served_total",
    MetricKind.COUNTER,
    "Responses by the endpoint that served them: the chosen one, a fallback, or not reported by the proxy.",
    ("outcome",),
    values={"outcome": ("picked", "fallback", "unknown")},
)
SCRAPES = Metric(
    "kvferry_picker_scrapes_total",
    MetricKind.COUNTER,
    "Scrapes of endpoints: read, without metrics of a known model server, or failed.",
    ("outcome",),
    values={"outcome": ("ok", "unknown", "failed")},
)
CACHED_TOKENS = Metric(
    "kvferry_picker_cached_tokens_total",
    MetricKind.COUNTER,
    "Estimated prompt tokens that the chosen endpoints are assumed to have cached.",
)
PROMPT_TOKENS = Metric(
    "kvferry_picker_prompt_tokens_total", MetricKind.COUNTER, "Estimated prompt tokens in full chunks."
)
ENDPOINTS = Metric(
    "kvferry_picker_endpoints",
    MetricKind.GAUGE,
    "Endpoints of the pool, by trust in their reported load.",
    ("trust",),
    values={"trust": ("fresh", "stale", "lost")},
)
OPEN = Metric("kvferry_picker_open_requests", MetricKind.GAUGE, "Requests in flight that this picker has sent.")
QUEUED = Metric("kvferry_picker_queued_requests", MetricKind.GAUGE, "Requests that wait while the pool is full.")
SECONDS = Metric(
    "kvferry_picker_decision_seconds",
    MetricKind.HISTOGRAM,
    "Time from the complete body to the decision, with the wait while the pool is full.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0),
)
