"""Plans the processes of a stack on one machine from the stack's settings. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.core.errors import UsageError

MAX_WORKERS = 64

# How long a compute thread spins before it sleeps (GOMP_SPINCOUNT). Measured on two cores, docs/performance.md: a
# longer spin makes decode 1.6 times as fast for a single worker, and half as fast for two workers on the same cores.
_SPIN_ALONE = "3000"
_SPIN_SHARED = "100"
_GPU_SHARE = 0.9
"""Share of a GPU's memory that all its workers use together."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Command line and environment of a process of the stack."""

    name: str
    arguments: Sequence[str]
    """Arguments after `kvferry`; `{key}` is replaced by the address that the process's first start bound."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Settings of a stack on this machine."""

    model: str
    prefill: int = 1
    decode: int = 1
    both: int = 0
    connector: str = "shm"
    http: str = "127.0.0.1:8000"
    grpc: str = "127.0.0.1:9000"
    admin: str = "127.0.0.1:0"
    """Address of the gateway's admin API."""
    cores: int = 1
    """Number of CPU cores that all workers share."""
    threads: int = 0
    """Number of compute threads per worker; 0 selects it by role, see `compute_threads`."""
    tiers: tuple[str, ...] = ()
    """URLs of the workers' tiers, nearest first."""
    worker_flags: Sequence[str] = ()
    """Flags for every worker, for example `--dtype` or `--kv-memory`."""
    gateway_flags: Sequence[str] = ()
    ticket_key: str = field(default="", repr=False)
    """The workers' secret, from which the gateway's key is derived; if empty, a random secret is generated for each
    run."""
    pool_tls: bool = False
    """Whether the processes call each other by mutual TLS, with a CA that is generated for the run."""
    api_key: str | None = field(default=None, repr=False)
    """API key for the first token; `None` if the gateway requires none."""
    probe_key: str = field(default="", repr=False)
    """`api_key` if no tenant of the gateway has it; empty otherwise."""

    def __post_init__(self) -> None:
        """Check the numbers of workers.

        Raises:
            UsageError: the workers cannot serve a request, or there are too many.
        """
        for name in ("prefill", "decode", "both"):
            if not 0 <= getattr(self, name) <= MAX_WORKERS:
                raise UsageError(f"--{name} must be between 0 and {MAX_WORKERS}, not {getattr(self, name)}", field=name)
        if not self.both and not (self.prefill and self.decode):
            raise UsageError(
                "these workers cannot serve requests: start a prefill and a decode worker, or a worker of role both",
            )
        if self.connector == "memory" and self.prefill != self.decode:
            raise UsageError(
                "connector 'memory' pairs prefill and decode in one process: --prefill and --decode must be equal",
                field="connector",
            )


def compute_threads(config: StackConfig, role: str) -> int:
    """Return the number of compute threads of a worker, such that workers on the same machine do not starve each other.

    Prefill runs in bursts and uses all cores. Decode steps are short and frequent, and a thread that waits for a core
    delays every step, so decode uses only its share of the cores.

    Args:
        config: configuration of the stack.
        role: role of the worker.
    """
    if config.threads:
        return config.threads
    if role in {"prefill", "split"}:
        return config.cores
    return max(1, config.cores // (config.prefill + config.decode + config.both))


def gpu_memory_share(config: StackConfig) -> float:
    """Return one engine's share of each GPU's memory, if all workers run on the same GPU."""
    engines = config.prefill + config.decode + config.both
    return round(_GPU_SHARE / max(1, engines), 3)


def worker_specs(config: StackConfig, secrets: Mapping[str, str]) -> list[ProcessSpec]:
    """Return the specs of the worker processes. Placeholders such as `{grpc}` stand for the addresses that the first
    start binds.

    Args:
        config: configuration of the stack.
        secrets: environment variables with the pool's secrets.
    """

    is_alone = config.prefill + config.decode + config.both == 1
    environment = {**secrets, "GOMP_SPINCOUNT": _SPIN_ALONE if is_alone else _SPIN_SHARED}
    if config.tiers:  # not as flags, which other users can read: a URL may contain a password
        environment["KVFERRY_TIER"] = ",".join(url.replace(",", "%2C") for url in config.tiers)

    def worker(name: str, role: str, *more: str) -> ProcessSpec:
        fixed = ("worker", "--role", role, "--model", config.model, "--connector", config.connector)
        addresses = ("--listen", "{grpc}", "--admin", "{admin}")
        threads = ("--threads", str(compute_threads(config, role)))
        memory = ("--gpu-memory-utilization", str(gpu_memory_share(config)))
        return ProcessSpec(name, (*fixed, *addresses, *threads, *memory, *more, *config.worker_flags), environment)

    if config.connector == "memory":
        pairs = [
            worker(f"split-{i}", "split", "--decode-listen", "{decode_grpc}", "--decode-admin", "{decode_admin}")
            for i in range(config.prefill)
        ]
        return pairs + [worker(f"both-{i}", "both") for i in range(config.both)]
    counts: Mapping[str, int] = {"prefill": config.prefill, "decode": config.decode, "both": config.both}
    return [worker(f"{role}-{i}", role) for role, count in counts.items() for i in range(count)]


def gateway_spec(
    config: StackConfig, workers: Sequence[tuple[ProcessSpec, Mapping[str, object]]], secrets: Mapping[str, str]
) -> ProcessSpec:
    """Return the spec of the gateway process, with the addresses of all workers.

    Args:
        config: configuration of the stack.
        workers: spec of each worker, and its `listening` event with the bound addresses.
        secrets: environment variables with the pool's secrets.
    """
    endpoints: list[str] = []
    for spec, event in workers:
        role = spec.arguments[2]
        if role == "split":
            endpoints += ["--prefill", _endpoint(event, "grpc", "admin")]
            endpoints += ["--decode", _endpoint(event, "decode_grpc", "decode_admin")]
        else:
            endpoints += [f"--{role}", _endpoint(event, "grpc", "admin")]
    addresses = ("--http", "{http}", "--grpc", "{grpc}", "--admin", "{admin}")
    return ProcessSpec(
        "gateway", ("gateway", "--model", config.model, *endpoints, *addresses, *config.gateway_flags), secrets
    )


def _endpoint(event: Mapping[str, object], grpc: str, admin: str) -> str:
    return f"{event[grpc]}/{str(event[admin]).rpartition(':')[2]}"
