"""Name, kind, labels and help of every metric.

Names include the unit. In addition to kvferry's own metrics, a few metrics have vLLM's names, because the model-server
protocol of the Gateway API Inference Extension and common dashboards read these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from kvferry.core.causes import ComputeCause
from kvferry.core.handoffs import HandoffOutcome
from kvferry.core.retention import RetentionOutcome


class MetricKind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; empty for other kinds."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)
    """All values of each label whose values are known in advance; other labels, such as `worker`, can have any."""

    def checked(self, *values: str) -> Sequence[str]:
        """Return the values of the labels, in order.

        Raises:
            ValueError: a value is not in the label's set.
        """
        for label, value in zip(self.labels, values, strict=True):
            if value not in self.values.get(label, (value,)):
                raise ValueError(
                    f"label {label} of {self.name} has no value {value!r}; add it to `values` in core/metrics.py"
                )
        return values


_LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

GATEWAY_REQUESTS = Metric(
    "kvferry_gateway_requests_total",
    MetricKind.COUNTER,
    "HTTP requests answered, by path and status; 0 if the client disconnected before the answer.",
    ("path", "status"),
    values={"status": ("0", "499", *(str(status.value) for status in HTTPStatus))},
)
GATEWAY_STREAMS = Metric(
    "kvferry_gateway_streams_total",
    MetricKind.COUNTER,
    "Samples ended, by outcome (done, failed, cancelled).",
    ("outcome",),
    values={"outcome": ("done", "failed", "cancelled")},
)
GATEWAY_STREAMS_OPEN = Metric("kvferry_gateway_streams_open", MetricKind.GAUGE, "Samples in flight.")
GATEWAY_ROUTES = Metric(
    "kvferry_gateway_routes_total",
    MetricKind.COUNTER,
    "Routing decisions, by reason.",
    ("reason", "spilled"),
    values={
        "reason": ("pair", "converted", "short_prompt", "short_tail", "resume", "both", "pooling", "no_prefill"),
        "spilled": ("true", "false"),
    },
)
GATEWAY_RETRIES = Metric(
    "kvferry_gateway_retries_total", MetricKind.COUNTER, "Calls to workers that failed and were retried.", ("reason",)
)
GATEWAY_RESUMES = Metric(
    "kvferry_gateway_resumes_total", MetricKind.COUNTER, "Streams resumed by a new call after their first token."
)
GATEWAY_RECONNECTIONS = Metric(
    "kvferry_gateway_reconnections_total",
    MetricKind.COUNTER,
    "Clients that came back to a stream with Last-Event-ID: continued from a record, recomputed without one, replayed "
    "after its end, or refused.",
    ("outcome",),
    values={"outcome": ("continued", "recomputed", "replayed", "refused")},
)
GATEWAY_RECORD_FAILURES = Metric(
    "kvferry_gateway_stream_record_failures_total",
    MetricKind.COUNTER,
    "Failed writes of records (unreachable), and streams that go on without a record, by reason: Redis too slow, the "
    "records' bound reached (full), a record too large, continued by another gateway (fenced).",
    ("reason",),
    values={"reason": ("unreachable", "slow", "full", "too_large", "fenced")},
)
GATEWAY_RESPONSE_FAILURES = Metric(
    "kvferry_gateway_response_store_failures_total",
    MetricKind.COUNTER,
    "Failures of stored responses in Redis by reason: no answer (unreachable), no room for a response (full), one that "
    "another gateway has deleted or found to have failed (fenced), one that the pool's key does not open (foreign).",
    ("reason",),
    values={"reason": ("unreachable", "full", "fenced", "foreign")},
)
GATEWAY_FILE_FAILURES = Metric(
    "kvferry_gateway_file_store_failures_total",
    MetricKind.COUNTER,
    "Failures of files and batches in Redis by reason: no answer, or an error (unreachable), no room (full), a write "
    "of a batch that another gateway runs now (fenced), a value that the pool's key does not open (foreign).",
    ("reason",),
    values={"reason": ("unreachable", "full", "fenced", "foreign")},
)
GATEWAY_RECORD_BYTES = Metric(
    "kvferry_gateway_stream_record_bytes_total",
    MetricKind.COUNTER,
    "Bytes of records of streams that were written to Redis, with what Redis needs besides, approximate.",
)
GATEWAY_STATE_CALLS = Metric(
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
GATEWAY_STATE_SECONDS = Metric(
    "kvferry_gateway_state_quota_wait_seconds",
    MetricKind.HISTOGRAM,
    "Time for which a request waited for quota from the server that gateways share; most requests do not wait.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
GATEWAY_STATE_ALONE = Metric(
    "kvferry_gateway_state_quotas_alone",
    MetricKind.GAUGE,
    "1 while the shared server does not answer, and this gateway has its part of each quota only; else 0.",
)
GATEWAY_RELEASES = Metric(
    "kvferry_gateway_releases_total",
    MetricKind.COUNTER,
    "Offers released by the gateway because no decode worker reads them, by outcome (released, lost).",
    ("outcome",),
    values={"outcome": ("released", "lost")},
)
GATEWAY_HANDOFFS = Metric(
    "kvferry_gateway_handoffs_total",
    MetricKind.COUNTER,
    f"Hand-offs by outcome ({', '.join(HandoffOutcome)}).",
    ("outcome",),
    values={"outcome": tuple(HandoffOutcome)},
)
GATEWAY_RETENTIONS = Metric(
    "kvferry_gateway_retentions_total",
    MetricKind.COUNTER,
    f"Requests that asked the cache to keep their prompt, by outcome ({', '.join(RetentionOutcome)}).",
    ("outcome",),
    values={"outcome": tuple(RetentionOutcome)},
)
GATEWAY_PROMPT_TOKENS = Metric("kvferry_gateway_prompt_tokens_total", MetricKind.COUNTER, "Prompt tokens accepted.")
GATEWAY_CACHED_TOKENS = Metric(
    "kvferry_gateway_cached_tokens_total", MetricKind.COUNTER, "Prompt tokens served from a prefix cache."
)
GATEWAY_PROMPT_SOURCES = Metric(
    "kvferry_gateway_prompt_source_tokens_total",
    MetricKind.COUNTER,
    "Tokens of computed prompts by the source of their KV (computed, cached, peer, tier).",
    ("source",),
    values={"source": ("computed", "cached", "peer", "tier")},
)
GATEWAY_COMPUTED_TOKENS = Metric(
    "kvferry_gateway_computed_tokens_total",
    MetricKind.COUNTER,
    f"Prompt tokens that workers computed, by cause ({', '.join(ComputeCause)}).",
    ("cause",),
    values={"cause": tuple(ComputeCause)},
)
GATEWAY_SEEN_TOKENS = Metric(
    "kvferry_gateway_seen_prompt_tokens_total",
    MetricKind.COUNTER,
    "Tokens of routed prompts, by whether their block was in an earlier prompt at this gateway (seen, new, unnamed: "
    "not in a block that a cache can give).",
    ("kind",),
    values={"kind": ("seen", "new", "unnamed")},
)
GATEWAY_SEEN_EXACT = Metric(
    "kvferry_gateway_seen_prompt_tokens_exact",
    MetricKind.GAUGE,
    "1 while the record of earlier prompts' blocks has forgotten none; 0: the number of seen tokens is a lower bound.",
)
GATEWAY_HANDOFF_TOKENS = Metric(
    "kvferry_gateway_handoff_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens whose KV decode workers fetched from prefill workers.",
)
GATEWAY_OUTPUT_TOKENS = Metric("kvferry_gateway_output_tokens_total", MetricKind.COUNTER, "Tokens generated.")
GATEWAY_FIRST_TOKEN_SECONDS = Metric(
    "kvferry_gateway_time_to_first_token_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a request's arrival to its first token.",
    buckets=_LATENCY_BUCKETS,
)
GATEWAY_INTER_TOKEN_SECONDS = Metric(
    "kvferry_gateway_inter_token_seconds",
    MetricKind.HISTOGRAM,
    "Seconds between consecutive messages with tokens in a stream.",
    buckets=_STEP_BUCKETS,
)
GATEWAY_STREAM_SECONDS = Metric(
    "kvferry_gateway_stream_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a request's arrival to a sample's end.",
    buckets=_LATENCY_BUCKETS,
)
GATEWAY_HANDOFF_SECONDS = Metric(
    "kvferry_gateway_handoff_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a decode worker's claim until its blocks are verified.",
    buckets=_STEP_BUCKETS,
)
GATEWAY_WORKERS = Metric(
    "kvferry_gateway_workers",
    MetricKind.GAUGE,
    "Workers of the fleet, by role and readiness (ready, out).",
    ("role", "state"),
    values={"role": ("prefill", "decode", "both"), "state": ("ready", "out")},
)

_BASIS = ("basis",)
_BASIS_VALUES = {"basis": ("exact", "pending", "history")}
GATEWAY_CACHE_PREDICTIONS = Metric(
    "kvferry_gateway_cache_predictions_total",
    MetricKind.COUNTER,
    "Predictions of cached tokens by basis (exact, pending, history) and outcome (equal, over, under).",
    ("basis", "outcome"),
    values={**_BASIS_VALUES, "outcome": ("equal", "over", "under")},
)
GATEWAY_CACHE_PREDICTED = Metric(
    "kvferry_gateway_cache_predicted_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens predicted to be cached on the worker that computes the prompt.",
    _BASIS,
    values=_BASIS_VALUES,
)
GATEWAY_CACHE_OVERPREDICTED = Metric(
    "kvferry_gateway_cache_overpredicted_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens predicted to be cached that were not.",
    _BASIS,
    values=_BASIS_VALUES,
)
GATEWAY_CACHE_UNDERPREDICTED = Metric(
    "kvferry_gateway_cache_underpredicted_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens that were cached beyond the prediction.",
    _BASIS,
    values=_BASIS_VALUES,
)
GATEWAY_MAP_STATE = Metric(
    "kvferry_gateway_cache_map_state",
    MetricKind.GAUGE,
    "1 for the state of a worker's cache map (exact, catching_up, blind).",
    ("worker", "state"),
    values={"state": ("exact", "catching_up", "blind")},
)
GATEWAY_MAP_BLOCKS = Metric(
    "kvferry_gateway_cache_map_blocks", MetricKind.GAUGE, "Blocks in a worker's cache map.", ("worker",)
)
GATEWAY_MAP_BYTES = Metric("kvferry_gateway_cache_map_bytes", MetricKind.GAUGE, "Approximate memory of the cache map.")
GATEWAY_MAP_EVENTS = Metric(
    "kvferry_gateway_cache_map_events_total",
    MetricKind.COUNTER,
    "Blocks in events of cache feeds, by kind (snapshot, stored, removed).",
    ("kind",),
    values={"kind": ("snapshot", "stored", "removed")},
)
GATEWAY_MAP_LOSSES = Metric(
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
GATEWAY_MAP_COLLISIONS = Metric(
    "kvferry_gateway_cache_map_collisions_total",
    MetricKind.COUNTER,
    "Block names whose leading 60 bits equal those of another name of the same worker.",
)
GATEWAY_MAP_AUDITS = Metric(
    "kvferry_gateway_cache_map_audits_total",
    MetricKind.COUNTER,
    "Comparisons of a cache map with its worker, by outcome (match, mismatch, stalled, skipped, failed).",
    ("outcome",),
    values={"outcome": ("match", "mismatch", "stalled", "skipped", "failed")},
)

GATEWAY_STALE = Metric(
    "kvferry_gateway_fleet_stale",
    MetricKind.GAUGE,
    "1 while the source of the worker list fails and the last known list is used.",
)
_QUEUE_BUCKETS = (0.001, 0.002, 0.005, *_LATENCY_BUCKETS[1:])
_BAND = ("band",)
_BAND_VALUES = {"band": ("high", "normal", "low")}
GATEWAY_QUEUE = Metric(
    "kvferry_gateway_queued_requests",
    MetricKind.GAUGE,
    "Requests waiting for room on the fleet, by priority: high (below 0), normal (0), low (above 0).",
    _BAND,
    values=_BAND_VALUES,
)
GATEWAY_QUEUE_BYTES = Metric(
    "kvferry_gateway_queued_bytes",
    MetricKind.GAUGE,
    "Memory of the queued requests in bytes, by priority.",
    _BAND,
    values=_BAND_VALUES,
)
GATEWAY_DISPATCHED = Metric(
    "kvferry_gateway_dispatched_requests", MetricKind.GAUGE, "Requests that have left the queue and have not ended."
)
GATEWAY_QUEUE_SECONDS = Metric(
    "kvferry_gateway_queue_seconds",
    MetricKind.HISTOGRAM,
    "Seconds that admitted requests have waited in the gateway's queue, by priority.",
    _BAND,
    _QUEUE_BUCKETS,
    _BAND_VALUES,
)
GATEWAY_REFUSALS = Metric(
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
GATEWAY_IGNORED_FIELDS = Metric(
    "kvferry_gateway_ignored_fields_total",
    MetricKind.COUNTER,
    "Fields of HTTP requests that had no effect, by field, or `unknown`.",
    ("field",),
)
GATEWAY_TENANT_REQUESTS = Metric(
    "kvferry_gateway_tenant_requests_total",
    MetricKind.COUNTER,
    "Requests by tenant and outcome (admitted, refused); after 100 tenants, further ones are `other`.",
    ("tenant", "outcome"),
    values={"outcome": ("admitted", "refused")},
)
GATEWAY_TENANT_TOKENS = Metric(
    "kvferry_gateway_tenant_tokens_total",
    MetricKind.COUNTER,
    "Tokens by tenant and kind (prompt, cached, output); cached ones are among those of the prompt.",
    ("tenant", "kind"),
    values={"kind": ("prompt", "cached", "output")},
)

GATEWAY_BATCH_LINES = Metric(
    "kvferry_gateway_batch_lines_total",
    MetricKind.COUNTER,
    "Lines of batches by outcome (completed, failed, expired, cancelled), or sent again later for lack of room "
    "(retried).",
    ("outcome",),
    values={"outcome": ("completed", "failed", "expired", "cancelled", "retried")},
)
GATEWAY_BATCHES = Metric(
    "kvferry_gateway_batches_total",
    MetricKind.COUNTER,
    "Batches that entered a state, by state.",
    ("state",),
    values={"state": ("failed", "in_progress", "finalizing", "completed", "expired", "cancelled")},
)

GATEWAY_PAUSED = Metric(
    "kvferry_gateway_paused_seconds", MetricKind.GAUGE, "Time for which generation is paused; 0 while it runs."
)
GATEWAY_WEIGHTS = Metric(
    "kvferry_gateway_weights_info", MetricKind.GAUGE, "1 for the version of the weights of each worker.",
    ("worker", "version"),
)  # fmt: skip
GATEWAY_HELD = Metric("kvferry_gateway_held_requests", MetricKind.GAUGE, "Samples held until the pool has a worker.")
GATEWAY_WAKES = Metric(
    "kvferry_gateway_scale_from_zero_total", MetricKind.COUNTER, "Roles of the pool scaled from 0 replicas to 1."
)

PICKER_PICKS = Metric(
    "kvferry_picker_picks_total",
    MetricKind.COUNTER,
    "Requests for which an endpoint was chosen: one, or a pair with a prefill endpoint; by trust in the load.",
    ("kind", "trust"),
    values={"kind": ("one", "pair"), "trust": ("fresh", "stale", "lost")},
)
PICKER_REFUSALS = Metric(
    "kvferry_picker_refusals_total",
    MetricKind.COUNTER,
    "Requests that were refused, by reason.",
    ("reason",),
    values={"reason": ("no_endpoints", "subset_empty", "shed", "queue_full", "displaced")},
)
PICKER_BODIES = Metric(
    "kvferry_picker_bodies_total",
    MetricKind.COUNTER,
    "Bodies read, by the reason why a prompt was not found in it (none: it was).",
    ("problem",),
    values={"problem": ("none", "no_body", "too_large", "not_json", "no_prompt")},
)
PICKER_SERVED = Metric(
    "kvferry_picker_served_total",
    MetricKind.COUNTER,
    "Responses by the endpoint that served them: the chosen one, a fallback, or not reported by the proxy.",
    ("outcome",),
    values={"outcome": ("picked", "fallback", "unknown")},
)
PICKER_SCRAPES = Metric(
    "kvferry_picker_scrapes_total",
    MetricKind.COUNTER,
    "Scrapes of endpoints: read, without metrics of a known model server, or failed.",
    ("outcome",),
    values={"outcome": ("ok", "unknown", "failed")},
)
PICKER_CACHED_TOKENS = Metric(
    "kvferry_picker_cached_tokens_total",
    MetricKind.COUNTER,
    "Estimated prompt tokens that the chosen endpoints are assumed to have cached.",
)
PICKER_PROMPT_TOKENS = Metric(
    "kvferry_picker_prompt_tokens_total", MetricKind.COUNTER, "Estimated prompt tokens in full chunks."
)
PICKER_ENDPOINTS = Metric(
    "kvferry_picker_endpoints",
    MetricKind.GAUGE,
    "Endpoints of the pool, by trust in their reported load.",
    ("trust",),
    values={"trust": ("fresh", "stale", "lost")},
)
PICKER_OPEN = Metric("kvferry_picker_open_requests", MetricKind.GAUGE, "Requests in flight that this picker has sent.")
PICKER_QUEUED = Metric("kvferry_picker_queued_requests", MetricKind.GAUGE, "Requests that wait while the pool is full.")
PICKER_SECONDS = Metric(
    "kvferry_picker_decision_seconds",
    MetricKind.HISTOGRAM,
    "Time from the complete body to the decision, with the wait while the pool is full.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0),
)

_WORKER = ("worker",)
WORKER_READY = Metric("kvferry_worker_ready", MetricKind.GAUGE, "1 while the worker takes new requests.", _WORKER)
WORKER_LOAD_SECONDS = Metric(
    "kvferry_model_load_seconds",
    MetricKind.GAUGE,
    "Seconds that the process took to open the model and load its weights, without a download.",
    _WORKER,
)
WORKER_RUNNING = Metric("kvferry_worker_running", MetricKind.GAUGE, "Sequences in the running batch.", _WORKER)
WORKER_WAITING = Metric("kvferry_worker_waiting", MetricKind.GAUGE, "Sequences waiting for pages or a slot.", _WORKER)
WORKER_LOADING = Metric(
    "kvferry_worker_loading", MetricKind.GAUGE, "Sequences waiting for KV from a peer or a tier.", _WORKER
)
WORKER_BLOCKS = Metric("kvferry_worker_blocks", MetricKind.GAUGE, "KV pages.", _WORKER)
WORKER_BLOCKS_FREE = Metric("kvferry_worker_free_blocks", MetricKind.GAUGE, "KV pages free or evictable.", _WORKER)
WORKER_EXPORTS = Metric(
    "kvferry_worker_exports", MetricKind.GAUGE, "Prompts whose pages are pinned for offers.", _WORKER
)
WORKER_EXPORTED_BLOCKS = Metric(
    "kvferry_worker_exported_blocks", MetricKind.GAUGE, "KV pages pinned by exports.", _WORKER
)
WORKER_PINS = Metric("kvferry_worker_pins", MetricKind.GAUGE, "Pinned prefixes.", _WORKER)
WORKER_PINNED_BLOCKS = Metric(
    "kvferry_worker_pinned_blocks", MetricKind.GAUGE, "KV pages held by pinned prefixes.", _WORKER
)
WORKER_OFFERED = Metric("kvferry_worker_tickets_offered", MetricKind.GAUGE, "Tickets not yet claimed.", _WORKER)
WORKER_CLAIMED = Metric("kvferry_worker_tickets_claimed", MetricKind.GAUGE, "Tickets claimed by a reader.", _WORKER)
WORKER_TRANSFERS = Metric("kvferry_worker_transfers", MetricKind.GAUGE, "KV reads in flight.", _WORKER)
WORKER_OPEN_CALLS = Metric("kvferry_worker_open_calls", MetricKind.GAUGE, "Calls in flight.", _WORKER)

_COUNT_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_LENGTH_BUCKETS = (*_COUNT_BUCKETS, 16384.0, 32768.0, 65536.0, 131072.0)
_MASK_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
WORKER_STEPS = Metric("kvferry_worker_steps_total", MetricKind.COUNTER, "Steps computed.", _WORKER)
WORKER_STEP_TOKENS = Metric(
    "kvferry_worker_step_tokens", MetricKind.HISTOGRAM, "Tokens computed by a step.", _WORKER, _COUNT_BUCKETS
)
WORKER_STEP_SEQUENCES = Metric(
    "kvferry_worker_step_sequences", MetricKind.HISTOGRAM, "Sequences in a step.", _WORKER, _COUNT_BUCKETS
)
WORKER_PREEMPTIONS = Metric(
    "kvferry_worker_preemptions_total", MetricKind.COUNTER, "Sequences preempted because pages ran short.", _WORKER
)
WORKER_PREFIX_QUERIED = Metric(
    "kvferry_worker_prefix_queried_tokens_total", MetricKind.COUNTER, "Tokens looked up in the prefix cache.", _WORKER
)
WORKER_PREFIX_HIT = Metric(
    "kvferry_worker_prefix_hit_tokens_total", MetricKind.COUNTER, "Tokens found in the prefix cache.", _WORKER
)
WORKER_PROMPT_TOKENS = Metric(
    "kvferry_worker_prompt_tokens_total", MetricKind.COUNTER, "Prompt tokens of requests that started.", _WORKER
)
WORKER_COMPUTED_TOKENS = Metric(
    "kvferry_worker_computed_prompt_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens computed, by cause; preempted ones are counted besides their first source.",
    ("worker", "cause"),
    values={"cause": tuple(cause for cause in ComputeCause if cause is not ComputeCause.ON_ANOTHER_WORKER)},
)
WORKER_REUSED_TOKENS = Metric(
    "kvferry_worker_reused_prompt_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens that were not computed, by the source of their KV (cached, peer, tier).",
    ("worker", "source"),
    values={"source": ("cached", "peer", "tier")},
)
WORKER_OUTPUT_TOKENS = Metric("kvferry_worker_output_tokens_total", MetricKind.COUNTER, "Tokens sampled.", _WORKER)
WORKER_FINISHED = Metric(
    "kvferry_worker_sequences_finished_total", MetricKind.COUNTER, "Sequences finished or handed off.", _WORKER
)
WORKER_QUEUE_SECONDS = Metric(
    "kvferry_worker_queue_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from arrival to the first step.",
    _WORKER,
    _LATENCY_BUCKETS,
)
WORKER_PREFILL_SECONDS = Metric(
    "kvferry_worker_prefill_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from the first step to the first token.",
    _WORKER,
    _LATENCY_BUCKETS,
)
WORKER_FIRST_TOKEN_SECONDS = Metric(
    "kvferry_worker_time_to_first_token_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from arrival at the worker to its first token.",
    _WORKER,
    _LATENCY_BUCKETS,
)
WORKER_INTER_TOKEN_SECONDS = Metric(
    "kvferry_worker_inter_token_seconds", MetricKind.HISTOGRAM, "Seconds between two tokens.", _WORKER, _STEP_BUCKETS
)
WORKER_REQUEST_SECONDS = Metric(
    "kvferry_worker_request_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from arrival to the end.",
    _WORKER,
    _LATENCY_BUCKETS,
)
WORKER_DECODE_SECONDS = Metric(
    "kvferry_worker_decode_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a request's first output token to its last, of requests with several.",
    _WORKER,
    _LATENCY_BUCKETS,
)
WORKER_OUTPUT_TOKEN_SECONDS = Metric(
    "kvferry_worker_output_token_seconds",
    MetricKind.HISTOGRAM,
    "Mean seconds per output token after the first, by request.",
    _WORKER,
    _STEP_BUCKETS,
)
WORKER_REQUEST_PROMPT_TOKENS = Metric(
    "kvferry_worker_request_prompt_tokens",
    MetricKind.HISTOGRAM,
    "Prompt tokens of ended requests.",
    _WORKER,
    _LENGTH_BUCKETS,
)
WORKER_REQUEST_OUTPUT_TOKENS = Metric(
    "kvferry_worker_request_output_tokens",
    MetricKind.HISTOGRAM,
    "Output tokens of ended requests.",
    _WORKER,
    _LENGTH_BUCKETS,
)
WORKER_COMPILE_SECONDS = Metric(
    "kvferry_worker_grammar_compile_seconds",
    MetricKind.HISTOGRAM,
    "Seconds until the first mask of a constrained sequence.",
    _WORKER,
    _STEP_BUCKETS,
)
WORKER_MASK_SECONDS = Metric(
    "kvferry_worker_grammar_mask_seconds",
    MetricKind.HISTOGRAM,
    "Seconds to advance a grammar and compute the next mask.",
    _WORKER,
    _MASK_BUCKETS,
)
WORKER_LATE_MASKS = Metric(
    "kvferry_worker_grammar_late_masks_total", MetricKind.COUNTER, "Masks for which a step did not wait.", _WORKER
)
WORKER_DRAFTS = Metric("kvferry_worker_drafts_total", MetricKind.COUNTER, "Drafts verified by speculation.", _WORKER)
WORKER_DRAFT_TOKENS = Metric(
    "kvferry_worker_draft_tokens_total", MetricKind.COUNTER, "Draft tokens verified by speculation.", _WORKER
)
WORKER_ACCEPTED_TOKENS = Metric(
    "kvferry_worker_accepted_draft_tokens_total", MetricKind.COUNTER, "Draft tokens accepted.", _WORKER
)
WORKER_ACCEPTED_BY_POSITION = Metric(
    "kvferry_worker_accepted_draft_tokens_by_position_total",
    MetricKind.COUNTER,
    "Draft tokens accepted at a position of their draft, the first one being 0.",
    ("worker", "position"),
)

_TIER = ("worker", "tier")
WORKER_QUARANTINED = Metric(
    "kvferry_worker_quarantined_blocks", MetricKind.GAUGE, "Pages that a transport may still write.", _WORKER
)
TIER_HELD = Metric("kvferry_tier_held_bytes", MetricKind.GAUGE, "Bytes stored in a tier.", _TIER)
TIER_HITS = Metric("kvferry_tier_hits_total", MetricKind.COUNTER, "Lookups that found a storage object.", _TIER)
TIER_MISSES = Metric("kvferry_tier_misses_total", MetricKind.COUNTER, "Lookups that found no storage object.", _TIER)
TIER_LOADED = Metric("kvferry_tier_loaded_bytes_total", MetricKind.COUNTER, "Bytes read from a tier.", _TIER)
TIER_LOAD_SECONDS = Metric(
    "kvferry_tier_load_seconds_total", MetricKind.COUNTER, "Seconds spent reading from a tier.", _TIER
)
TIER_STORED = Metric("kvferry_tier_stored_bytes_total", MetricKind.COUNTER, "Bytes written to a tier.", _TIER)
TIER_FAILURES = Metric("kvferry_tier_failures_total", MetricKind.COUNTER, "Failed reads and writes of a tier.", _TIER)
TIER_DROPPED = Metric(
    "kvferry_tier_dropped_total", MetricKind.COUNTER, "Stores dropped because the queue was full.", _TIER
)
GATEWAY_KV_DECISIONS = Metric(
    "kvferry_gateway_kv_decisions_total",
    MetricKind.COUNTER,
    "Decisions whether to load or compute KV, by source and choice.",
    ("source", "choice"),
    values={"choice": ("load", "compute")},
)

OPERATOR_RECONCILE = Metric(
    "kvferry_operator_reconcile_seconds",
    MetricKind.HISTOGRAM,
    "Duration of a reconcile of a pool in seconds.",
    buckets=_STEP_BUCKETS,
)
OPERATOR_FAILURES = Metric(
    "kvferry_operator_failures_total", MetricKind.COUNTER, "Reconciles that failed and are retried.", ("reason",)
)
OPERATOR_LEADS = Metric("kvferry_operator_is_leader", MetricKind.GAUGE, "1 while this operator holds the lease.")
OPERATOR_CALLS = Metric(
    "kvferry_operator_api_calls_total", MetricKind.COUNTER, "Calls to the API server.", ("method", "kind")
)
OPERATOR_QUEUE = Metric("kvferry_operator_queued_pools", MetricKind.GAUGE, "Pools waiting for a reconcile.")

VLLM_WAITING = Metric(
    "vllm:num_requests_waiting", MetricKind.GAUGE, "Requests waiting on the workers.", ("model_name",)
)
VLLM_RUNNING = Metric(
    "vllm:num_requests_running", MetricKind.GAUGE, "Requests running on the workers.", ("model_name",)
)
VLLM_CACHE_USAGE = Metric(
    "vllm:kv_cache_usage_perc", MetricKind.GAUGE, "Fraction of the workers' KV blocks in use, 0 to 1.", ("model_name",)
)
VLLM_CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    MetricKind.GAUGE,
    "Configuration of the KV cache.",
    ("model_name", "block_size", "num_gpu_blocks"),
)

_MODEL = ("model_name",)
VLLM_PREEMPTIONS = Metric("vllm:num_preemptions_total", MetricKind.COUNTER, WORKER_PREEMPTIONS.help, _MODEL)
VLLM_PREFIX_QUERIES = Metric("vllm:prefix_cache_queries_total", MetricKind.COUNTER, WORKER_PREFIX_QUERIED.help, _MODEL)
VLLM_PREFIX_HITS = Metric("vllm:prefix_cache_hits_total", MetricKind.COUNTER, WORKER_PREFIX_HIT.help, _MODEL)
VLLM_PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", MetricKind.COUNTER, WORKER_PROMPT_TOKENS.help, _MODEL)
VLLM_OUTPUT_TOKENS = Metric("vllm:generation_tokens_total", MetricKind.COUNTER, WORKER_OUTPUT_TOKENS.help, _MODEL)
VLLM_FINISHED = Metric("vllm:request_success_total", MetricKind.COUNTER, WORKER_FINISHED.help, _MODEL)
VLLM_DRAFTS = Metric("vllm:spec_decode_num_drafts_total", MetricKind.COUNTER, WORKER_DRAFTS.help, _MODEL)
VLLM_DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens_total", MetricKind.COUNTER, WORKER_DRAFT_TOKENS.help, _MODEL
)
VLLM_ACCEPTED_TOKENS = Metric(
    "vllm:spec_decode_num_accepted_tokens_total", MetricKind.COUNTER, WORKER_ACCEPTED_TOKENS.help, _MODEL
)
VLLM_ACCEPTED_BY_POSITION = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    MetricKind.COUNTER,
    WORKER_ACCEPTED_BY_POSITION.help,
    ("model_name", "position"),
)
VLLM_STEP_TOKENS = Metric(
    "vllm:iteration_tokens_total", MetricKind.HISTOGRAM, WORKER_STEP_TOKENS.help, _MODEL, _COUNT_BUCKETS
)
VLLM_QUEUE_SECONDS = Metric(
    "vllm:request_queue_time_seconds", MetricKind.HISTOGRAM, WORKER_QUEUE_SECONDS.help, _MODEL, _LATENCY_BUCKETS
)
VLLM_PREFILL_SECONDS = Metric(
    "vllm:request_prefill_time_seconds", MetricKind.HISTOGRAM, WORKER_PREFILL_SECONDS.help, _MODEL, _LATENCY_BUCKETS
)
VLLM_FIRST_TOKEN_SECONDS = Metric(
    "vllm:time_to_first_token_seconds", MetricKind.HISTOGRAM, WORKER_FIRST_TOKEN_SECONDS.help, _MODEL, _LATENCY_BUCKETS
)
VLLM_INTER_TOKEN_SECONDS = Metric(
    "vllm:inter_token_latency_seconds", MetricKind.HISTOGRAM, WORKER_INTER_TOKEN_SECONDS.help, _MODEL, _STEP_BUCKETS
)
VLLM_REQUEST_SECONDS = Metric(
    "vllm:e2e_request_latency_seconds", MetricKind.HISTOGRAM, WORKER_REQUEST_SECONDS.help, _MODEL, _LATENCY_BUCKETS
)

VLLM_DECODE_SECONDS = Metric(
    "vllm:request_decode_time_seconds", MetricKind.HISTOGRAM, WORKER_DECODE_SECONDS.help, _MODEL, _LATENCY_BUCKETS
)
VLLM_OUTPUT_TOKEN_SECONDS = Metric(
    "vllm:request_time_per_output_token_seconds",
    MetricKind.HISTOGRAM,
    WORKER_OUTPUT_TOKEN_SECONDS.help,
    _MODEL,
    _STEP_BUCKETS,
)
VLLM_REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens", MetricKind.HISTOGRAM, WORKER_REQUEST_PROMPT_TOKENS.help, _MODEL, _LENGTH_BUCKETS
)
VLLM_REQUEST_OUTPUT_TOKENS = Metric(
    "vllm:request_generation_tokens", MetricKind.HISTOGRAM, WORKER_REQUEST_OUTPUT_TOKENS.help, _MODEL, _LENGTH_BUCKETS
)

TLS_NOT_AFTER = Metric(
    "kvferry_tls_certificate_not_after_seconds",
    MetricKind.GAUGE,
    "Expiry of the process's certificate in seconds since the epoch, by use (pool, clients).",
    ("use",),
    values={"use": ("pool", "clients")},
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
