"""Metrics of workers, their engines and tiers."""

from kvferry.core.causes import ComputeCause
from kvferry.core.metrics.metric import COUNT_BUCKETS, LATENCY_BUCKETS, LENGTH_BUCKETS, STEP_BUCKETS, Metric, MetricKind

_WORKER = ("worker",)
READY = Metric("kvferry_worker_ready", MetricKind.GAUGE, "1 while the worker takes new requests.", _WORKER)
LOAD_SECONDS = Metric(
    "kvferry_model_load_seconds",
    MetricKind.GAUGE,
    "Seconds that the process took to open the model and load its weights, without a download.",
    _WORKER,
)
RUNNING = Metric("kvferry_worker_running", MetricKind.GAUGE, "Sequences in the running batch.", _WORKER)
WAITING = Metric("kvferry_worker_waiting", MetricKind.GAUGE, "Sequences waiting for pages or a slot.", _WORKER)
LOADING = Metric("kvferry_worker_loading", MetricKind.GAUGE, "Sequences waiting for KV from a peer or a tier.", _WORKER)
BLOCKS = Metric("kvferry_worker_blocks", MetricKind.GAUGE, "KV pages.", _WORKER)
BLOCKS_FREE = Metric("kvferry_worker_free_blocks", MetricKind.GAUGE, "KV pages free or evictable.", _WORKER)
EXPORTS = Metric("kvferry_worker_exports", MetricKind.GAUGE, "Prompts whose pages are pinned for offers.", _WORKER)
EXPORTED_BLOCKS = Metric("kvferry_worker_exported_blocks", MetricKind.GAUGE, "KV pages pinned by exports.", _WORKER)
PINS = Metric("kvferry_worker_pins", MetricKind.GAUGE, "Pinned prefixes.", _WORKER)
PINNED_BLOCKS = Metric("kvferry_worker_pinned_blocks", MetricKind.GAUGE, "KV pages held by pinned prefixes.", _WORKER)
OFFERED = Metric("kvferry_worker_tickets_offered", MetricKind.GAUGE, "Tickets not yet claimed.", _WORKER)
CLAIMED = Metric("kvferry_worker_tickets_claimed", MetricKind.GAUGE, "Tickets claimed by a reader.", _WORKER)
TRANSFERS = Metric("kvferry_worker_transfers", MetricKind.GAUGE, "KV reads in flight.", _WORKER)
OPEN_CALLS = Metric("kvferry_worker_open_calls", MetricKind.GAUGE, "Calls in flight.", _WORKER)
_MASK_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
STEPS = Metric("kvferry_worker_steps_total", MetricKind.COUNTER, "Steps computed.", _WORKER)
STEP_TOKENS = Metric(
    "kvferry_worker_step_tokens", MetricKind.HISTOGRAM, "Tokens computed by a step.", _WORKER, COUNT_BUCKETS
)
STEP_SEQUENCES = Metric(
    "kvferry_worker_step_sequences", MetricKind.HISTOGRAM, "Sequences in a step.", _WORKER, COUNT_BUCKETS
)
PREEMPTIONS = Metric(
    "kvferry_worker_preemptions_total", MetricKind.COUNTER, "Sequences preempted because pages ran short.", _WORKER
)
PREFIX_QUERIED = Metric(
    "kvferry_worker_prefix_queried_tokens_total", MetricKind.COUNTER, "Tokens looked up in the prefix cache.", _WORKER
)
PREFIX_HIT = Metric(
    "kvferry_worker_prefix_hit_tokens_total", MetricKind.COUNTER, "Tokens found in the prefix cache.", _WORKER
)
PROMPT_TOKENS = Metric(
    "kvferry_worker_prompt_tokens_total", MetricKind.COUNTER, "Prompt tokens of requests that started.", _WORKER
)
COMPUTED_TOKENS = Metric(
    "kvferry_worker_computed_prompt_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens computed, by cause; preempted ones are counted besides their first source.",
    ("worker", "cause"),
    values={"cause": tuple(cause for cause in ComputeCause if cause is not ComputeCause.ON_ANOTHER_WORKER)},
)
REUSED_TOKENS = Metric(
    "kvferry_worker_reused_prompt_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens that were not computed, by the source of their KV (cached, peer, tier).",
    ("worker", "source"),
    values={"source": ("cached", "peer", "tier")},
)
OUTPUT_TOKENS = Metric("kvferry_worker_output_tokens_total", MetricKind.COUNTER, "Tokens sampled.", _WORKER)
FINISHED = Metric(
    "kvferry_worker_sequences_finished_total", MetricKind.COUNTER, "Sequences finished or handed off.", _WORKER
)
QUEUE_SECONDS = Metric(
    "kvferry_worker_queue_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from arrival to the first step.",
    _WORKER,
    LATENCY_BUCKETS,
)
PREFILL_SECONDS = Metric(
    "kvferry_worker_prefill_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from the first step to the first token.",
    _WORKER,
    LATENCY_BUCKETS,
)
FIRST_TOKEN_SECONDS = Metric(
    "kvferry_worker_time_to_first_token_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from arrival at the worker to its first token.",
    _WORKER,
    LATENCY_BUCKETS,
)
INTER_TOKEN_SECONDS = Metric(
    "kvferry_worker_inter_token_seconds", MetricKind.HISTOGRAM, "Seconds between two tokens.", _WORKER, STEP_BUCKETS
)
REQUEST_SECONDS = Metric(
    "kvferry_worker_request_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from arrival to the end.",
    _WORKER,
    LATENCY_BUCKETS,
)
DECODE_SECONDS = Metric(
    "kvferry_worker_decode_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a request's first output token to its last, of requests with several.",
    _WORKER,
    LATENCY_BUCKETS,
)
OUTPUT_TOKEN_SECONDS = Metric(
    "kvferry_worker_output_token_seconds",
    MetricKind.HISTOGRAM,
    "Mean seconds per output token after the first, by request.",
    _WORKER,
    STEP_BUCKETS,
)
REQUEST_PROMPT_TOKENS = Metric(
    "kvferry_worker_request_prompt_tokens",
    MetricKind.HISTOGRAM,
    "Prompt tokens of ended requests.",
    _WORKER,
    LENGTH_BUCKETS,
)
REQUEST_OUTPUT_TOKENS = Metric(
    "kvferry_worker_request_output_tokens",
    MetricKind.HISTOGRAM,
    "Output tokens of ended requests.",
    _WORKER,
    LENGTH_BUCKETS,
)
COMPILE_SECONDS = Metric(
    "kvferry_worker_grammar_compile_seconds",
    MetricKind.HISTOGRAM,
    "Seconds until the first mask of a constrained sequence.",
    _WORKER,
    STEP_BUCKETS,
)
MASK_SECONDS = Metric(
    "kvferry_worker_grammar_mask_seconds",
    MetricKind.HISTOGRAM,
    "Seconds to advance a grammar and compute the next mask.",
    _WORKER,
    _MASK_BUCKETS,
)
LATE_MASKS = Metric(
    "kvferry_worker_grammar_late_masks_total", MetricKind.COUNTER, "Masks for which a step did not wait.", _WORKER
)
DRAFTS = Metric("kvferry_worker_drafts_total", MetricKind.COUNTER, "Drafts verified by speculation.", _WORKER)
DRAFT_TOKENS = Metric(
    "kvferry_worker_draft_tokens_total", MetricKind.COUNTER, "Draft tokens verified by speculation.", _WORKER
)
ACCEPTED_TOKENS = Metric(
    "kvferry_worker_accepted_draft_tokens_total", MetricKind.COUNTER, "Draft tokens accepted.", _WORKER
)
ACCEPTED_BY_POSITION = Metric(
    "kvferry_worker_accepted_draft_tokens_by_position_total",
    MetricKind.COUNTER,
    "Draft tokens accepted at a position of their draft, the first one being 0.",
    ("worker", "position"),
)
_TIER = ("worker", "tier")
QUARANTINED = Metric(
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
