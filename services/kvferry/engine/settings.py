"""Engine settings: one dataclass, passed unchanged from the command line to `engine.build`."""

from dataclasses import dataclass, field

from kvferry.engine.schedule.plan.step_budget import SchedulerLimits
from kvferry.engine.schedule.ranges import check_ranges, check_share
from kvferry.kv.pricing.price import LoadPolicy

LOAD_FORMATS = ("auto", "dummy")
"""Valid values of `load_format`: weights from the model's files, or random weights."""
DEFAULT_KV_BYTES = 1 << 30
"""Default memory for KV pages on the CPU, in bytes."""
AUTO, KEEP, RELEASE = "auto", "keep", "release"
WINDOW_PAGES = (AUTO, KEEP, RELEASE)
"""Valid values of `window_pages`."""
ON, OFF = "on", "off"
ASYNC_STEPS = (ON, OFF)
"""Valid values of `async_steps`."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine and its model."""

    model: str
    """A catalog name, a `.gguf` file or a folder with safetensors files; a key of `model.shapes.SHAPES` if
    `load_format` is "dummy"."""
    served_name: str = ""
    """Model name in the API; if empty, the model's own name."""
    load_format: str = "auto"
    """One of `LOAD_FORMATS`. `dummy` generates random weights and has no tokenizer: prompts are token ids."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if torch detects one, otherwise the CPU. Pages are on the same
    device."""
    dtype: str = "auto"
    """Data type of KV and activations: `float32`, `bfloat16`, `float16`, `int8` or `fp8` (KV only; compiled or Triton
    kernels), or `auto`: bfloat16 with compiled kernels and on GPUs, otherwise float32 or bfloat16, whichever is
    measured to be faster. KV is copied unchanged between workers with equal types, and converted otherwise."""
    weights: str = "shipped"
    """Weight format, a key of `models.build.WEIGHTS`; the same for all workers of a pool."""
    numerics: str = "exact"
    """Precision of matrix product inputs, one of `models.build.NUMERICS`; the same for all workers of a pool."""
    kernels: str = "auto"
    """Kernels, one of `models.build.KERNELS`."""
    cuda_graphs: str = "auto"
    """CUDA graph capture of steps on a GPU, one of `execute.build_runner.CUDA_GRAPHS`."""
    async_steps: str = ON
    """Whether the next step is launched before the tokens of the current one are recorded, one of `ASYNC_STEPS`."""
    stream_interval: int = 1
    """Number of tokens in each part of a stream after the first token; see `loop.stream_interval`."""
    speculation: str = "off"
    """Speculative decoding, parsed by `speculation.settings.parse_speculation`."""
    threads: int = 0
    """Compute threads; 0 uses one thread per available core."""
    kv_bytes: int = 0
    """Memory for KV pages in bytes; 0 selects `DEFAULT_KV_BYTES` in host memory and, on a GPU, the memory that
    `gpu_memory_share` leaves."""
    gpu_memory_share: float = 0.9
    """Share of a GPU's memory for the engine, weights included."""
    block_tokens: int = 16
    """Tokens per block; 16 is the usual trade-off between internal fragmentation and table length."""
    max_model_tokens: int = 0
    """Context length in tokens, prompt and output; 0 uses the model's maximum."""
    pin_share: float = 0.25
    """Maximum share of the KV pages that pinned prefixes hold; 0 refuses pins."""
    window_pages: str = AUTO
    """Treatment of KV pages behind the sliding windows of a model's layers, one of `WINDOW_PAGES`; the same for all
    workers of a pool. They are released only if that reduces the memory of a request that fills the context. With
    `auto`, `LLM` and `AsyncLLM` release them on CPUs; workers keep them, and so do GPUs."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    load_policy: LoadPolicy = LoadPolicy.PRICE
    """When to load KV from peers and tiers: if it is estimated to be faster, or always."""
    seed: int = 0
    """Seed of random weights."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of LoRA adapters; a request names an adapter as its model."""
    adapter_slots: int = 8
    """Maximum number of adapters in one step; 0 refuses adapters."""
    max_adapter_rank: int = 64
    """Largest accepted rank of an adapter, at most `weights.adapters.adapter_config.MAX_RANK`."""
    adapter_bytes: int = 1 << 30
    """Host memory for adapter weights in bytes; beyond it, adapters that are not in a slot are evicted and loaded again
    when needed."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: a number is out of range.
        """
        check_ranges(
            self,
            "threads",
            "kv_bytes",
            "block_tokens",
            "max_model_tokens",
            "adapter_slots",
            "max_adapter_rank",
            "adapter_bytes",
            "stream_interval",
        )
        check_share("gpu_memory_share", self.gpu_memory_share, may_be_zero=False)
        check_share("pin_share", self.pin_share, may_be_zero=True)
