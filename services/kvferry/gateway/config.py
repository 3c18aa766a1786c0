"""Settings of one gateway process, built by the command line and passed down in the smallest part that is needed."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one worker listens."""

    address: str
    """`host:port` of its Prefill or Decode service."""
    admin_address: str
    """`host:port` of its WorkerAdmin service; the same where one port serves both."""

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """`host:port`, or `host:port/admin_port` when WorkerAdmin has a port of its own.

        Raises:
            UsageError: it is neither.
        """
        address, slash, admin_port = text.partition("/")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or (slash and not admin_port.isdecimal()):
            raise UsageError(f"{text!r} is not a worker's address; write host:port or host:port/admin_port")
        return cls(address, f"{host}:{admin_port}" if slash else address)


_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PoolName:
    """Which pool of a cluster."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "PoolName":
        """`namespace/name`.

        Raises:
            UsageError: it is not.
        """
        namespace, _, name = text.partition("/")
        if not _DNS_LABEL.fullmatch(namespace) or not _DNS_LABEL.fullmatch(name):
            raise UsageError(
                f"{text!r} is not a pool; write NAMESPACE/NAME, both of lower case letters, digits and hyphens",
                field="pool",
            )
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How replicas are chosen."""

    block_tokens: int = 16
    """Tokens per block of the names that requests are spread by; best the workers' own block size."""
    prefix_blocks: int = 4
    """Leading full blocks that name a request. Requests equal in them share a replica: few blocks gather
    conversations with one system prompt, many tell them apart."""
    load_factor: float = 1.25
    """How far above the average a replica may be loaded before its requests spill over; above 1."""
    head_start_tokens: int = 1024
    """Longer prompts' blocks begin to travel while they are computed; 0: never. About two of the workers' chunks: the
    last one has to travel afterwards in any case."""
    skip_prefill_below_tokens: int = 0
    """Prompts shorter than this are computed by the decode worker itself; 0 never skips."""


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """What a lost worker costs at most."""

    max_failures: int = 20
    """Failures in a row without a new token after which a request fails; with the waits below about half a minute,
    in which a worker restarts."""
    first_backoff_seconds: float = 0.05
    """The first retry is immediate if another worker can take it; else it waits about this long, the next one twice
    as long, and so on."""
    max_backoff_seconds: float = 2.0
    first_worker_seconds: float = 2.0
    """A new request that finds nobody waits so long for a worker that is lost or not ready yet; about what it takes
    to notice one that is back."""
    request_timeout_seconds: float = 600.0
    """A request takes no longer, whatever its client's deadline."""
    release_timeout_seconds: float = 5.0
    """For telling a prefill worker that its offer is not wanted; after it, the offer's lease must do."""


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """How samples are run."""

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    max_streams: int = 1024
    """Samples in flight; more are refused."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Which workers there are and how they are watched."""

    pool: PoolName | None = None
    """The pool in a cluster whose workers these are; `None`: they are listed here."""
    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
    both: tuple[Endpoint, ...] = ()
    """Serve everything when no prefill and decode pair can."""
    status_interval_seconds: float = 0.5
    """Between two looks at a healthy worker; load and readiness are at most this old."""
    status_timeout_seconds: float = 2.0
    """A worker that does not answer for so long gets no new requests. Not shorter: status has a port of its own, but
    shares cores and the interpreter's lock with the engine."""
    silent_looks: int = 2
    """Looks in a row without an answer, and without a token meanwhile, after which a worker's calls are given up.
    One costs nothing but a detour of new requests; giving up running ones costs their computing anew."""
    max_backoff_seconds: float = 2.0
    """Between two looks at a worker that does not answer."""


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """What becomes of requests that find a pool without workers."""

    max_held: int = 256
    """Samples that wait for a worker; more are refused with 429."""
    seconds: float = 60.0
    """How long one waits; about what it takes to start a pod that has its model at hand."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible side."""

    address: str = "127.0.0.1:8000"
    """`host:port`; port 0 takes a free one."""
    max_body_bytes: int = 8 << 20
    body_timeout_seconds: float = 30.0
    """A request's body that takes longer to arrive is given up."""
    max_prompts: int = 64
    """Prompts in one completions request, each with its `n` samples."""
    api_keys_file: Path | None = None
    """Lines of `key tenant`; `None` lets everybody in as the default tenant."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway process."""

    fleet: FleetConfig
    http: HttpConfig = field(default_factory=HttpConfig)
    grpc_address: str = "127.0.0.1:9000"
    """`host:port` of Inference, health and reflection; port 0 takes a free one."""
    tls: tuple[Path, Path] | None = None
    """Certificate chain and key, PEM, for HTTP and gRPC; `None`: in the clear."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    max_streams: int = 1024
    """Samples in flight; more are refused with 429 and a time to come back."""
    hold: HoldConfig = field(default_factory=HoldConfig)
    """Used only where the workers are a pool's."""
    linger_seconds: float = 0.0
    """How long new requests are still taken after SIGTERM, while readiness already says no: until whoever sends them
    here has heard of it."""
    drain_seconds: float = 30.0
    """How long running streams may go on after that."""
