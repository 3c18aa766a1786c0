"""How many pods a role of mode Auto wants, from what its pods hold. Pure; the history is a value.

The wish is the larger of two: requests held over `requestsTarget`, and pods now times the KV use of the fullest
tenth over `kvTarget`; not the mean, since one full pod among idle ones delays its requests all the same. The
windows are those of Kubernetes' HPA: up by the lowest wish of `upSeconds`, down by the highest of `downSeconds`.
Without numbers of every ready pod nothing changes: missing data is no idle pool.

This is the reactive seam; a planner for latency targets would give another `wish` and leave the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.operator.facts import FleetReport, WorkerReport
from kvferry.operator.spec import Role, Scaling

_FRESH_SECONDS = 15.0
_TOLERANCE = 0.1
"""So much above or below its target the KV use moves nothing."""
_MAX_GROWTH = 2
"""Times as many pods in one decision, or four more where that is more."""
_MIN_STRIDE = 4


@dataclass(frozen=True, slots=True)
class History:
    """Earlier wishes of one role."""

    wishes: tuple[tuple[float, int], ...] = ()
    busy_at: float = 0.0
    """When it last held a request, or was first looked at."""
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write, and why."""

    replicas: int
    reason: str
    history: History


def decide(
    role: Role, current: int, ready: int, report: FleetReport | None, history: History | None, now: float
) -> Decision:
    """The number of pods for a role.

    Args:
        current: pods that its scaler says now.
        ready: pods that are ready.
        report: the gateway's word; `None` when there is none.
        history: of the last decision; `None` at the first one.
        now: seconds of the clock that `report.at` was read from.
    """
    scaling = role.scaling
    before = history or History(busy_at=now, began_at=now)
    if report is None or now - report.at > _FRESH_SECONDS:
        # Nor does the time towards sleep run while nobody knows what the pods hold.
        return Decision(current, "no fresh word from the gateway: unchanged", replace(before, busy_at=now))
    workers = [worker for worker in report.of_role(role.name) if worker.takes_work]
    # Also of those that take no new work: they are busy all the same.
    load = sum(worker.load + worker.exports for worker in report.of_role(role.name)) + report.held
    if load or len(workers) < ready or ready == 0:
        before = replace(before, busy_at=now)
    if len(workers) < ready or ready == 0:
        return Decision(current, f"{len(workers)} of {ready} ready pods are heard of: unchanged", before)
    wish, reason = _wish(scaling, workers, load, ready)
    after = replace(before, wishes=(*_kept(before.wishes, scaling, now), (now, wish)))
    number = _settle(scaling, after, current, now)
    if scaling.min_replicas == 0 and now - after.busy_at >= scaling.idle_seconds:
        return Decision(0, f"no request for {scaling.idle_seconds} s", after)
    number = role.bounded(max(1, number))
    return Decision(number, reason if number != current else f"{reason}: unchanged", after)


def _wish(scaling: Scaling, workers: Sequence[WorkerReport], load: int, ready: int) -> tuple[int, str]:
    by_requests = math.ceil(load / scaling.requests_target)
    use = _fullest_tenth([worker.kv_use for worker in workers])
    ratio = use / (scaling.kv_target / 100)
    by_kv = ready if abs(ratio - 1) <= _TOLERANCE else math.ceil(ready * ratio)
    if by_kv > by_requests:
        return by_kv, f"KV use {use:.0%} at the fullest tenth, target {scaling.kv_target} %"
    return by_requests, f"{load} requests held, target {scaling.requests_target} in a pod"


def _fullest_tenth(uses: Sequence[float]) -> float:
    ordered = sorted(uses)
    return ordered[min(len(ordered) - 1, math.floor(len(ordered) * 0.9))]


def _kept(wishes: tuple[tuple[float, int], ...], scaling: Scaling, now: float) -> tuple[tuple[float, int], ...]:
    longest = max(scaling.up_seconds, scaling.down_seconds)
    return tuple((at, wish) for at, wish in wishes if now - at <= longest)


def _settle(scaling: Scaling, history: History, current: int, now: float) -> int:
    """Between the lowest wish of the upper window and the highest of the lower one. A window that has not been
    watched in full yet, because the operator has just begun, holds what there is."""
    up = min(wish for at, wish in history.wishes if now - at <= scaling.up_seconds)
    down = max(wish for at, wish in history.wishes if now - at <= scaling.down_seconds)
    if up > current and now - history.began_at >= scaling.up_seconds:
        return min(up, max(current * _MAX_GROWTH, current + _MIN_STRIDE))
    if down < current and now - history.began_at >= scaling.down_seconds:
        return down
    return current
