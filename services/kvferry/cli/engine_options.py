"""Settings of an engine, its adapters and its tiers; `settings` lists them by command."""

from kvferry.core.dtypes import DTYPES
from kvferry.core.settings import Setting, device_name, share, size_bytes, size_or_auto, whole
from kvferry.engine.schedule.policies.class_weights import checked_weights
from kvferry.engine.schedule.speculation.settings import checked_speculation

SCHEDULING = Setting(
    "scheduling",
    "fcfs",
    "Which waiting request runs next: the earliest (fcfs), the lowest priority number (priority), the one with the "
    "fewest tokens to compute (srtf), the same among the first eight (two-level), or one of the priority with the "
    "least service relative to its weight (weighted). The gateway's queue also uses weighted if it is set; otherwise "
    "it is ordered by priority number.",
    choices=("fcfs", "priority", "srtf", "two-level", "weighted"),
)
CLASS_WEIGHTS = Setting(
    "class_weights",
    "",
    "With scheduling=weighted: weights as PRIORITY=WEIGHT,..., such as 0=4,1=2; other priorities have weight 1.",
    parse=checked_weights,
)
ENGINE = (
    Setting(
        "device",
        "auto",
        "Device that runs the model: cpu, cuda, cuda:N (the GPU with index N); auto: a GPU if torch detects one, "
        "otherwise the CPU.",
        parse=device_name,
    ),
    Setting(
        "dtype",
        "auto",
        "Data type of KV and activations. int8, fp8 (e4m3): KV in half the bytes of bfloat16, with a scale per token "
        "and head; activations in bfloat16; int8 is more precise. auto: bfloat16 with compiled kernels and on GPUs, "
        "otherwise the type measured to be faster.",
        choices=("auto", *DTYPES),
    ),
    Setting(
        "weights",
        "shipped",
        "Format of the weights: as stored in the file, or converted at start.",
        choices=("shipped", "float32", "float16", "bfloat16"),
    ),
    Setting(
        "numerics",
        "exact",
        "Inputs of matrix products. exact: 16 bits or more; fast: rounded to 8 bits if the weights have 4 to 8 bits.",
        choices=("exact", "fast"),
    ),
    Setting(
        "kernels",
        "auto",
        "Kernel backend: the fastest on this machine (auto), compiled kernels by instruction level, torch or Triton.",
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
        "Compute threads per worker; 0: one per core; in a stack, a share of the cores that depends on the role.",
        parse=whole(0, 1024),
    ),
    Setting(
        "kv_memory",
        0,
        "Memory for KV pages, for example 512MiB or 4GiB; auto: 1GiB on the CPU, and the rest of gpu_memory_share on a "
        "GPU.",
        parse=size_or_auto,
    ),
    Setting(
        "gpu_memory_share",
        0.9,
        "Share of a GPU's memory for a worker, weights included; in a stack, divided among the workers on the GPU.",
        parse=share(),
    ),
    Setting(
        "pin_share",
        0.25,
        "Maximum share of the KV pages that pinned prefixes hold (POST /pin_prefix); 0 refuses pins. The pages of the "
        "longest request are never pinned.",
        parse=share(may_be_zero=True),
    ),
    Setting("block_tokens", 16, "Tokens per KV page.", parse=whole(1, 1024)),
    Setting(
        "window_pages",
        "auto",
        "KV pages behind the sliding windows of layers. keep: until the request ends; release: free them early; must "
        "be the same for all workers of a pool; auto: keep in workers and on GPUs, release offline on CPUs.",
        choices=("auto", "keep", "release"),
    ),
    Setting(
        "max_model_tokens",
        0,
        "Context length in tokens, prompt and output; 0: the model's.",
        parse=whole(0, 1 << 24),
    ),
    Setting("token_budget", 2048, "Maximum tokens per step, over all requests.", parse=whole(1, 1 << 20)),
    Setting("max_chunk_tokens", 512, "Maximum tokens of a prompt per step.", parse=whole(1, 1 << 20)),
    Setting(
        "max_mixed_tokens",
        256,
        "Maximum prompt tokens in a step that also decodes; fewer reduce inter-token latency but increase TTFT.",
        parse=whole(1, 1 << 20),
    ),
    Setting("max_sequences", 64, "Maximum requests in the running batch.", parse=whole(1, 4096)),
    SCHEDULING,
    CLASS_WEIGHTS,
    Setting(
        "async_steps",
        "on",
        "Whether the next step of decoding requests is launched before the tokens of the current one are recorded.",
        choices=("on", "off"),
    ),
    Setting(
        "stream_interval",
        1,
        "Number of tokens in each part of a stream after the first token; larger parts cost less time per token with "
        "many streams.",
        parse=whole(1, 1024),
    ),
    Setting(
        "speculation",
        "off",
        "Draft tokens that a step verifies after the next token: off; from earlier text of the request: auto, a number "
        "chosen by measurement, suffix?k=16, or ngram?k=5, a fixed number; from a small model with the same "
        "vocabulary: draft=MODEL?k=8; from heads that were trained for the model: eagle=FOLDER?k=6 or "
        "medusa=FOLDER?k=4, and with &width=3 as a tree with up to three candidates for a token. The parameter "
        "accept=rejection, available with all of these, accepts more of a draft model's tokens at high temperature.",
        parse=checked_speculation,
    ),
)

ADAPTERS = (
    Setting(
        "adapter",
        (),
        "NAME=PATH of a LoRA adapter (a PEFT folder), which requests use as their model; may be repeated.",
        is_repeated=True,
    ),
    Setting("adapter_slots", 8, "Maximum number of adapters in one step; 0 refuses adapters.", parse=whole(0, 1024)),
    Setting("max_adapter_rank", 64, "Largest accepted rank of an adapter.", parse=whole(1, 256)),
    Setting(
        "adapter_memory",
        1 << 30,
        "Memory for adapter weights; adapters beyond it are loaded again when requests need them.",
        parse=size_bytes,
    ),
    Setting(
        "adapters_file",
        "",
        "TOML file that lists adapters ([[adapters]] with name, path, digest); read again whenever it changes.",
    ),
    Setting(
        "adapter_folder",
        "",
        "Folder below which adapters may be loaded while serving (POST /v1/load_lora_adapter); default: none.",
    ),
)
TIERS = (
    Setting(
        "tier",
        (),
        "KV tiers beyond the pages, nearest first: dram://?size=2GiB, disk:///FOLDER?size=20GiB, "
        "redis://HOST:6379/0; may be repeated.",
        is_repeated=True,
    ),
    Setting("tier_object_tokens", 64, "Tokens per storage object of a tier.", parse=whole(1, 1 << 16)),
    Setting(
        "load_policy",
        "price",
        "Whether KV from a peer or a tier is loaded only if that is faster than recomputing it, or always.",
        choices=("price", "always"),
    ),
)

VERIFY_KV = Setting(
    "verify_kv",
    "epochs",
    "How fetched KV is verified: by the epochs of its pages, or also by a digest of each block's content. Must be "
    "the same for all workers.",
    choices=("epochs", "digest"),
)
