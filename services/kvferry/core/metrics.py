"""Name, kind, labels and help of every metric.

Names include the unit. In addition to kvferry's own metrics, a few metrics have vLLM's names, because the model-server
protocol of the Gateway API Inference Extension and common dashboards read these.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of one metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; empty for other kinds."""


_LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

GATEWAY_REQUESTS = Metric("kvferry_gateway_requests_total", Kind.COUNTER, "HTTP requests answered.", ("path", "status"))
GATEWAY_STREAMS = Metric(
    "kvferry_gateway_streams_total", Kind.COUNTER, "Samples ended, by outcome (done, failed, cancelled).", ("outcome",)
)
GATEWAY_STREAMS_OPEN = Metric("kvferry_gateway_streams_open", Kind.GAUGE, "Samples in flight.")
GATEWAY_ROUTES = Metric(
    "kvferry_gateway_routes_total", Kind.COUNTER, "Routing decisions, by reason.", ("reason", "spilled")
)
GATEWAY_RETRIES = Metric(
    "kvferry_gateway_retries_total", Kind.COUNTER, "Calls to workers that failed and were retried.", ("reason",)
)
GATEWAY_RESUMES = Metric(
    "kvferry_gateway_resumes_total", Kind.COUNTER, "Streams resumed by a new call after their first token."
)
GATEWAY_RELEASES = Metric(
    "kvferry_gateway_releases_total",
    Kind.COUNTER,
    "Offers released by the gateway because no decode worker reads them.",
    ("outcome",),
)
GATEWAY_HANDOFFS = Metric("kvferry_gateway_handoffs_total", Kind.COUNTER, "Hand-offs by outcome.", ("outcome",))
GATEWAY_PROMPT_TOKENS = Metric("kvferry_gateway_prompt_tokens_total", Kind.COUNTER, "Prompt tokens accepted.")
GATEWAY_CACHED_TOKENS = Metric(
    "kvferry_gateway_cached_tokens_total", Kind.COUNTER, "Prompt tokens served from a prefix cache."
)
GATEWAY_OUTPUT_TOKENS = Metric("kvferry_gateway_output_tokens_total", Kind.COUNTER, "Tokens generated.")
GATEWAY_FIRST_TOKEN_SECONDS = Metric(
    "kvferry_gateway_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Seconds from a request's arrival to its first token.",
    buckets=_LATENCY_BUCKETS,
)
GATEWAY_INTER_TOKEN_SECONDS = Metric(
    "kvferry_gateway_inter_token_seconds",
    Kind.HISTOGRAM,
    "Seconds between consecutive messages with tokens in a stream.",
    buckets=_STEP_BUCKETS,
)
GATEWAY_STREAM_SECONDS = Metric(
    "kvferry_gateway_stream_seconds",
    Kind.HISTOGRAM,
    "Seconds from a request's arrival to a sample's end.",
    buckets=_LATENCY_BUCKETS,
)
GATEWAY_HANDOFF_SECONDS = Metric(
    "kvferry_gateway_handoff_seconds",
    Kind.HISTOGRAM,
    "Seconds from a decode worker's claim until its blocks are verified.",
    buckets=_STEP_BUCKETS,
)
GATEWAY_WORKERS = Metric(
    "kvferry_gateway_workers", Kind.GAUGE, "Workers of the fleet, by role and readiness.", ("role", "state")
)

GATEWAY_STALE = Metric(
    "kvferry_gateway_fleet_stale",
    Kind.GAUGE,
    "1 while the source of the worker list fails and the last known list is used.",
)
GATEWAY_HELD = Metric("kvferry_gateway_held_requests", Kind.GAUGE, "Samples held until the pool has a worker.")
GATEWAY_WAKES = Metric("kvferry_gateway_wakes_total", Kind.COUNTER, "Roles of the pool scaled from 0 replicas to 1.")

_WORKER = ("worker",)
WORKER_READY = Metric("kvferry_worker_ready", Kind.GAUGE, "1 while the worker takes new requests.", _WORKER)
WORKER_RUNNING = Metric("kvferry_worker_running", Kind.GAUGE, "Sequences in the running batch.", _WORKER)
WORKER_WAITING = Metric(
    "kvferry_worker_waiting", Kind.GAUGE, "Sequences waiting for KV blocks or a batch slot.", _WORKER
)
WORKER_LOADING = Metric(
    "kvferry_worker_loading", Kind.GAUGE, "Sequences waiting for KV from a peer or a tier.", _WORKER
)
WORKER_BLOCKS = Metric("kvferry_worker_blocks", Kind.GAUGE, "KV pages.", _WORKER)
WORKER_BLOCKS_FREE = Metric("kvferry_worker_free_blocks", Kind.GAUGE, "KV pages free or evictable.", _WORKER)
WORKER_EXPORTS = Metric("kvferry_worker_exports", Kind.GAUGE, "Prompts whose pages are pinned for offers.", _WORKER)
WORKER_EXPORTED_BLOCKS = Metric("kvferry_worker_exported_blocks", Kind.GAUGE, "KV pages pinned by exports.", _WORKER)
WORKER_OFFERED = Metric("kvferry_worker_tickets_offered", Kind.GAUGE, "Tickets not yet claimed.", _WORKER)
WORKER_CLAIMED = Metric("kvferry_worker_tickets_claimed", Kind.GAUGE, "Tickets claimed by a reader.", _WORKER)
WORKER_TRANSFERS = Metric("kvferry_worker_transfers", Kind.GAUGE, "KV reads in flight.", _WORKER)
WORKER_OPEN_CALLS = Metric("kvferry_worker_open_calls", Kind.GAUGE, "Calls in flight.", _WORKER)

_TIER = ("worker", "tier")
WORKER_QUARANTINED = Metric(
    "kvferry_worker_quarantined_blocks", Kind.GAUGE, "Pages that a transport may still write.", _WORKER
)
TIER_HELD = Metric("kvferry_tier_held_bytes", Kind.GAUGE, "Bytes stored in a tier.", _TIER)
TIER_HITS = Metric("kvferry_tier_hits_total", Kind.COUNTER, "Lookups that found a storage object.", _TIER)
TIER_MISSES = Metric("kvferry_tier_misses_total", Kind.COUNTER, "Lookups that found no storage object.", _TIER)
TIER_LOADED = Metric("kvferry_tier_loaded_bytes_total", Kind.COUNTER, "Bytes read from a tier.", _TIER)
TIER_LOAD_SECONDS = Metric("kvferry_tier_load_seconds_total", Kind.COUNTER, "Seconds spent reading from a tier.", _TIER)
TIER_STORED = Metric("kvferry_tier_stored_bytes_total", Kind.COUNTER, "Bytes written to a tier.", _TIER)
TIER_FAILURES = Metric("kvferry_tier_failures_total", Kind.COUNTER, "Failed reads and writes of a tier.", _TIER)
TIER_DROPPED = Metric("kvferry_tier_dropped_total", Kind.COUNTER, "Stores dropped because the queue was full.", _TIER)
GATEWAY_KV_DECISIONS = Metric(
    "kvferry_gateway_kv_decisions_total",
    Kind.COUNTER,
    "Decisions whether to load or compute KV, by source and choice.",
    ("source", "choice"),
)

OPERATOR_RECONCILE = Metric(
    "kvferry_operator_reconcile_seconds",
    Kind.HISTOGRAM,
    "Duration of a reconcile of a pool in seconds.",
    buckets=_STEP_BUCKETS,
)
OPERATOR_FAILURES = Metric(
    "kvferry_operator_failures_total", Kind.COUNTER, "Reconciles that failed and are retried.", ("reason",)
)
OPERATOR_LEADS = Metric("kvferry_operator_leads", Kind.GAUGE, "1 while this operator holds the lease.")
OPERATOR_CALLS = Metric(
    "kvferry_operator_api_calls_total", Kind.COUNTER, "Calls to the API server.", ("method", "kind")
)
OPERATOR_QUEUE = Metric("kvferry_operator_queue", Kind.GAUGE, "Pools waiting for a reconcile.")

GATEWAY_PEER_LOADS = Metric(
    "kvferry_gateway_peer_loads_total",
    Kind.COUNTER,
    "KV fetches for hand-offs, by outcome (fetched, failed).",
    ("outcome",),
)

VLLM_WAITING = Metric("vllm:num_requests_waiting", Kind.GAUGE, "Requests waiting on the workers.", ("model_name",))
VLLM_RUNNING = Metric("vllm:num_requests_running", Kind.GAUGE, "Requests running on the workers.", ("model_name",))
VLLM_CACHE_USAGE = Metric(
    "vllm:kv_cache_usage_perc", Kind.GAUGE, "Fraction of the workers' KV blocks in use, 0 to 1.", ("model_name",)
)
VLLM_CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    Kind.GAUGE,
    "Configuration of the KV cache.",
    ("model_name", "block_size", "num_gpu_blocks"),
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
