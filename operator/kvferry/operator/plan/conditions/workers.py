"""The condition of adapters, and the devices in a pool's status, from the workers' reports. Pure."""

from collections.abc import Sequence

from kvferry.operator.plan.conditions.condition_state import ConditionState
from kvferry.operator.pool.facts import FleetReport, WorkerReport
from kvferry.operator.pool.spec import AdapterSpec, Json

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


def adapters_condition(adapters: Sequence[AdapterSpec], report: FleetReport | None) -> ConditionState | None:
    """Return whether the workers that accept requests have loaded the pool's adapters; `None` for a pool without
    any."""
    if not adapters:
        return None
    if report is None:
        return "Unknown", "GatewayReportMissing", "the gateway has not reported its workers yet"
    serving = [worker for worker in report.workers if worker.takes_work]
    if not serving:
        return "Unknown", "NoWorkerServes", "no workers accept requests"
    failures = [
        f"{worker.name}: {one.name}: {worker.adapter_failures[one.name]}"
        for one in adapters
        for worker in serving
        if one.name in worker.adapter_failures
    ]
    if failures:
        more = f" (and {len(failures) - _MAX_NAMED} more)" if len(failures) > _MAX_NAMED else ""
        return "False", "LoadFailed", "; ".join(failures[:_MAX_NAMED]) + more
    missing = [f"{worker.name}: {one.name}" for one in adapters for worker in serving if not _has(worker, one)]
    if missing:
        return (
            "False",
            "Loading",
            f"{len(missing)} adapters are not loaded yet, such as {missing[0]}; pods see a change within two minutes",
        )
    return "True", "Loaded", f"{len(serving)} workers serve {len(adapters)} adapters"


def _has(worker: WorkerReport, adapter: AdapterSpec) -> bool:
    return any(name == adapter.name and digest.startswith(adapter.digest) for name, digest in worker.adapters)
