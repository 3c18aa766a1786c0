"""Settings of the processes: workers, gateways and the local stack, and of the commands that measure an engine."""

from dataclasses import replace

from kvferry.core.settings.engine import AUTO, EngineSettings, SchedulerLimits
from kvferry.core.settings.parsers import (
    ADDRESS,
    ENDPOINT,
    FILE,
    FOLDER,
    MODEL_NAME,
    NAME,
    NAME_AND_PATH,
    URL,
    Parser,
    boolean,
    host_name,
    seconds,
    share,
    size_bytes,
    whole,
    whole_or_auto,
)
from kvferry.core.settings.setting import Setting, settings_of

_OFFLINE = {"served_name", "load_format", "cuda_graphs", "max_scored_rows", "reserve_share"}
"""Settings of engines that workers do not have, or that are listed below."""
_ENGINE = {setting.name: setting for setting in (*settings_of(EngineSettings), *settings_of(SchedulerLimits))}
SERVED_NAME, LOAD_FORMAT, CUDA_GRAPHS = (_ENGINE[name] for name in ("served_name", "load_format", "cuda_graphs"))
SCHEDULING, CLASS_WEIGHTS = _ENGINE["scheduling"], _ENGINE["class_weights"]
_OF_ADAPTERS = ("adapter_slots", "max_adapter_rank", "adapter_memory")
ENGINE = tuple(setting for name, setting in _ENGINE.items() if name not in {*_OFFLINE, *_OF_ADAPTERS, "load_policy"})
"""Settings of the engine of a worker."""

ADAPTERS = (
    Setting(
        "adapter",
        (),
        "NAME=PATH of a LoRA adapter (a PEFT folder), which requests use as their model; may be repeated.",
        is_repeated=True,
        parse=NAME_AND_PATH,
    ),
    *(_ENGINE[name] for name in _OF_ADAPTERS),
    Setting(
        "adapters_file",
        "",
        "TOML file that lists adapters ([[adapters]] with name, path, digest); read again whenever it changes.",
        parse=FILE,
    ),
    Setting(
        "adapter_folder",
        "",
        "Folder below which adapters may be loaded while serving (POST /v1/load_lora_adapter); default: none.",
        parse=FOLDER,
    ),
)
WEIGHTS = (
    Setting(
        "weights_folder",
        "",
        "Folder below which checkpoints may be loaded in place of the weights while serving (POST /weights); default: "
        "none.",
        parse=FOLDER,
    ),
    Setting(
        "weight_version",
        "",
        "Version of the weights at the start, which answers name; default: the first digits of their digest.",
        parse=NAME,
    ),
)
TIERS = (
    Setting(
        "tier",
        (),
        "KV tiers beyond the pages, nearest first: dram://?size=2GiB, disk:///FOLDER?size=20GiB, "
        "redis://HOST:6379/0; may be repeated.",
        is_repeated=True,
        parse=URL,
    ),
    Setting("tier_object_tokens", 64, "Tokens per storage object of a tier.", parse=whole(1, 1 << 16)),
    _ENGINE["load_policy"],
)

VERIFY_KV = Setting(
    "verify_kv",
    "epochs",
    "How fetched KV is verified: by the epochs of its pages, or also by a digest of each block's content. Must be "
    "the same for all workers.",
    choices=("epochs", "digest"),
)
KV_ENCRYPTION = Setting(
    "kv_encryption",
    False,
    "Whether KV between workers is encrypted on the network. tcp encrypts; the bytes of shm and memory never leave the "
    "host; nixl does not encrypt and is refused. Must be the same for all workers.",
    parse=boolean,
)
LOGGING = (
    Setting("log_level", "warning", "Minimum level of logged messages.", choices=("debug", "info", "warning", "error")),
    Setting("log_json", False, "Write log lines as JSON instead of text.", parse=boolean),
)
MODEL = Setting(
    "model",
    "smollm2-135m-instruct",
    "A known name, a .gguf file, a folder with safetensors and config.json, or ORG/NAME[:QUANTIZATION][@REVISION] on "
    "the Hugging Face Hub.",
    parse=MODEL_NAME,
)
ANSWERS = (
    Setting(
        "tool_call_parser",
        "auto",
        "Format of tool calls in the model's answers; auto: by its chat template and vocabulary.",
        registry="call parsers",
    ),
    Setting(
        "reasoning_parser",
        "auto",
        "Reasoning at the start of answers. think: between <think> and </think>; auto: think if the model has these "
        "markers.",
        registry="reasoning parsers",
    ),
)
CONNECTOR = Setting(
    "connector",
    "shm",
    "Transport of KV from prefill to decode: shm (one host), nixl (RDMA, TCP), tcp (plain), memory (one process).",
    registry="connectors",
)
HTTP = Setting(
    "http", "127.0.0.1:8000", "HOST:PORT of the OpenAI-compatible API; port 0 selects a free port.", parse=ADDRESS
)
GRPC = Setting("grpc", "127.0.0.1:9000", "HOST:PORT of the gRPC API; port 0 selects a free port.", parse=ADDRESS)
KV_PREFETCH = Setting(
    "kv_prefetch_tokens",
    1024,
    "Minimum tokens of prompts that the decode worker prefetches while prefill computes them; 0 disables this.",
    parse=whole(0, 1 << 20),
)
LINGER = Setting(
    "linger_seconds",
    0.0,
    "Seconds after SIGTERM during which new requests are still accepted while /ready reports 503.",
    parse=seconds(0, 600),
)
ADMIN = Setting(
    "admin",
    "127.0.0.1:0",
    "HOST:PORT of the gateway's admin API (/metrics, /fleet, /debug/requests/ID), readable without authentication; "
    "port 0 selects a free port.",
    parse=ADDRESS,
)
ADMIN_TOKEN = Setting(
    "admin_token_file",
    "",
    "File with the bearer tokens for changes by the admin API, a line `TOKEN [NAME]` each, read for every change; "
    "default: changes are accepted on loopback only.",
    parse=FILE,
)
POOL = Setting(
    "pool",
    "",
    "NAMESPACE/NAME of the InferencePool whose workers are used instead of listed ones; accessed with the pod's "
    "service account or KUBECONFIG.",
    parse=Parser("NAMESPACE/NAME", str),
)
HOLD = (
    Setting(
        "max_held",
        256,
        "With --pool: maximum samples held while the pool has no workers; more are rejected with 429.",
        parse=whole(0, 1 << 16),
    ),
    Setting(
        "hold_seconds",
        60.0,
        "With --pool: seconds for which a sample is held before it is rejected with 503.",
        parse=seconds(0, 3600),
    ),
)
HEALTH = Setting(
    "health",
    "",
    "HOST:PORT of grpc.health.v1.Health without TLS, for probes; default: only on --listen and --admin.",
    parse=ADDRESS,
)
METRICS = Setting("metrics", "", "HOST:PORT of Prometheus metrics, at /metrics; default: not served.", parse=ADDRESS)
DRAIN = Setting(
    "drain_seconds", 30.0, "Maximum seconds for running requests to finish after SIGTERM.", parse=seconds(0, 3600)
)
TLS = (
    Setting("tls_cert_file", "", "Certificate chain, PEM, for HTTP and gRPC; default: no TLS.", parse=FILE),
    Setting("tls_key_file", "", "Private key, PEM. Renewed files are reloaded while serving.", parse=FILE),
    Setting(
        "tls_client_ca_file",
        "",
        "CA certificates, PEM: clients need a certificate signed by one of them, for HTTP and gRPC; default: none "
        "needed.",
        parse=FILE,
    ),
)
POOL_TLS = (
    Setting(
        "pool_tls_cert_file",
        "",
        "Certificate chain of this process, PEM, for mutual TLS with the pool's other processes; default: no TLS. "
        "`kvferry key certificate` creates it.",
        parse=FILE,
    ),
    Setting(
        "pool_tls_key_file",
        "",
        "Private key of that certificate, PEM. Renewed files are reloaded while serving.",
        parse=FILE,
    ),
    Setting(
        "pool_tls_ca_file", "", "Certificates of the pool's CA, PEM; several during a rotation of the CA.", parse=FILE
    ),
)
CLIENTS = (
    Setting(
        "strict_fields",
        False,
        "Refuse requests with unknown fields; otherwise these have no effect, and the answer's header kvferry-ignored "
        "names them.",
        parse=boolean,
    ),
    Setting(
        "sse_keepalive",
        15.0,
        "Seconds without an event of a stream after which a comment is sent; 0 sends none.",
        parse=seconds(0, 3600),
    ),
    Setting("http_keepalive", 120.0, "Seconds after which an idle HTTP connection is closed.", parse=seconds(1, 86400)),
    Setting(
        "cors_origins",
        (),
        "Origin whose web pages may call the HTTP API, such as https://chat.example.com, or *; may be repeated.",
        is_repeated=True,
        parse=Parser("ORIGIN", str),
    ),
    Setting(
        "allowed_hosts",
        (),
        "Host name, without port, under which the HTTP and admin ports accept requests, against DNS rebinding; may be "
        "repeated. Default: loopback names on loopback, any elsewhere.",
        parse=host_name,
        is_repeated=True,
    ),
    Setting("no_page", False, "Do not serve the chat page at / of the HTTP port.", parse=boolean),
)
API_KEYS = Setting(
    "api_keys_file", "", "File with one `key tenant` pair per line; default: no authentication.", parse=FILE
)
TENANTS = Setting(
    "tenants",
    "",
    "TOML file with the tenants' hashed keys, shares, quotas and models; read again when it changes.",
    parse=FILE,
)
POLICY = Setting(
    "policy",
    "latency",
    "How workers are chosen. latency: the lowest estimate; prefix-hash: cached prefix within a load bound; "
    "round-robin, least-loaded, random: ignoring caches.",
    registry="routing policies",
)
TRACES = (
    Setting(
        "otlp",
        "",
        "URL of a collector of traces, OTLP over HTTP, for example http://127.0.0.1:4318; default: none.",
        parse=URL,
    ),
    Setting(
        "trace_sample",
        1.0,
        "Share of requests to trace if the client does not decide, from 0 to 1; 0 turns traces off.",
        parse=share(may_be_zero=True),
    ),
)
REQUEST_TRACE = (
    Setting(
        "trace_file",
        "",
        "File of an anonymous trace of the requests (arrivals, lengths, keyed block ids) for `kvferry simulate`; "
        "default: none.",
        parse=FILE,
    ),
    Setting(
        "trace_file_bytes",
        64 << 20,
        "Maximum size of the trace, at least 64KiB; older lines are in FILE.old, and the oldest are dropped.",
        parse=size_bytes,
    ),
)
BATCHES = (
    Setting(
        "batch_folder",
        "",
        "Folder of uploaded files and of batches; state: in the Redis server of --state; off: neither is served. "
        "Default: a folder of the model in the cache folder.",
        parse=FOLDER,
    ),
    Setting("max_file_bytes", 200 << 20, "Maximum size of an uploaded file.", parse=size_bytes),
    Setting("tenant_file_bytes", 4 << 30, "Maximum size of a tenant's files together.", parse=size_bytes),
    Setting("tenant_files", 1000, "Maximum number of a tenant's files.", parse=whole(1, 1 << 20)),
    Setting(
        "batch_lines",
        0,
        "Maximum lines of batches that are computed at a time; 0: half of the sequences of the workers.",
        parse=whole(0, 1 << 16),
    ),
)
STATE = (
    Setting(
        "state",
        "",
        "Redis server that all gateways of a pool share: quotas are those of all together, streams outlive their "
        "gateway, and stored responses are those of all; "
        "redis://HOST:6379/0, rediss://..., redis+unix:///PATH; with a password: ?password_file=FILE. Default: none.",
        parse=Parser("URL", str),
    ),
    Setting(
        "state_bytes",
        256 << 20,
        "Maximum size of the records of streams in that server, of which one tenant has half, and also of the stored "
        "responses, of which one tenant has an eighth.",
        parse=size_bytes,
    ),
    Setting(
        "state_file_bytes",
        1 << 30,
        "Maximum size of the files and batches in that server, if --batch-folder is state; uploads leave an eighth of "
        "it to results.",
        parse=size_bytes,
    ),
)
PROCESSES = Setting(
    "processes",
    1,
    "Gateway processes that share the HTTP and gRPC ports; each has its own admin port, counting up from --admin.",
    parse=whole(1, 64),
)
PROBE_KEY = Setting(
    "probe_key",
    "",
    "API key of a local stack's first request, accepted in addition to the tenants' keys.",
    is_secret=True,
)
QUEUE = (
    Setting(
        "max_queued",
        4096,
        "Maximum requests that wait for room on the workers; more are rejected with 429.",
        parse=whole(1, 1 << 20),
    ),
    Setting(
        "max_queued_bytes",
        256 << 20,
        "Memory for waiting requests, for example 256MiB; more are rejected with 429.",
        parse=size_bytes,
    ),
    Setting(
        "tenant_order",
        "fewest-samples",
        "Which waiting request of a tenant goes first: the one of which the fewest samples have begun, so that a small "
        "one does not wait for a large one (fewest-samples), or the earliest (arrival).",
        choices=("fewest-samples", "arrival"),
    ),
)

TICKET_KEY = (
    Setting(
        "ticket_key", "", "Secret key that seals hand-off tickets; must be the same for all workers.", is_secret=True
    ),
    Setting("ticket_key_file", "", "File with the ticket key; a second line may contain the previous key.", parse=FILE),
)
GATEWAY_KEY = (
    Setting(
        "gateway_key",
        "",
        "Key with which the gateway's calls to workers are signed, 64 hexadecimal digits.",
        is_secret=True,
    ),
    Setting(
        "gateway_key_file",
        "",
        "File with the gateway key; kvferry key gateway derives it from the ticket key.",
        parse=FILE,
    ),
)
TENANT_KEY = (
    Setting(
        "tenant_key", "", "Secret key of the block names; must be the same for workers and gateways.", is_secret=True
    ),
    Setting("tenant_key_file", "", "File with the tenant key.", parse=FILE),
)

WORKER = (
    Setting(
        "role",
        "both",
        "Role of the worker; split: a prefill and a decode engine in one process.",
        choices=("prefill", "decode", "both", "split"),
    ),
    MODEL,
    SERVED_NAME,
    *ANSWERS,
    CONNECTOR,
    Setting("listen", "127.0.0.1:0", "HOST:PORT of the services for requests.", parse=ADDRESS),
    Setting("admin", "127.0.0.1:0", "HOST:PORT of WorkerAdmin.", parse=ADDRESS),
    Setting("decode_listen", "127.0.0.1:0", "Like --listen, for the decode engine of role split.", parse=ADDRESS),
    Setting("decode_admin", "127.0.0.1:0", "Like --admin, for the decode engine of role split.", parse=ADDRESS),
    Setting(
        "advertise_host",
        "",
        "Host name or address under which other workers reach this worker; default: the listening host.",
        parse=Parser("HOST", str),
    ),
    Setting("worker_id", "", "Stable name of the worker; default: the advertised address.", parse=NAME),
    METRICS,
    HEALTH,
    *ENGINE,
    *ADAPTERS,
    *WEIGHTS,
    *TIERS,
    VERIFY_KV,
    KV_ENCRYPTION,
    *TICKET_KEY,
    *TENANT_KEY,
    *POOL_TLS,
    Setting(
        "offer_seconds",
        10.0,
        "Seconds for which offered KV is kept if no decode worker claims it.",
        parse=seconds(0.1, 600),
    ),
    Setting("lease_seconds", 30.0, "Lease on claimed KV in seconds; the reader renews it.", parse=seconds(0.1, 600)),
    *TRACES,
    DRAIN,
)

GATEWAY = (
    MODEL,
    SERVED_NAME,
    *ANSWERS,
    Setting(
        "prefill", (), "HOST:PORT[/ADMIN_PORT] of a prefill worker; may be repeated.", is_repeated=True, parse=ENDPOINT
    ),
    Setting(
        "decode", (), "HOST:PORT[/ADMIN_PORT] of a decode worker; may be repeated.", is_repeated=True, parse=ENDPOINT
    ),
    Setting(
        "both",
        (),
        "HOST:PORT[/ADMIN_PORT] of a worker of role both; may be repeated.",
        is_repeated=True,
        parse=ENDPOINT,
    ),
    POOL,
    *HOLD,
    HTTP,
    GRPC,
    ADMIN,
    ADMIN_TOKEN,
    *CLIENTS,
    API_KEYS,
    TENANTS,
    PROBE_KEY,
    *TLS,
    *POOL_TLS,
    *GATEWAY_KEY,
    *TENANT_KEY,
    POLICY,
    Setting(
        "prefix_blocks",
        4,
        "Number of leading blocks of a prompt whose hash determines its preferred worker.",
        parse=whole(1, 1024),
    ),
    Setting(
        "skip_prefill_below",
        0,
        "Prompts with fewer tokens, not counting tokens in the decode worker's cache, are computed by that worker.",
        parse=whole(0, 1 << 20),
    ),
    Setting(
        "cache_map_blocks",
        1 << 22,
        "Maximum number of KV blocks in the map of the workers' caches, about 100 bytes each; 0: route by routing "
        "history.",
        parse=whole(0, 1 << 28),
    ),
    KV_PREFETCH,
    Setting("max_streams", 1024, "Maximum samples in flight; further requests wait.", parse=whole(1, 1 << 20)),
    *QUEUE,
    SCHEDULING,
    CLASS_WEIGHTS,
    Setting("request_timeout", 600.0, "Maximum seconds per request.", parse=seconds(1, 86400)),
    *TRACES,
    *REQUEST_TRACE,
    *BATCHES,
    *STATE,
    PROCESSES,
    Setting(
        "share_ports",
        False,
        "Whether other gateways of this user may listen on the same HTTP and gRPC ports; set by --processes.",
        parse=boolean,
    ),
    LINGER,
    DRAIN,
)

STACK = (
    MODEL,
    CONNECTOR,
    *ENGINE,
    *ADAPTERS,
    *WEIGHTS,
    *TIERS,
    VERIFY_KV,
    KV_ENCRYPTION,
)

_BENCH_ENGINE = {
    "device", "dtype", "weights", "numerics", "kernels", "threads", "kv_memory", "block_tokens", "async_steps",
    "speculation", "window_pages",
}  # fmt: skip
BENCH = (MODEL, LOAD_FORMAT, CUDA_GRAPHS, *(s for s in ENGINE if s.name in _BENCH_ENGINE))

DOCTOR = (
    MODEL,
    *(s for s in ENGINE if s.name in {"dtype", "weights", "numerics", "kernels", "threads"}),
    *(s for s in TIERS if s.name in {"tier", "tier_object_tokens"}),
)

CLIENT = (
    Setting("url", "http://127.0.0.1:8000", "URL of the gateway, with or without /v1.", parse=URL),
    Setting("api_key", "", "API key of the gateway.", is_secret=True),
    Setting("api_key_file", "", "File with the API key, instead of KVFERRY_API_KEY.", parse=FILE),
)
"""Settings of the commands that call a gateway: `chat` and `explain`."""

UP_TLS = Setting(
    "pool_tls",
    "off",
    "Mutual TLS between the processes; on: with a CA that is generated for this run and whose key is not stored.",
    choices=("on", "off"),
)

UP_ADMIN = replace(
    ADMIN,
    default="127.0.0.1:8002",
    help=f"{ADMIN.help} If it is not given and its port is taken, a free one is used.",
)

UP = (
    Setting(
        "prefill",
        AUTO,
        "Number of prefill workers. auto: 1. If --prefill, --decode, --both, --connector and --kv-prefetch-tokens are "
        "not given, on up to 4 CPU cores without a GPU: one worker of role both instead of a pair.",
        parse=whole_or_auto(0, 64),
    ),
    Setting("decode", AUTO, "Number of decode workers. auto: as --prefill.", parse=whole_or_auto(0, 64)),
    Setting("both", AUTO, "Number of workers of role both. auto: 0; see --prefill.", parse=whole_or_auto(0, 64)),
    *STACK,
    *ANSWERS,
    HTTP,
    GRPC,
    UP_ADMIN,
    ADMIN_TOKEN,
    *CLIENTS,
    POLICY,
    API_KEYS,
    TENANTS,
    KV_PREFETCH,
    UP_TLS,
    *TICKET_KEY,
    *TRACES,
    *REQUEST_TRACE,
    *BATCHES,
    *STATE,
    PROCESSES,
    DRAIN,
)
