"""What is reported about a pool's devices, adapters and certificates, for its status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvferry.operator.pool.facts import FleetReport, WorkerReport
from kvferry.operator.pool.spec import Adapter, Json

Verdict = tuple[str, str, str]
"""Status, reason and message of a condition."""

_EXPIRING_SECONDS = 7 * 86_400.0
_MAX_DEVICE_CHARS = 256
_MAX_NAMED = 3


def devices_of(fleet: FleetReport | None, role: str) -> Json:
    """Return the devices of a role's workers and how their KV is transferred; empty if it is not known."""
    workers = [worker for worker in (fleet.workers if fleet else ()) if worker.role == role and worker.device]
    if not workers:
        return {}
    devices = sorted({worker.device for worker in workers})
    transfers = "Staged" if any(worker.is_staged for worker in workers) else "Direct"
    return {"device": ", ".join(devices)[:_MAX_DEVICE_CHARS], "transfers": transfers}


def adapters_verdict(wanted: Sequence[Adapter], report: FleetReport | None) -> Verdict | None:
    """Judge whether the workers that accept requests have loaded the pool's adapters; `None` for a pool without any."""
    if not wanted:
        return None
    if report is None:
        return "Unknown", "GatewayReportMissing", "the gateway has not reported its workers yet"
    serving = [worker for worker in report.workers if worker.takes_work]
    if not serving:
        return "Unknown", "NoWorkerServes", "no worker accepts requests"
    failures = [
        f"{worker.name}: {one.name}: {worker.adapter_failures[one.name]}"
        for one in wanted
        for worker in serving
        if one.name in worker.adapter_failures
    ]
    if failures:
        more = f" (and {len(failures) - _MAX_NAMED} more)" if len(failures) > _MAX_NAMED else ""
        return "False", "LoadFailed", "; ".join(failures[:_MAX_NAMED]) + more
    missing = [f"{worker.name}: {one.name}" for one in wanted for worker in serving if not _has(worker, one)]
    if missing:
        return (
            "False",
            "Loading",
            f"{len(missing)} adapters are not loaded yet, such as {missing[0]}; pods see a change within two minutes",
        )
    return "True", "Loaded", f"{len(serving)} workers serve {len(wanted)} adapters"


def _has(worker: WorkerReport, wanted: Adapter) -> bool:
    return any(name == wanted.name and digest.startswith(wanted.digest) for name, digest in worker.adapters)


@dataclass(frozen=True, slots=True)
class TlsSeen:
    """What is known of a pool's certificates. Times are wall-clock seconds."""

    mode: str
    """`Managed` or `Secret`."""
    not_after: float
    """End of the validity of the certificates; 0 if it is not known yet."""
    now: float
    num_cas: int = 1
    """Number of CAs that pods trust; more than one during a renewal."""

    def status(self) -> Json:
        """Return the pool's `status.tls`."""
        return {"mode": self.mode, **({"notAfter": _date(self.not_after)} if self.not_after else {})}


def certificates_verdict(tls: TlsSeen | None) -> Verdict | None:
    """Judge whether the pool's certificates are valid for a while; `None` without TLS."""
    if tls is None:
        return None
    if not tls.not_after:
        return "Unknown", "NotReportedYet", "the gateway has not reported its certificate yet"
    left = tls.not_after - tls.now
    if left > _EXPIRING_SECONDS:
        renewal = "; a renewal is in progress" if tls.num_cas > 1 else ""
        return (
            "True",
            "Valid",
            f"calls between pods use TLS; certificates are valid until {_date(tls.not_after)}{renewal}",
        )
    remedy = (
        "the operator renews them 30 days before: see its log"
        if tls.mode == "Managed"
        else "write renewed ones into the Secret spec.tls.secretName; pods read them without a restart"
    )
    if left <= 0:
        return "False", "Expired", f"certificates expired on {_date(tls.not_after)}, and new connections fail; {remedy}"
    return "False", "Expiring", f"certificates expire on {_date(tls.not_after)}; {remedy}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
