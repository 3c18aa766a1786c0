"""Metrics of gateways."""

from http import HTTPStatus

from kvferry.core.causes import ComputeCause
from kvferry.core.handoffs import HandoffOutcome
from kvferry.core.metrics.metric import LATENCY_BUCKETS, STEP_BUCKETS, Metric, MetricKind
from kvferry.core.retention import RetentionOutcome

REQUESTS = Metric(
    "kvferry_gateway_requests_total",
    MetricKind.COUNTER,
    "HTTP requests answered, by path and status; 0 if the client disconnected before the answer.",
    ("path", "status"),
    values={"status": ("0", "499", *(str(status.value) for status in HTTPStatus))},
)
STREAMS = Metric(
    "kvferry_gateway_streams_total",
    MetricKind.COUNTER,
    "Samples ended, by outcome (done, failed, cancelled).",
    ("outcome",),
    values={"outcome": ("done", "failed", "cancelled")},
)
STREAMS_OPEN = Metric("kvferry_gateway_streams_open", MetricKind.GAUGE, "Samples in flight.")
ROUTES = Metric(
    "kvferry_gateway_routes_total",
    MetricKind.COUNTER,
    "Routing decisions, by reason.",
    ("reason", "spilled"),
    values={
        "reason": ("pair", "converted", "short_prompt", "short_tail", "resume", "both", "pooling", "no_prefill"),
        "spilled": ("true", "false"),
    },
)
RETRIES = Metric(
    "kvferry_gateway_retries_total", MetricKind.COUNTER, "Calls to workers that failed and were retried.", ("reason",)
)
RESUMES = Metric(
    "kvferry_gateway_resumes_total", MetricKind.COUNTER, "Streams resumed by a new call after their first token."
)
RECONNECTIONS = Metric(
    "kvferry_gateway_reconnections_total",
    MetricKind.COUNTER,
    "Clients that came back to a stream with Last-Event-ID: continued from a record, recomputed without one, replayed "
    "after its end, or refused.",
    ("outcome",),
    values={"outcome": ("continued", "recomputed", "replayed", "refused")},
)
RECORD_FAILURES = Metric(
    "kvferry_gateway_stream_record_failures_total",
    MetricKind.COUNTER,
    "Failed writes of records (unreachable), and streams that go on without a record, by reason: Redis too slow, the "
    "records' bound reached (full), a record too large, continued by another gateway (fenced).",
    ("reason",),
    values={"reason": ("unreachable", "slow", "full", "too_large", "fenced")},
)
RESPONSE_FAILURES = Metric(
    "kvferry_gateway_response_store_failures_total",
    MetricKind.COUNTER,
    "Failures of stored responses in Redis by reason: no answer (unreachable), no room for a response (full), one that "
    "another gateway has deleted or found to have failed (fenced), one that the pool's key does not open (foreign).",
    ("reason",),
    values={"reason": ("unreachable", "full", "fenced", "foreign")},
)
FILE_FAILURES = Metric(
    "kvferry_gateway_file_store_failures_total",
    MetricKind.COUNTER,
    "Failures of files and batches in Redis by reason: no answer, or an error (unreachable), no room (full), a write "
    "of a batch that another gateway runs now (fenced), a value that the pool's key does not open (foreign).",
    ("reason",),
    values={"reason": ("unreachable", "full", "fenced", "foreign")},
)
RECORD_BYTES = Metric(
    "kvferry_gateway_stream_record_bytes_total",
    MetricKind.COUNTER,
    "Bytes of records of streams that were written to Redis, with what Redis needs besides, approximate.",
)
STATE_CALLS = Metric(
    "kvferry_gateway_state_calls_total",
    MetricKind.COUNTER,
    "Calls of the Redis server that gateways share, by the part that called and by outcome: ok, no connection "
    "(unreachable), no answer in time (slow), out of memory (full), a replica (read_only), another error.",
    ("part", "outcome"),
    values={
        "part": ("streams", "quotas", "responses", "files"),
        "outcome": ("ok", "unreachable", "slow", "full", "read_only", "error"),
    },
)
STATE_SECONDS = Metric(
    "kvferry_gateway_state_quota_wait_seconds",
    MetricKind.HISTOGRAM,
    "Time for which a request waited for quota from the server that gateways share; most requests do not wait.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
STATE_ALONE = Metric(
    "kvferry_gateway_state_quotas_alone",
    MetricKind.GAUGE,
    "1 while the shared server does not answer, and this gateway has its part of each quota only; else 0.",
)
RELEASES = Metric(
    "kvferry_gateway_releases_total",
    MetricKind.COUNTER,
    "Offers released by the gateway because no decode worker reads them, by outcome (released, lost).",
    ("outcome",),
    values={"outcome": ("released", "lost")},
)
HANDOFFS = Metric(
    "kvferry_gateway_handoffs_total",
    MetricKind.COUNTER,
    f"Hand-offs by outcome ({', '.join(HandoffOutcome)}).",
    ("outcome",),
    values={"outcome": tuple(HandoffOutcome)},
)
RETENTIONS = Metric(
    "kvferry_gateway_retentions_total",
    MetricKind.COUNTER,
    f"Requests that asked the cache to keep their prompt, by outcome ({', '.join(RetentionOutcome)}).",
    ("outcome",),
    values={"outcome": tuple(RetentionOutcome)},
)
PROMPT_TOKENS = Metric("kvferry_gateway_prompt_tokens_total", MetricKind.COUNTER, "Prompt tokens accepted.")
CACHED_TOKENS = Metric(
    "kvferry_gateway_cached_tokens_total", MetricKind.COUNTER, "Prompt tokens served from a prefix cache."
)
PROMPT_SOURCES = Metric(
    "kvferry_gateway_prompt_source_tokens_total",
    MetricKind.COUNTER,
    "Tokens of computed prompts by the source of their KV (computed, cached, peer, tier).",
    ("source",),
    values={"source": ("computed", "cached", "peer", "tier")},
)
COMPUTED_TOKENS = Metric(
    "kvferry_gateway_computed_tokens_total",
    MetricKind.COUNTER,
    f"Prompt tokens that workers computed, by cause ({', '.join(ComputeCause)}).",
    ("cause",),
    values={"cause": tuple(ComputeCause)},
)
SEEN_TOKENS = Metric(
    "kvferry_gateway_seen_prompt_tokens_total",
    MetricKind.COUNTER,
    "Tokens of routed prompts, by whether their block was in an earlier prompt at this gateway (seen, new, unnamed: "
    "not in a block that a cache can give).",
    ("kind",),
    values={"kind": ("seen", "new", "unnamed")},
)
SEEN_EXACT = Metric(
    "kvferry_gateway_seen_prompt_tokens_exact",
    MetricKind.GAUGE,
    "1 while the record of earlier prompts' blocks has forgotten none; 0: the number of seen tokens is a lower bound.",
)
HANDOFF_TOKENS = Metric(
    "kvferry_gateway_handoff_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens whose KV decode workers fetched from prefill workers.",
)
OUTPUT_TOKENS = Metric("kvferry_gateway_output_tokens_total", MetricKind.COUNTER, "Tokens generated.")
FIRST_TOKEN_SECONDS = Metric(
    "kvferry_gateway_time_to_first_token_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a request's arrival to its first token.",
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN_SECONDS = Metric(
    "kvferry_gateway_inter_token_seconds",
    MetricKind.HISTOGRAM,
    "Seconds between consecutive messages with tokens in a stream.",
    buckets=STEP_BUCKETS,
)
STREAM_SECONDS = Metric(
    "kvferry_gateway_stream_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a request's arrival to a sample's end.",
    buckets=LATENCY_BUCKETS,
)
HANDOFF_SECONDS = Metric(
    "kvferry_gateway_handoff_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a decode worker's claim until its blocks are verified.",
    buckets=STEP_BUCKETS,
)
WORKERS = Metric(
    "kvferry_gateway_workers",
    MetricKind.GAUGE,
    "Workers of the fleet, by role and readiness (ready, out).",
    ("role", "state"),
    values={"role": ("prefill", "decode", "both"), "state": ("ready", "out")},
)
_BASIS = ("basis",)
_BASIS_VALUES = {"basis": ("exact", "pending", "history")}
CACHE_PREDICTIONS = Metric(
    "kvferry_gateway_cache_predictions_total",
    MetricKind.COUNTER,
    "Predictions of cached tokens by basis (exact, pending, history) and outcome (equal, over, under).",
    ("basis", "outcome"),
    values={**_BASIS_VALUES, "outcome": ("equal", "over", "under")},
)
CACHE_PREDICTED = Metric(
    "kvferry_gateway_cache_predicted_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens predicted to be cached on the worker that computes the prompt.",
    _BASIS,
    values=_BASIS_VALUES,
)
CACHE_OVERPREDICTED = Metric(
    "kvferry_gateway_cache_overpredicted_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens predicted to be cached that were not.",
    _BASIS,
    values=_BASIS_VALUES,
)
CACHE_UNDERPREDICTED = Metric(
    "kvferry_gateway_cache_underpredicted_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens that were cached beyond the prediction.",
    _BASIS,
    values=_BASIS_VALUES,
)
MAP_STATE = Metric(
    "kvferry_gateway_cache_map_state",
    MetricKind.GAUGE,
    "1 for the state of a worker's cache map (exact, catching_up, blind).",
    ("worker", "state"),
    values={"state": ("exact", "catching_up", "blind")},
)
MAP_BLOCKS = Metric(
    "kvferry_gateway_cache_map_blocks", MetricKind.GAUGE, "Blocks in a worker's cache map.", ("worker",)
)
MAP_BYTES = Metric("kvferry_gateway_cache_map_bytes", MetricKind.GAUGE, "Approximate memory of the cache map.")
MAP_EVENTS = Metric(
    "kvferry_gateway_cache_map_events_total",
    MetricKind.COUNTER,
    "Blocks in events of cache feeds, by kind (snapshot, stored, removed).",
    ("kind",),
    values={"kind": ("snapshot", "stored", "removed")},
)
MAP_LOSSES = Metric(
    "kvferry_gateway_cache_map_losses_total",
    MetricKind.COUNTER,
    "Cache maps dropped, by reason (gap, mismatch, other_incarnation, feed_lost, ...).",
    ("reason",),
    values={
        "reason": (
            *("mismatch", "gap", "other_incarnation", "malformed", "other_names", "full", "audit_failed"),
            "feed_lost",
        )
    },
)
MAP_COLLISIONS = Metric(
    "kvferry_gateway_cache_map_collisions_total",
    MetricKind.COUNTER,
    "Block names whose leading 60 bits equal those of another name of the same worker.",
)
MAP_AUDITS = Metric(
    "kvferry_gateway_cache_map_audits_total",
    MetricKind.COUNTER,
    "Comparisons of a cache map with its worker, by outcome (match, mismatch, stalled, skipped, failed).",
    ("outcome",),
    values={"outcome": ("match", "mismatch", "stalled", "skipped", "failed")},
)
STALE = Metric(
    "kvferry_gateway_fleet_stale",
    MetricKind.GAUGE,
    "1 while the source of the worker list fails and the last known list is used.",
)
_QUEUE_BUCKETS = (0.001, 0.002, 0.005, *LATENCY_BUCKETS[1:])
_BAND = ("band",)
_BAND_VALUES = {"band": ("high", "normal", "low")}
QUEUE = Metric(
    "kvferry_gateway_queued_requests",
    MetricKind.GAUGE,
    "Requests waiting for room on the fleet, by priority: high (below 0), normal (0), low (above 0).",
    _BAND,
    values=_BAND_VALUES,
)
QUEUE_BYTES = Metric(
    "kvferry_gateway_queued_bytes",
    MetricKind.GAUGE,
    "Memory of the queued requests in bytes, by priority.",
    _BAND,
    values=_BAND_VALUES,
)
DISPATCHED = Metric(
    "kvferry_gateway_dispatched_requests", MetricKind.GAUGE, "Requests that have left the queue and have not ended."
)
QUEUE_SECONDS = Metric(
    "kvferry_gateway_queue_seconds",
    MetricKind.HISTOGRAM,
    "Seconds that admitted requests have waited in the gateway's queue, by priority.",
    _BAND,
    _QUEUE_BUCKETS,
    _BAND_VALUES,
)
REFUSALS = Metric(
    "kvferry_gateway_refusals_total",
    MetricKind.COUNTER,
    "Requests not admitted, by reason: queue_full, displaced, deadline, cancelled, pool_empty, priority, model, or the "
    "name of a quota.",
    ("reason",),
    values={
        "reason": (
            *("queue_full", "displaced", "deadline", "cancelled", "pool_empty", "priority", "model"),
            *("concurrent_requests", "requests_per_minute", "tokens_per_minute"),
        )
    },
)
IGNORED_FIELDS = Metric(
    "kvferry_gateway_ignored_fields_total",
    MetricKind.COUNTER,
    "Fields of HTTP requests that had no effect, by field, or `unknown`.",
    ("field",),
)
TENANT_REQUESTS = Metric(
    "kvferry_gateway_tenant_requests_total",
    MetricKind.COUNTER,
    "Requests by tenant and outcome (admitted, refused); after 100 tenants, further ones are `other`.",
    ("tenant", "outcome"),
    values={"outcome": ("admitted", "refused")},
)
TENANT_TOKENS = Metric(
    "kvferry_gateway_tenant_tokens_total",
    MetricKind.COUNTER,
    "Tokens by tenant and kind (prompt, cached, output); cached ones are among those of the prompt.",
    ("tenant", "kind"),
    values={"kind": ("prompt", "cached", "output")},
)
BATCH_LINES = Metric(
    "kvferry_gateway_batch_lines_total",
    MetricKind.COUNTER,
    "Lines of batches by outcome (completed, failed, expired, cancelled), or sent again later for lack of room "
    "(retried).",
    ("outcome",),
    values={"outcome": ("completed", "failed", "expired", "cancelled", "retried")},
)
BATCHES = Metric(
    "kvferry_gateway_batches_total",
    MetricKind.COUNTER,
    "Batches that entered a state, by state.",
    ("state",),
    values={"state": ("failed", "in_progress", "finalizing", "completed", "expired", "cancelled")},
)
PAUSED = Metric(
    "kvferry_gateway_paused_seconds", MetricKind.GAUGE, "Time for which generation is paused; 0 while it runs."
)
WEIGHTS = Metric(
    "kvferry_gateway_weights_info", MetricKind.GAUGE, "1 for the version of the weights of each worker.",
    ("worker", "version"),
)  # fmt: skip
HELD = Metric("kvferry_gateway_held_requests", MetricKind.GAUGE, "Samples held until the pool has a worker.")
WAKES = Metric(
    "kvferry_gateway_scale_from_zero_total", MetricKind.COUNTER, "Roles of the pool scaled from 0 replicas to 1."
)
KV_DECISIONS = Metric(
    "kvferry_gateway_kv_decisions_total",
    MetricKind.COUNTER,
    "Decisions whether to load or compute KV, by source and choice.",
    ("source", "choice"),
    values={"choice": ("load", "compute")},
)
