"""Metrics of workers with vLLM's names, because the model-server protocol of the Gateway API Inference Extension and
common dashboards read these.
"""

from kvferry.core.metrics import worker_metrics
from kvferry.core.metrics.metric import COUNT_BUCKETS, LATENCY_BUCKETS, LENGTH_BUCKETS, STEP_BUCKETS, Metric, MetricKind

WAITING = Metric("vllm:num_requests_waiting", MetricKind.GAUGE, "Requests waiting on the workers.", ("model_name",))
RUNNING = Metric("vllm:num_requests_running", MetricKind.GAUGE, "Requests running on the workers.", ("model_name",))
CACHE_USAGE = Metric(
    "vllm:kv_cache_usage_perc", MetricKind.GAUGE, "Fraction of the workers' KV blocks in use, 0 to 1.", ("model_name",)
)
CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    MetricKind.GAUGE,
    "Configuration of the KV cache.",
    ("model_name", "block_size", "num_gpu_blocks"),
)
_MODEL = ("model_name",)
PREEMPTIONS = Metric("vllm:num_preemptions_total", MetricKind.COUNTER, worker_metrics.PREEMPTIONS.help, _MODEL)
PREFIX_QUERIES = Metric(
    "vllm:prefix_cache_queries_total", MetricKind.COUNTER, worker_metrics.PREFIX_QUERIED.help, _MODEL
)
PREFIX_HITS = Metric("vllm:prefix_cache_hits_total", MetricKind.COUNTER, worker_metrics.PREFIX_HIT.help, _MODEL)
PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", MetricKind.COUNTER, worker_metrics.PROMPT_TOKENS.help, _MODEL)
OUTPUT_TOKENS = Metric("vllm:generation_tokens_total", MetricKind.COUNTER, worker_metrics.OUTPUT_TOKENS.help, _MODEL)
FINISHED = Metric("vllm:request_success_total", MetricKind.COUNTER, worker_metrics.FINISHED.help, _MODEL)
DRAFTS = Metric("vllm:spec_decode_num_drafts_total", MetricKind.COUNTER, worker_metrics.DRAFTS.help, _MODEL)
DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens_total", MetricKind.COUNTER, worker_metrics.DRAFT_TOKENS.help, _MODEL
)
ACCEPTED_TOKENS = Metric(
    "vllm:spec_decode_num_accepted_tokens_total", MetricKind.COUNTER, worker_metrics.ACCEPTED_TOKENS.help, _MODEL
)
ACCEPTED_BY_POSITION = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    MetricKind.COUNTER,
    worker_metrics.ACCEPTED_BY_POSITION.help,
    ("model_name", "position"),
)
STEP_TOKENS = Metric(
    "vllm:iteration_tokens_total", MetricKind.HISTOGRAM, worker_metrics.STEP_TOKENS.help, _MODEL, COUNT_BUCKETS
)
QUEUE_SECONDS = Metric(
    "vllm:request_queue_time_seconds", MetricKind.HISTOGRAM, worker_metrics.QUEUE_SECONDS.help, _MODEL, LATENCY_BUCKETS
)
PREFILL_SECONDS = Metric(
    "vllm:request_prefill_time_seconds",
    MetricKind.HISTOGRAM,
    worker_metrics.PREFILL_SECONDS.help,
    _MODEL,
    LATENCY_BUCKETS,
)
FIRST_TOKEN_SECONDS = Metric(
    "vllm:time_to_first_token_seconds",
    MetricKind.HISTOGRAM,
    worker_metrics.FIRST_TOKEN_SECONDS.help,
    _MODEL,
    LATENCY_BUCKETS,
)
INTER_TOKEN_SECONDS = Metric(
    "vllm:inter_token_latency_seconds",
    MetricKind.HISTOGRAM,
    worker_metrics.INTER_TOKEN_SECONDS.help,
    _MODEL,
    STEP_BUCKETS,
)
REQUEST_SECONDS = Metric(
    "vllm:e2e_request_latency_seconds",
    MetricKind.HISTOGRAM,
    worker_metrics.REQUEST_SECONDS.help,
    _MODEL,
    LATENCY_BUCKETS,
)
DECODE_SECONDS = Metric(
    "vllm:request_decode_time_seconds",
    MetricKind.HISTOGRAM,
    worker_metrics.DECODE_SECONDS.help,
    _MODEL,
    LATENCY_BUCKETS,
)
OUTPUT_TOKEN_SECONDS = Metric(
    "vllm:request_time_per_output_token_seconds",
    MetricKind.HISTOGRAM,
    worker_metrics.OUTPUT_TOKEN_SECONDS.help,
    _MODEL,
    STEP_BUCKETS,
)
REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens",
    MetricKind.HISTOGRAM,
    worker_metrics.REQUEST_PROMPT_TOKENS.help,
    _MODEL,
    LENGTH_BUCKETS,
)
REQUEST_OUTPUT_TOKENS = Metric(
    "vllm:request_generation_tokens",
    MetricKind.HISTOGRAM,
    worker_metrics.REQUEST_OUTPUT_TOKENS.help,
    _MODEL,
    LENGTH_BUCKETS,
)
