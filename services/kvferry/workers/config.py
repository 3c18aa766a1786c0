"""Settings of a worker process, built by the command line and checked on creation."""

from dataclasses import dataclass, field

from kvferry.core.errors import UsageError
from kvferry.core.settings.engine import EngineSettings
from kvferry.core.traces.spans import TraceSettings
from kvferry.kv.handoff.offers import OfferTimes
from kvferry.kv.registry import check_encryption
from kvferry.rpc.access.hosts import is_host
from kvferry.rpc.tls.certificate_files import CertificateFiles
from kvferry.text.requests.answer_rules import AnswerParsers

ROLES = ("prefill", "decode", "both", "split")
EPOCHS, DIGEST = "epochs", "digest"
VERIFY_KV = (EPOCHS, DIGEST)
"""Ways to verify fetched KV: by the epochs of its pages, or also by a digest of each page's content."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker process."""

    role: str
    """Role of the worker: `prefill`, `decode`, `both`, or `split` (a prefill and a decode engine in one process)."""
    engine: EngineSettings
    advertise_host: str = ""
    """Host under which peers reach this worker; empty selects the listening host."""
    connector: str = "shm"
    """Name of the connector for KV transfers between workers."""
    worker_id: str = ""
    """Stable name of the worker; empty selects the advertised address."""
    metrics: str = ""
    """`host:port` of the Prometheus metrics; empty disables them."""
    health: str = ""
    """`host:port` of a plain server of `grpc.health.v1.Health` for probes; empty disables it."""
    pool_tls: CertificateFiles | None = None
    """Certificate, key and CA bundle for calls within the pool; `None` for plain connections."""
    ticket_secrets: tuple[bytes, ...] = ()
    """Secrets of the pool, newest first, the same for all its workers: they seal tickets and messages between workers,
    and the keys with which calls are signed are derived from them."""
    tenant_key: bytes = b""
    """Key of the block names; shared by all workers of a pool."""
    offers: OfferTimes = field(default_factory=OfferTimes)
    tiers: tuple[str, ...] = ()
    """URLs of the KV tiers, nearest first."""
    tier_object_tokens: int = 64
    """Tokens per storage object, a multiple of `block_tokens`; larger objects are faster, but a hit must cover a whole
    object."""
    verify_kv: str = EPOCHS
    """Verification of fetched KV, a value of `VERIFY_KV`. With `digest`, tickets contain page digests, and tickets
    without digests are rejected."""
    kv_encryption: bool = False
    """Whether KV between workers is encrypted on the network; workers of the other mode are refused."""
    drain_seconds: float = 30.0
    """Maximum seconds for running requests to finish after SIGTERM."""
    adapters_file: str = ""
    """File with a list of adapters (`workers.adapters.adapter_list`), followed while serving; empty for none."""
    adapter_folder: str = ""
    """Folder below which adapters may be loaded while serving; if empty, they may not."""
    weights_folder: str = ""
    """Folder below which checkpoints may be named to change the weights while serving; if empty, they do not change."""
    weight_version: str = ""
    """Version of the weights that are loaded at the start; empty selects the first digits of their digest."""
    traces: TraceSettings | None = None
    """Settings of traces; `None` for no traces."""
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    """How answers are parsed by the Inference service of role `both`."""

    def __post_init__(self) -> None:
        """Check each setting and their combination.

        Raises:
            UsageError: a setting is unknown or conflicts with another one; `field` is its name.
        """
        if self.role not in ROLES:
            raise UsageError(f"role {self.role!r} is not one of {', '.join(ROLES)}", field="role")
        if self.verify_kv not in VERIFY_KV:
            raise UsageError(
                f"unknown verify_kv {self.verify_kv!r}; expected one of {', '.join(VERIFY_KV)}", field="verify_kv"
            )
        if self.role == "split" and self.connector != "memory":
            raise UsageError("role 'split' transfers KV within one process; use connector 'memory'", field="connector")
        if self.role in {"prefill", "decode"} and self.connector == "memory":
            raise UsageError(
                f"connector 'memory' works only within one process, not with role {self.role!r}; use 'shm', 'nixl' or "
                "'tcp', or role 'split'",
                field="connector",
            )
        if self.kv_encryption:
            check_encryption(self.connector)
        if self.tier_object_tokens % self.engine.block_tokens:
            raise UsageError(
                f"tier_object_tokens={self.tier_object_tokens} is not a multiple of block_tokens="
                f"{self.engine.block_tokens}",
                field="tier_object_tokens",
            )
        if self.advertise_host and not is_host(self.advertise_host):
            raise UsageError(
                f"advertise_host {self.advertise_host!r} is neither an IP address nor a host name; the port comes from "
                "--listen",
                field="advertise_host",
            )
        if not self.ticket_secrets:
            raise UsageError(
                "no ticket key; create one with `kvferry key new > ticket.key` and set --ticket-key-file ticket.key",
                field="ticket_key_file",
            )
