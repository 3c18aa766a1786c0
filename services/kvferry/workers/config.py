"""Settings of one worker process, built by the command line and passed down in the smallest part that is needed."""

from dataclasses import dataclass, field

from kvferry.core.errors import UsageError
from kvferry.engine.room import SchedulerLimits
from kvferry.kv.offers import OfferTimes
from kvferry.kv.price import LoadPolicy

ROLES = ("prefill", "decode", "both", "split")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine."""

    model: str
    """A catalog name, a `.gguf` file or a folder."""
    served_name: str = ""
    """What clients call the model; empty: its own name."""
    device: str = "auto"
    """`auto` or `cpu`: transports read and write pages in the host's memory."""
    dtype: str = "auto"
    """Of the KV: `float32`, `bfloat16`, `float16`, `int8`, or `auto` (`compute_dtype`). Workers that agree exchange KV
    as it is, others convert it."""
    weights: str = "shipped"
    """Form of the weights, a name of `models.build.WEIGHTS`. Workers must agree."""
    numerics: str = "exact"
    """How inputs of products are kept: exact, or fast."""
    kernels: str = "auto"
    """What computes, a name of `models.build.KERNELS`."""
    threads: int = 0
    """Compute threads; 0: as many as there are cores for this process."""
    kv_bytes: int = 1 << 30
    """Memory for KV pages; backed in full soon after start."""
    block_tokens: int = 16
    """Tokens a page; 16 is the field's usual trade between waste and table length."""
    max_model_tokens: int = 0
    """Prompt and output together; 0: what the model was trained for."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    load_policy: LoadPolicy = LoadPolicy.PRICE
    """Whether KV that is somewhere else is loaded by price or always."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process."""

    role: str
    """`prefill`, `decode`, `both`, or `split`: a prefill and a decode engine in one process."""
    engine: EngineConfig
    advertise_host: str = ""
    """Host under which peers reach this worker; empty: the one it listens on."""
    connector: str = "shm"
    """How KV travels between workers."""
    worker_id: str = ""
    """Stable name; empty: the advertised address."""
    metrics: str = ""
    """`host:port` of a page of metrics; empty: there is none."""
    ticket_secrets: tuple[bytes, ...] = ()
    """Keys that seal tickets, newest first; all workers of a pool share them."""
    tenant_secret: bytes = b""
    """Keys the names of cached blocks; shared by all workers of a pool."""
    offers: OfferTimes = field(default_factory=OfferTimes)
    tiers: tuple[str, ...] = ()
    """Where KV is kept beyond the pages, nearest first, as URLs."""
    tier_object_tokens: int = 64
    """Tokens in a storage object, a multiple of `block_tokens`. More: better rates, coarser hits."""
    drain_seconds: float = 30.0
    """How long running work may go on after SIGTERM."""

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            UsageError: naming the setting.
        """
        if self.role not in ROLES:
            raise UsageError(f"role {self.role!r} is not one of {', '.join(ROLES)}", field="role")
        if self.role == "split" and self.connector != "memory":
            raise UsageError("role 'split' hands KV over within one process: use connector 'memory'", field="connector")
        if self.role in {"prefill", "decode"} and self.connector == "memory":
            raise UsageError(
                f"connector 'memory' works within one process, role {self.role!r} needs another; "
                "use 'shm', 'nixl' or 'tcp', or role 'split'",
                field="connector",
            )
        if self.engine.device not in {"auto", "cpu"}:
            raise UsageError(
                f"device {self.engine.device!r}: connector {self.connector!r} moves pages in the host's memory, so a "
                "worker cannot keep them on a GPU yet; take --device cpu (kvferry bench and LLM(...) run on GPUs)",
                field="device",
            )
        if self.tier_object_tokens % self.engine.block_tokens:
            raise UsageError(
                f"tier_object_tokens={self.tier_object_tokens} is not a multiple of block_tokens="
                f"{self.engine.block_tokens}",
                field="tier_object_tokens",
            )
        if not self.ticket_secrets:
            raise UsageError(
                "no ticket key; name a file that holds one with --ticket-key-file", field="ticket_key_file"
            )
