"""What can be set, command by command. Names, units and defaults are part of the public surface."""

from kvferry.core.dtypes import DTYPES
from kvferry.core.settings import Setting, seconds, size_bytes, whole

MODEL = Setting(
    "model", "smollm2-135m-instruct", "A known name, a .gguf file, or a folder with safetensors and config.json."
)
SERVED_NAME = Setting("served_name", "", "What clients call the model; default: its own name.")
CONNECTOR = Setting(
    "connector",
    "shm",
    "How KV travels from prefill to decode: shm (one host), nixl (RDMA, TCP), tcp (plain), memory (one process).",
    choices=("memory", "nixl", "shm", "tcp"),
)
HTTP = Setting("http", "127.0.0.1:8000", "HOST:PORT of the OpenAI-compatible API; port 0 takes a free one.")
GRPC = Setting("grpc", "127.0.0.1:9000", "HOST:PORT of the gRPC API; port 0 takes a free one.")
HEAD_START = Setting(
    "head_start_tokens",
    1024,
    "Longer prompts' blocks begin to travel while they are computed; 0: never.",
    parse=whole(0, 1 << 20),
)
LINGER = Setting(
    "linger_seconds",
    0.0,
    "Seconds that new requests are still taken after SIGTERM while readiness says no, until all have heard of it.",
    parse=seconds(0, 600),
)
POOL = Setting(
    "pool",
    "",
    "NAMESPACE/NAME of an InferencePool whose workers to serve with, instead of listed ones; with the service account "
    "of the pod, or KUBECONFIG.",
)
HOLD = (
    Setting(
        "max_held",
        256,
        "With --pool: samples that wait for a pool without workers; more get 429.",
        parse=whole(0, 1 << 16),
    ),
    Setting("hold_seconds", 60.0, "With --pool: seconds that one waits; then it gets 503.", parse=seconds(0, 3600)),
)
METRICS = Setting("metrics", "", "HOST:PORT of a page of Prometheus metrics, at /metrics; without it there is none.")
DRAIN = Setting("drain_seconds", 30.0, "Seconds that running requests may go on after SIGTERM.", parse=seconds(0, 3600))
TLS = (
    Setting("tls_cert_file", "", "Certificate chain, PEM, for HTTP and gRPC; without it they are in the clear."),
    Setting("tls_key_file", "", "Its key, PEM. Renewed files are taken up while serving."),
)
API_KEYS = Setting("api_keys_file", "", "File with lines of `key tenant`; without it everybody may ask.")

ENGINE = (
    Setting(
        "device",
        "auto",
        "Where the model computes; auto: a GPU where torch sees one. Workers compute on the CPU so far.",
        choices=("auto", "cpu", "cuda"),
    ),
    Setting(
        "dtype",
        "auto",
        "Of the KV, and how precisely activations are kept: float32 rounds none. int8: KV in half the bytes of "
        "bfloat16, with compiled kernels only; activations as with it. auto: bfloat16 with compiled kernels, else the "
        "faster one by measurement.",
        choices=("auto", *DTYPES),
    ),
    Setting(
        "weights",
        "shipped",
        "Form of the weights: as their file has them, or converted at start.",
        choices=("shipped", "float32", "float16", "bfloat16"),
    ),
    Setting(
        "numerics",
        "exact",
        "exact: inputs of products in 16 bits or more. fast: rounded to 8 bits where weights are 4- to 8-bit codes.",
        choices=("exact", "fast"),
    ),
    Setting(
        "kernels",
        "auto",
        "What computes: the best here, the compiled kernels at one level, plain torch, or the kernels for GPUs.",
        choices=(
            "auto",
            "compiled",
            "compiled-portable",
            "compiled-avx2",
            "compiled-avx512_bf16",
            "compiled-amx_bf16",
            "torch",
            "reference",
            "triton",
        ),
    ),
    Setting(
        "threads",
        0,
        "Compute threads of a worker; 0: one for each core, shared out by role in a stack.",
        parse=whole(0, 1024),
    ),
    Setting("kv_memory", 1 << 30, "Memory for KV pages, for example 512MiB or 4GiB.", parse=size_bytes),
    Setting("block_tokens", 16, "Tokens in a KV page.", parse=whole(1, 1024)),
    Setting(
        "max_model_tokens", 0, "Prompt and answer together; 0: what the model was trained for.", parse=whole(0, 1 << 24)
    ),
    Setting("token_budget", 2048, "Tokens computed in one step, over all requests.", parse=whole(1, 1 << 20)),
    Setting("max_chunk_tokens", 512, "Tokens of one prompt in one step.", parse=whole(1, 1 << 20)),
    Setting(
        "max_mixed_tokens",
        256,
        "Tokens of all prompts in a step in which other requests decode; fewer: steadier answers, later first tokens.",
        parse=whole(1, 1 << 20),
    ),
    Setting("max_sequences", 64, "Requests in the running batch.", parse=whole(1, 4096)),
)

TIERS = (
    Setting(
        "tier",
        (),
        "Where KV is kept beyond the pages, nearest first: dram://?size=2GiB, disk:///FOLDER?size=20GiB, "
        "redis://HOST:6379/0; repeat for more.",
        is_repeated=True,
    ),
    Setting("tier_object_tokens", 64, "Tokens in one object of a tier.", parse=whole(1, 1 << 16)),
    Setting(
        "load_policy",
        "price",
        "Whether KV that is at a peer or in a tier is loaded when that is cheaper than computing it, or always.",
        choices=("price", "always"),
    ),
)

SECRETS = (
    Setting("ticket_key", "", "Secret that seals hand-off tickets, the same for all workers.", is_secret=True),
    Setting("tenant_key", "", "Secret that keys the names of cached blocks.", is_secret=True),
    Setting("ticket_key_file", "", "File that holds the ticket key; a second line holds the previous one."),
    Setting("tenant_key_file", "", "File that holds the tenant key."),
)

WORKER = (
    Setting(
        "role",
        "both",
        "What to do; split is a prefill and a decode engine in one process.",
        choices=("prefill", "decode", "both", "split"),
    ),
    MODEL,
    SERVED_NAME,
    CONNECTOR,
    Setting("listen", "127.0.0.1:0", "HOST:PORT of the services that take work."),
    Setting("admin", "127.0.0.1:0", "HOST:PORT of WorkerAdmin."),
    Setting("decode_listen", "127.0.0.1:0", "The same for the decode engine of role split."),
    Setting("decode_admin", "127.0.0.1:0", "The same for the decode engine of role split."),
    Setting("advertise_host", "", "Host under which other workers reach this one; default: the one it listens on."),
    Setting("worker_id", "", "Stable name; default: the advertised address."),
    METRICS,
    *ENGINE,
    *TIERS,
    *SECRETS,
    Setting(
        "offer_seconds",
        10.0,
        "Seconds that KV is kept for a decode worker that has not come yet.",
        parse=seconds(0.1, 600),
    ),
    Setting("lease_seconds", 30.0, "Seconds that a reading decode worker may be silent.", parse=seconds(0.1, 600)),
    DRAIN,
)

GATEWAY = (
    MODEL,
    SERVED_NAME,
    Setting("prefill", (), "HOST:PORT[/ADMIN_PORT] of a prefill worker; repeat for more.", is_repeated=True),
    Setting("decode", (), "HOST:PORT[/ADMIN_PORT] of a decode worker; repeat for more.", is_repeated=True),
    Setting("both", (), "HOST:PORT[/ADMIN_PORT] of a worker of role both; repeat for more.", is_repeated=True),
    POOL,
    *HOLD,
    HTTP,
    GRPC,
    API_KEYS,
    *TLS,
    Setting("block_tokens", 16, "Tokens in a KV page, as the workers have it.", parse=whole(1, 1024)),
    Setting("prefix_blocks", 4, "Leading blocks of a prompt that choose its replica.", parse=whole(1, 1024)),
    Setting(
        "skip_prefill_below", 0, "Prompts with fewer tokens go to the decode worker at once.", parse=whole(0, 1 << 20)
    ),
    HEAD_START,
    Setting("max_streams", 1024, "Samples in flight; more are refused with 429.", parse=whole(1, 1 << 20)),
    Setting("request_timeout", 600.0, "Seconds that a request may take.", parse=seconds(1, 86400)),
    LINGER,
    DRAIN,
)

STACK = (
    MODEL,
    CONNECTOR,
    *ENGINE,
    *TIERS,
)

LOAD_FORMAT = Setting(
    "load_format",
    "auto",
    "auto: the model's files. dummy: random weights of the shape that --model names, drawn where they compute.",
    choices=("auto", "dummy"),
)

CUDA_GRAPHS = Setting(
    "cuda_graphs",
    "auto",
    "On a GPU: auto captures decode steps once and replays them; off launches each kernel anew.",
    choices=("auto", "off"),
)

BENCH = (
    MODEL,
    LOAD_FORMAT,
    CUDA_GRAPHS,
    *(
        s
        for s in ENGINE
        if s.name in {"device", "dtype", "weights", "numerics", "kernels", "threads", "kv_memory", "block_tokens"}
    ),
)

DOCTOR = (
    MODEL,
    *(s for s in ENGINE if s.name in {"dtype", "weights", "numerics", "kernels", "threads"}),
    *(s for s in TIERS if s.name in {"tier", "tier_object_tokens"}),
)

EXPLAIN = (
    Setting("http", "127.0.0.1:8000", "HOST:PORT of the gateway that served the request."),
    Setting("api_key", "", "API key of the request's tenant.", is_secret=True),
)

UP = (
    Setting("prefill", 1, "Prefill workers.", parse=whole(0, 64)),
    Setting("decode", 1, "Decode workers.", parse=whole(0, 64)),
    Setting("both", 0, "Workers that do both.", parse=whole(0, 64)),
    *STACK,
    HTTP,
    GRPC,
    API_KEYS,
    HEAD_START,
    DRAIN,
)

OPERATOR = (
    Setting("namespace", (), "Look after pools here only; repeat for more. Default: everywhere.", is_repeated=True),
    Setting("image", "", "Of pools that name none; default: kvferry:<this version>."),
    Setting("kubeconfig", "", "How to reach the cluster; default: the pod's own account, else the usual file."),
    Setting("lease_namespace", "default", "Namespace of the lease by which one of several operators leads."),
    Setting("lease_seconds", 15.0, "A silent leader is replaced after so long.", parse=seconds(2, 300)),
    Setting("identity", "", "Name in the lease; default: the host's."),
    Setting("health", "0.0.0.0:8080", "HOST:PORT of /healthz, /readyz and /metrics."),
    Setting("pulse_seconds", 10.0, "How often each watch has to prove that it lives.", parse=seconds(1, 3600)),
    Setting(
        "look_seconds",
        30.0,
        "How often to look whether others' kinds (InferencePool of the inference extension, PodMonitor) are installed.",
        parse=seconds(1, 3600),
    ),
    Setting("workers", 4, "Pools reconciled at the same time.", parse=whole(1, 64)),
)

OPERATOR_CHECK = (
    *(s for s in OPERATOR if s.name in {"kubeconfig", "lease_namespace"}),
    Setting("timeout", 60.0, "Seconds to wait for it.", parse=seconds(1, 3600)),
)

CLUSTER = (
    *(s for s in OPERATOR if s.name in {"kubeconfig", "lease_namespace"}),
    Setting("timeout", 10.0, "Seconds to wait for a sign of a leading operator.", parse=seconds(1, 3600)),
)
