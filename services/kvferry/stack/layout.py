"""Which processes a stack on one machine has: a pure plan from its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.stack.supervisor import ProcessSpec

MAX_WORKERS = 64

# How long a compute thread spins for the next piece of work before it sleeps (libgomp's unit). Measured on two
# cores, docs/performance.md: alone, a longer spin makes decode half as fast again; beside another worker it makes
# both of them three times slower.
_SPIN_ALONE = "3000"
_SPIN_SHARED = "100"


@dataclass(frozen=True, slots=True)
class StackConfig:
    """A whole stack on this machine."""

    model: str
    prefill: int = 1
    decode: int = 1
    both: int = 0
    connector: str = "shm"
    http: str = "127.0.0.1:8000"
    grpc: str = "127.0.0.1:9000"
    cores: int = 1
    """Cores that all workers share."""
    threads: int = 0
    """Compute threads of each worker; 0: chosen by role, see `compute_threads`."""
    tiers: tuple[str, ...] = ()
    """URLs of the workers' tiers, nearest first."""
    worker_flags: Sequence[str] = ()
    """Passed on to every worker: `--dtype`, `--kv-memory`, ..."""
    gateway_flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            UsageError: no request could be served, or too many workers are asked for.
        """
        for name in ("prefill", "decode", "both"):
            if not 0 <= getattr(self, name) <= MAX_WORKERS:
                raise UsageError(f"--{name} must be from 0 to {MAX_WORKERS}, not {getattr(self, name)}", field=name)
        if not self.both and not (self.prefill and self.decode):
            raise UsageError(
                "nobody could serve a request: start at least one prefill and one decode worker, or one of role both",
                field="prefill",
            )
        if self.connector == "memory" and self.prefill != self.decode:
            raise UsageError(
                "connector 'memory' pairs prefill and decode within one process: give as many of one as of the other",
                field="connector",
            )


def compute_threads(config: StackConfig, role: str) -> int:
    """Threads for one worker so that the workers of one machine do not starve each other.

    Prefill comes in bursts and uses whatever is free; a stream's steps are short and many, and a second thread
    that waits for its turn delays each of them, so decode keeps to its share.
    """
    if config.threads:
        return config.threads
    if role in {"prefill", "split"}:
        return config.cores
    return max(1, config.cores // (config.prefill + config.decode + config.both))


def worker_specs(config: StackConfig, secrets: Mapping[str, str]) -> list[ProcessSpec]:
    """The workers. `{grpc}` and the like stand for the addresses that the first start will bind."""

    is_alone = config.prefill + config.decode + config.both == 1
    environment = {**secrets, "GOMP_SPINCOUNT": _SPIN_ALONE if is_alone else _SPIN_SHARED}
    if config.tiers:  # not as flags, which other users can read: a URL may hold a password
        environment["KVFERRY_TIER"] = ",".join(url.replace(",", "%2C") for url in config.tiers)

    def worker(name: str, role: str, *more: str) -> ProcessSpec:
        fixed = ("worker", "--role", role, "--model", config.model, "--connector", config.connector)
        addresses = ("--listen", "{grpc}", "--admin", "{admin}")
        threads = ("--threads", str(compute_threads(config, role)))
        return ProcessSpec(name, (*fixed, *addresses, *threads, *more, *config.worker_flags), environment)

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
    """The gateway, told where each worker listens."""
    endpoints: list[str] = []
    for spec, event in workers:
        role = spec.arguments[2]
        if role == "split":
            endpoints += ["--prefill", _endpoint(event, "grpc", "admin")]
            endpoints += ["--decode", _endpoint(event, "decode_grpc", "decode_admin")]
        else:
            endpoints += [f"--{role}", _endpoint(event, "grpc", "admin")]
    addresses = ("--http", "{http}", "--grpc", "{grpc}")
    return ProcessSpec(
        "gateway", ("gateway", "--model", config.model, *endpoints, *addresses, *config.gateway_flags), secrets
    )


def _endpoint(event: Mapping[str, object], grpc: str, admin: str) -> str:
    return f"{event[grpc]}/{str(event[admin]).rpartition(':')[2]}"
