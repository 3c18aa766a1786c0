"""Groups of settings in help and in printed settings files, and the settings that short help shows."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

TOPICS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "Model": (
            "model", "served_name", "load_format", "device", "dtype", "weights", "numerics", "kernels", "cuda_graphs",
            "threads", "tensor_parallel", "max_model_len", "tool_call_parser", "reasoning_parser",
        ),
        "Workers": (
            "role", "prefill", "decode", "both", "worker_id", "advertise_host", "pool", "max_held", "hold_seconds",
            "processes", "share_ports", "drain_seconds", "linger_seconds",
        ),
        "Addresses": (
            "url", "http", "grpc", "admin", "listen", "decode_listen", "decode_admin", "metrics", "health",
        ),
        "Model servers": (
            "endpoints", "prefill_endpoints", "inference_pool", "flavor", "metrics_path", "metrics_port",
            "scrape_seconds", "stale_seconds", "prefill_header",
        ),
        "Proxy": ("body_mode", "max_body_bytes", "fallbacks", "plaintext"),
        "KV memory": (
            "kv_memory", "gpu_memory_utilization", "block_tokens", "pin_share", "retention_share", "window_pages",
            "reserve_share",
        ),
        "KV transfer": (
            "connector", "kv_encryption", "verify_kv", "kv_prefetch_tokens", "offer_seconds", "lease_seconds",
            "load_policy",
        ),
        "KV tiers": ("tier", "tier_object_tokens"),
        "Scheduling": (
            "max_num_seqs", "token_budget", "max_chunk_tokens", "max_mixed_tokens", "max_scored_rows", "scheduling",
            "background_steps",
            "class_weights", "async_steps", "stream_interval",
        ),
        "Speculation": ("speculation",),
        "Adapters": (
            "adapter", "adapter_slots", "max_adapter_rank", "adapter_memory", "adapters_file", "adapter_folder",
        ),
        "Weights": ("weights_folder", "weight_version"),
        "Routing and queues": (
            "policy", "prefix_blocks", "skip_prefill_below", "cache_map_blocks", "max_streams", "max_queued",
            "max_queued_bytes", "tenant_order", "request_timeout", "objective", "queue_seconds", "saturation_waiting",
            "saturation_usage",
        ),
        "Clients": (
            "api_key", "api_key_file", "api_keys_file", "tenants", "admin_token_file", "strict_fields",
            "sse_keepalive", "http_keepalive", "cors_origins", "allowed_hosts", "no_page", "probe_key",
        ),
        "Files and batches": (
            "batch_folder", "max_file_bytes", "tenant_file_bytes", "tenant_files", "batch_lines",
        ),
        "Shared state": ("state", "state_bytes", "state_file_bytes"),
        "Keys and certificates": (
            "ticket_key", "ticket_key_file", "gateway_key", "gateway_key_file", "tenant_key", "tenant_key_file",
            "pool_tls", "pool_tls_cert_file", "pool_tls_key_file", "pool_tls_ca_file", "tls_cert_file", "tls_key_file",
            "tls_client_ca_file",
        ),
        "Kubernetes": (
            "kubeconfig", "namespace", "image", "template", "lease_namespace", "identity", "watch_probe_seconds",
            "discovery_seconds", "workers", "timeout",
        ),
        "Logs and traces": (
            "log_level", "log_json", "otlp", "trace_sample", "trace_file", "trace_file_bytes",
        ),
    }
)  # fmt: skip
"""Names of settings by topic. A name has one topic, whatever the command."""

COMMON = frozenset(
    {
        "role", "model", "device", "dtype", "kv_memory", "gpu_memory_utilization", "max_model_len", "max_num_seqs",
        "prefill", "decode", "both", "endpoints", "prefill_endpoints", "inference_pool", "flavor", "pool",
        "connector", "tier", "adapter", "speculation", "http", "grpc", "admin",
        "listen", "url", "policy", "api_key", "api_key_file", "api_keys_file", "ticket_key_file", "gateway_key_file",
        "kubeconfig", "log_level",
    }
)  # fmt: skip
"""Settings that short help shows; the others are in `--help-all`."""


def topic_of(name: str) -> str:
    """Return the topic of a setting.

    Raises:
        KeyError: it has none; each setting must be listed in `TOPICS`.
    """
    for topic, names in TOPICS.items():
        if name in names:
            return topic
    raise KeyError(name)
