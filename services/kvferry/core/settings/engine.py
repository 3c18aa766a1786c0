"""Settings of an engine: the fields of two dataclasses, the arguments of `LLM` and the flags of workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvferry.core.dtypes import DTYPES
from kvferry.core.settings.class_weights import Weights, read_weights, weights_in_use
from kvferry.core.settings.parsers import NAME, Parser, device_name
from kvferry.core.settings.setting import check_names, check_settings, choice, fraction, number, size, text

AUTO, ON, OFF, KEEP, RELEASE = "auto", "on", "off", "keep", "release"
SHIPPED, EXACT, FAST = "shipped", "exact", "fast"
COMPILED = "compiled"
LEVELS = ("portable", "avx2", "avx512_bf16", "amx_bf16")
"""Instruction levels of the compiled kernels."""
BACKENDS = ("torch", "reference", "triton")
"""Kernel families over torch tensors."""
DEFAULT_KV_BYTES = 1 << 30
"""Default memory for KV pages on the CPU, in bytes."""
MAX_SLOTS = 1024
"""Largest number of adapter slots."""
MAX_RANK = 256
"""Largest rank of an adapter."""
SCHEDULING_POLICIES = ("fcfs", "priority", "srtf", "two-level", "weighted")
LOAD_POLICIES = ("price", "always")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step, and the order of requests."""

    token_budget: int = number(
        2048,
        "Maximum tokens per step, over all requests; bounds the step's time and activation memory.",
        low=1,
        high=1 << 20,
    )
    max_chunk_tokens: int = number(
        512,
        "Maximum tokens of a prompt per step, so that a long prompt does not stall other streams.",
        low=1,
        high=1 << 20,
    )
    max_mixed_tokens: int = number(  # Agrawal et al., Sarathi-Serve, 2024, section 4.2
        256,
        "Maximum prompt tokens in a step that also decodes; fewer reduce inter-token latency but increase TTFT.",
        low=1,
        high=1 << 20,
    )
    max_num_seqs: int = number(64, "Maximum requests in the running batch, which hold KV pages.", low=1, high=4096)
    scheduling: str = choice(
        "fcfs",
        "Which waiting request runs next: the earliest (fcfs), the lowest priority number (priority), the one with the "
        "fewest tokens to compute (srtf), the same among the first eight (two-level), or one of the priority with the "
        "least service relative to its weight (weighted). The gateway's queue also uses weighted if it is set; "
        "otherwise it is ordered by priority number.",
        SCHEDULING_POLICIES,
    )
    class_weights: str = text(
        "",
        "With scheduling=weighted: weights as PRIORITY=WEIGHT,..., such as 0=4,1=2; other priorities have weight 1.",
        Parser("PRIORITY=WEIGHT,...", str),
    )
    max_scored_rows: int = number(
        64,
        "Maximum prompt rows per step whose logits are computed for prompt_logprobs; bounds the memory of logits.",
        low=1,
        high=1 << 20,
    )
    reserve_share: float = fraction(
        0.01,
        "Share of the KV pages that admission leaves free; without it, new requests would cause preemptions.",
        may_be_zero=True,
    )
    background_steps: int = number(
        100,
        "Requests of the lowest priority (1000, as lines of batches have) pause beside others, except in one of this "
        "many steps; 1: they never pause.",
        low=1,
        high=10_000,
    )

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: a value is not valid, or `class_weights` has no effect.
        """
        check_settings(self)
        weights_in_use(self.scheduling, self.class_weights)

    @property
    def weights(self) -> Weights:
        """Weights by priority."""
        return read_weights(self.class_weights)

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of one sequence in a step, without draft tokens."""
        return min(self.max_chunk_tokens, self.token_budget)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine and its model."""

    model: str
    """A catalog name, a `.gguf` file or a folder with safetensors files; a key of `model.shapes.SHAPES` if
    `load_format` is "dummy"."""
    served_name: str = text("", "Model name for clients; default: the name in the model's files.", NAME)
    load_format: str = choice(
        AUTO,
        "auto: the model's files. dummy: random weights of the shape named by --model, generated on the device; "
        "prompts are token ids.",
        (AUTO, "dummy"),
    )
    device: str = text(
        AUTO,
        "Device that runs the model and has its KV pages: cpu, cuda, cuda:N (the GPU with index N); auto: a GPU if "
        "torch detects one, otherwise the CPU.",
        device_name,
    )
    dtype: str = choice(
        AUTO,
        "Data type of KV and activations. int8, fp8 (e4m3): KV in half the bytes of bfloat16, with a scale per token "
        "and head; activations in bfloat16; int8 is more precise. auto: bfloat16 with compiled kernels and on GPUs, "
        "otherwise the type measured to be faster.",
        (AUTO, *DTYPES),
    )
    weights: str = choice(
        SHIPPED,
        "Format of the weights: as stored in the file, or converted at start; the same for all workers of a pool.",
        (SHIPPED, "float32", "float16", "bfloat16"),
    )
    numerics: str = choice(
        EXACT,
        "Inputs of matrix products. exact: 16 bits or more; fast: rounded to 8 bits if the weights have 4 to 8 bits; "
        "the same for all workers of a pool.",
        (EXACT, FAST),
    )
    kernels: str = choice(
        AUTO,
        "Kernel backend: the fastest on this machine (auto), compiled kernels by instruction level, torch or Triton.",
        (AUTO, COMPILED, *(f"{COMPILED}-{level}" for level in LEVELS), *BACKENDS),
    )
    cuda_graphs: str = choice(
        AUTO,
        "On a GPU: auto captures decode steps once and replays them; off launches each kernel separately.",
        (AUTO, OFF),
    )
    async_steps: str = choice(
        ON,
        "Whether the next step of decoding requests is launched before the tokens of the current one are recorded.",
        (ON, OFF),
    )
    stream_interval: int = number(
        1,
        "Number of tokens in each part of a stream after the first token; larger parts cost less time per token with "
        "many streams.",
        low=1,
        high=1024,
    )
    speculation: str = text(
        OFF,
        "Draft tokens that a step verifies after the next token. off; from earlier text of the request: auto, a number "
        "chosen by measurement, suffix?k=16, or ngram?k=5, a fixed number; from a small model with the same "
        "vocabulary: draft=MODEL?k=8; from heads that were trained for the model: eagle=FOLDER?k=6 or "
        "medusa=FOLDER?k=4, and with &width=3 as a tree with up to three candidates for a token. The parameter "
        "accept=rejection, available with all of these, accepts more of a draft model's tokens at high temperature.",
        Parser("SPEC", str),
    )
    threads: int = number(
        0,
        "Compute threads per worker; 0: one per core; in a stack, a share of the cores that depends on the role.",
        low=0,
        high=1024,
    )
    tensor_parallel: int = number(
        1,
        "Processes on this host that compute the model together, each with a share of its heads, weights and threads, "
        "for example one per CPU socket; the KV pages are shared. CPUs only.",
        low=1,
        high=64,
    )
    kv_memory: int = size(
        0,
        "Memory for KV pages, for example 512MiB or 4GiB; auto: 1GiB on the CPU, and the rest of "
        "gpu_memory_utilization on a GPU.",
        is_auto=True,
    )
    gpu_memory_utilization: float = fraction(
        0.9,
        "Share of a GPU's memory for a worker, weights included; in a stack, divided among the workers on the GPU.",
    )
    block_tokens: int = number(16, "Tokens per KV page.", low=1, high=1024)
    max_model_len: int = number(
        0, "Context length in tokens, prompt and output, at most the model's; 0: the model's.", low=0, high=1 << 24
    )
    pin_share: float = fraction(
        0.25,
        "Maximum share of the KV pages that pinned prefixes hold (POST /pin_prefix); 0 refuses pins. The pages of the "
        "longest request are never pinned.",
        may_be_zero=True,
    )
    retention_share: float = fraction(
        0.25,
        "Maximum share of the KV pages that are kept for clients that ask for it (cache_control, prompt_cache_options, "
        "kv_hints), one tenant at most half of it; 0 keeps none. Pins have their own share.",
        may_be_zero=True,
    )
    window_pages: str = choice(
        AUTO,
        "KV pages behind the sliding windows of layers. keep: until the request ends; release: free them early, if "
        "that reduces the memory of the longest request; must be the same for all workers of a pool; auto: keep in "
        "workers and on GPUs, release offline on CPUs.",
        (AUTO, KEEP, RELEASE),
    )
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    load_policy: str = choice(
        "price",
        "Whether KV from a peer or a tier is loaded only if that is faster than recomputing it, or always.",
        LOAD_POLICIES,
    )
    seed: int = 0
    """Seed of random weights, and of offline requests without a seed."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of LoRA adapters; a request names an adapter as its model."""
    adapter_slots: int = number(8, "Maximum number of adapters in one step; 0 refuses adapters.", low=0, high=MAX_SLOTS)
    max_adapter_rank: int = number(64, "Largest accepted rank of an adapter.", low=1, high=MAX_RANK)
    adapter_memory: int = size(
        1 << 30, "Memory for adapter weights; adapters beyond it are loaded again when requests need them."
    )

    def __post_init__(self) -> None:
        """Check the fields; sizes may be text.

        Raises:
            UsageError: a value is not valid.
        """
        check_settings(self)

    @classmethod
    def of(cls, model: str, /, **settings: Any) -> "EngineSettings":
        """Create settings from names and values of both dataclasses; `adapters` may be a mapping.

        Raises:
            UsageError: a name is unknown, or a value is not valid.
        """
        own = tuple(one.name for one in fields(cls) if one.name != "model")
        of_limits = tuple(one.name for one in fields(SchedulerLimits))
        check_names(settings, own + of_limits)
        limits = {name: settings.pop(name) for name in of_limits if name in settings}
        if limits:
            given = settings.get("limits", SchedulerLimits())
            settings["limits"] = SchedulerLimits(**{name: getattr(given, name) for name in of_limits} | limits)
        if isinstance(settings.get("adapters"), Mapping):
            settings["adapters"] = tuple(settings["adapters"].items())
        return cls(model, **settings)
