"""Settings of one gateway process, built by the command line; each component receives only its own section."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from kvferry.core.errors import UsageError
from kvferry.core.traces.spans import TraceSettings

if TYPE_CHECKING:  # packages of pure decisions import this module
    from kvferry.rpc.tls.certificate_files import CertificateFiles


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Addresses of a worker's gRPC services."""

    address: str
    """`host:port` of the worker's Prefill or Decode service."""
    admin_address: str
    """`host:port` of the worker's WorkerAdmin service; equal to `address` if one port serves both."""

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Parse `host:port`, or `host:port/admin_port` when WorkerAdmin has a separate port.

        Raises:
            UsageError: `text` has neither form.
        """
        address, slash, admin_port = text.partition("/")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or (slash and not admin_port.isdecimal()):
            raise UsageError(f"{text!r} is not a worker's address; use host:port or host:port/admin_port")
        return cls(address, f"{host}:{admin_port}" if slash else address)


_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PoolName:
    """Namespace and name of an `InferencePool` object."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "PoolName":
        """Parse `namespace/name`.

        Raises:
            UsageError: `text` does not have this form.
        """
        namespace, _, name = text.partition("/")
        if not _DNS_LABEL.fullmatch(namespace) or not _DNS_LABEL.fullmatch(name):
            raise UsageError(
                f"{text!r} is not a pool; use NAMESPACE/NAME, each with lower case letters, digits and hyphens",
                field="pool",
            )
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


PolicyName = Literal["latency", "prefix-hash", "round-robin", "least-loaded", "random"]
"""Name of a routing policy; see `gateway.decide.routing.policies`."""
POLICIES: tuple[str, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Settings of replica selection."""

    policy: PolicyName = "latency"
    prefix_blocks: int = 4
    """Number of leading full blocks that are hashed into a request's prefix key. Requests with equal keys go to the
    same replica: a small number groups conversations by system prompt, a large number separates them."""
    load_factor: float = 1.25
    """With policy `prefix-hash`: bound on a replica's load as a multiple of the average load, greater than 1; requests
    above it go to the next replica."""
    kv_prefetch_tokens: int = 1024
    """Minimum prompt length in tokens for prefetching KV while the prompt is still being computed; 0 disables it. The
    default is about two prefill chunks: the last chunk is always transferred after the computation."""
    skip_prefill_below_tokens: int = 0
    """Prompts with fewer tokens to compute are computed by the decode worker, without a prefill worker; 0 disables
    this. Tokens that an exact map shows in the decode worker's cache do not count."""


@dataclass(frozen=True, slots=True)
class CacheMapConfig:
    """Settings of the map of the workers' caches."""

    max_blocks: int = 1 << 22
    """Maximum number of blocks in the map, over all workers; a block takes 60 to 110 bytes. 0 disables subscriptions,
    and the gateway predicts from its own routing history."""
    audit_seconds: float = 30.0
    """Mean interval in seconds between two audits of a worker's map."""
    poll_seconds: float = 0.2
    """Interval in seconds at which workers that join or leave the fleet are detected."""


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Limits on retries and waits after a worker is lost."""

    max_failures: int = 20
    """Consecutive failures without a new token after which a request fails. With the backoff below, this takes about 30
    s, enough for a worker to restart."""
    max_failed_steps: int = 2
    """Consecutive failed steps that contained a request, without a new token for it, after which the request is
    rejected: it may be the cause and would crash the next worker too."""
    first_backoff_seconds: float = 0.05
    """Delay before the first retry, doubled for each further one. The first retry is immediate if a different worker
    accepts the request."""
    max_backoff_seconds: float = 2.0
    first_worker_seconds: float = 2.0
    """Time that a new request waits for a worker that is lost or not ready yet; about the time to detect that a
    worker has recovered."""
    request_timeout_seconds: float = 600.0
    """Upper limit on a request's duration, even if the client's deadline is later."""
    release_timeout_seconds: float = 5.0
    """Time limit in seconds for releasing an offer at its prefill worker; after that, the pages are freed when the
    offer's lease expires."""


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Settings of the dispatcher: routing, retries, concurrency."""

    routing: RoutingConfig = field(default_factory=RoutingConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    max_streams: int = 1024
    """Maximum number of samples in flight; further samples are rejected."""
    tenant_key: bytes = b""
    """Key of the workers' block hashes. If it is empty, hashes are computed with an empty key: all gateways still
    choose the same routes, but the hashes do not match any worker's blocks."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The gateway's workers and how they are polled."""

    pool: PoolName | None = None
    """The cluster's pool whose workers are discovered; `None` if the workers are listed in this configuration."""
    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
    both: tuple[Endpoint, ...] = ()
    """Workers of role `both`: they serve whole requests when no prefill and decode pair is available."""
    status_interval_seconds: float = 0.5
    """Interval between status polls of a healthy worker; load and readiness are at most this old."""
    status_timeout_seconds: float = 2.0
    """Timeout of a status poll; a worker that exceeds it gets no new requests. A shorter timeout causes false alarms:
    status has a separate port, but shares CPU cores and the GIL with the engine."""
    silent_polls: int = 2
    """Number of consecutive unanswered status polls, with no token received between them, after which calls to the
    worker are cancelled. A single missed poll only diverts new requests; cancelled calls must be recomputed."""
    stalled_polls: int = 60
    """Number of consecutive statuses with running sequences but no new engine step after which calls to the worker are
    cancelled and it gets no new requests: 30 s at the default interval. The longest step, a chunk of a large model
    on a CPU, takes a few seconds."""
    max_backoff_seconds: float = 2.0
    """Maximum interval between status polls of a worker that does not answer."""


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """Limits on requests that are held while their pool has no workers."""

    max_held: int = 256
    """Maximum number of samples waiting for a worker; further samples are rejected with HTTP status 429."""
    seconds: float = 60.0
    """Maximum time that a sample may wait; about the start time of a pod whose model files are already on the node."""


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """Bounds of the queue of requests for which the fleet has no room."""

    max_queued: int = 4096
    """Maximum number of queued requests; further ones are rejected with HTTP status 429, or displace requests of a
    lower class."""
    max_queued_bytes: int = 256 << 20
    """Maximum memory of the queued requests in bytes."""
    class_weights: Mapping[int, int] | None = None
    """Weight by priority, by which priorities share the fleet; `None` to serve them strictly in order."""
    max_streams: int = 1024
    """Maximum number of samples in flight; the samples of further requests wait in the queue."""
    request_timeout_seconds: float = 600.0
    """Upper limit on a request's duration, even if the client's deadline is later."""
    is_small_first: bool = True
    """Whether a tenant's request of which fewer samples have begun goes first; otherwise the earliest one."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of the responses that are kept."""

    tenant_bytes: int = 32 << 20
    total_bytes: int = 256 << 20
    seconds: float = 3600.0
    """Time since its last use after which a response is dropped."""
    turns: int = 512
    """Maximum number of turns of a conversation that is continued from a stored response."""
    conversation_bytes: int = 8 << 20
    """Maximum size of their items."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Settings of the OpenAI-compatible HTTP API."""

    address: str = "127.0.0.1:8000"
    """`host:port` to listen on; port 0 selects a free port."""
    max_body_bytes: int = 8 << 20
    max_buffered_bytes: int = 128 << 20
    """Maximum total size in bytes of the bodies larger than 64 KiB that are being received or read at a time; further
    ones are rejected with 429."""
    body_timeout_seconds: float = 30.0
    """Time limit in seconds for receiving a request's body."""
    max_prompts: int = 64
    """Maximum number of prompts in one completions request; each prompt has `n` samples."""
    kept_responses: StoreLimits | None = field(default_factory=StoreLimits)
    """Bounds of the responses that are kept for `previous_response_id`; `None` keeps none. Gateways with a shared state
    keep them there instead."""
    strict_fields: bool = False
    """Whether unknown fields of requests are refused; otherwise they have no effect, and the answer names them."""
    sse_keepalive_seconds: float = 15.0
    """Interval in seconds of the comments that are sent while the first event of a stream is awaited; 0 sends none."""
    http_keepalive_seconds: float = 120.0
    """Time in seconds after which an idle connection is closed."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the API; `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts, without port, that requests may name in addition to loopback's, also at the admin API."""
    has_page: bool = True
    """Whether `/` is the chat page."""
    api_keys_file: Path | None = None
    """File with one `key tenant` pair per line; `None` disables authentication, and all requests use the default
    tenant."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Settings of files and batches."""

    folder: Path | None
    """Folder of the files and of the records, created by the first use; `None` for the Redis of `state`."""
    max_file_bytes: int = 200 << 20
    """Maximum size of an uploaded file."""
    tenant_file_bytes: int = 4 << 30
    """Maximum size of a tenant's files together, uploads and results."""
    tenant_files: int = 1000
    """Maximum number of a tenant's files."""
    lines: int = 0
    """Maximum number of lines that are computed at a time; 0 for half of the sequences of the workers."""
    max_body_bytes: int = 8 << 20
    """Maximum size of the body of a line."""


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Settings of the state that the gateways of a pool share."""

    url: str = field(repr=False)
    """URL of a Redis server, with its password."""
    total_bytes: int = 256 << 20
    """Maximum size of the records of streams in bytes, over all gateways, and also of the stored responses."""
    file_bytes: int = 1 << 30
    """Maximum size of files and batches in bytes, over all gateways, if `BatchConfig.folder` is `None`."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway process."""

    fleet: FleetConfig
    http: HttpConfig = field(default_factory=HttpConfig)
    grpc_address: str = "127.0.0.1:9000"
    """`host:port` of the gRPC services Inference, health and reflection; port 0 selects a free port."""
    admin_address: str = "127.0.0.1:0"
    """`host:port` of the admin API: metrics, fleet, ended requests. It is read without authentication and therefore
    listens on loopback by default."""
    admin_token_file: Path | None = None
    """File with the tokens of changes by the admin API; `None` to accept changes on loopback only."""
    tls: tuple[Path, Path, Path | None] | None = None
    """Certificate chain and key, PEM, for HTTP and gRPC, and the CA of client certificates, if clients must present
    one; `None` disables TLS.
    """
    pool_tls: "CertificateFiles | None" = None
    """Certificate, key and CA bundle for calls to workers; `None` for plain connections."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    max_streams: int = 1024
    """Maximum number of samples in flight; further requests wait in the queue."""
    max_queued: int = 4096
    """Maximum number of queued requests; see `FlowConfig.max_queued`."""
    max_queued_bytes: int = 256 << 20
    """Maximum memory of the queued requests in bytes."""
    is_small_first: bool = True
    """See `FlowConfig.is_small_first`."""
    class_weights: Mapping[int, int] | None = None
    """Weight by priority, by which priorities share the fleet; `None` to serve them strictly in order."""
    probe_key: str = field(default="", repr=False)
    """API key of a local stack's first request, accepted in addition to those of the tenants if keys are required."""
    tenants_file: Path | None = None
    """TOML file with the tenants' keys, shares and quotas, read again when it changes; `None` for no tenants."""
    cache_map: CacheMapConfig = field(default_factory=CacheMapConfig)
    tenant_key: bytes = b""
    """Key of the workers' block hashes; see `DispatchConfig.tenant_key`."""
    traces: TraceSettings | None = None
    """Settings of traces; `None` for no traces."""
    request_trace: tuple[Path, int] | None = None
    """File for an anonymous trace of the requests, and its maximum size in bytes; `None` for no trace."""
    batches: BatchConfig | None = None
    """Settings of files and batches; `None` if they are not served."""
    state: StateConfig | None = None
    """Settings of the state that the gateways of a pool share; `None` if each gateway has its own."""
    hold: HoldConfig = field(default_factory=HoldConfig)
    """Limits on held requests; used only if `fleet.pool` is set."""
    shares_ports: bool = False
    """Whether other gateways of this user on this machine may listen on the same HTTP and gRPC addresses."""
    linger_seconds: float = 0.0
    """Seconds after SIGTERM during which new requests are still accepted while readiness is already false, so that load
    balancers remove this gateway first."""
    drain_seconds: float = 30.0
    """Time limit in seconds for running streams to finish after `linger_seconds`."""
