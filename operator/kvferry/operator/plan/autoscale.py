"""Autoscaler of mode Auto: computes the desired number of replicas of a role from the load of its pods. Pure.

The recommendation is the largest of these numbers:

    requests      those at the pods, and those that wait in the gateways for this role, divided by `targetRequests`
    KV            ready pods times the ratio of KV use to `targetKvUsage`
    prompts       for roles that compute prompts: tokens that are not computed yet divided by `_PROMPT_TOKENS`
    queue         one more than the ready pods, while requests wait in the gateways for this role

The gateway dispatches no more than pods can begin soon, so requests at the pods say little about a saturated role: with
long prompts they are few. KV use is the 90th percentile over pods, not the mean, because a full pod delays its requests
even if other pods are idle. Stabilization works as in Kubernetes' HorizontalPodAutoscaler: scale up to the
lowest recommendation in the window of `scaleUp`, down to the highest in the window of `scaleDown`. The number changes
only if metrics of every ready pod are available. A predictive autoscaler would replace only the recommendation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.operator.pool.facts import FleetReport, GatewayQueue, WorkerReport
from kvferry.operator.pool.spec import RoleSpec, ScalingSpec

_FRESH_SECONDS = 15.0
_TOLERANCE = 0.1
"""Relative deviation of the KV use from its target that is tolerated."""
_MAX_GROWTH = 2
"""Maximum factor by which one decision increases the number of pods; four additional pods are always allowed."""
_MIN_STRIDE = 4
_PROMPT_TOKENS = 8192
"""Prompt tokens per pod that are not computed yet: half of what a gateway dispatches to a worker
(`PREFILL_TOKENS_PER_WORKER` in kvferry.gateway.decide.flow.capacity), so that a role grows before requests wait."""
_PREFILL, _BOTH = "prefill", "both"


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Earlier recommendations for a role, with their times."""

    recommendations: tuple[tuple[float, int], ...] = ()
    busy_at: float = 0.0
    """Time when the role last held a request, or was first observed."""
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Number of replicas to write, and the reason."""

    replicas: int
    reason: str
    history: Recommendations


def decide(
    role: RoleSpec,
    current: int,
    ready: int,
    report: FleetReport | None,
    history: Recommendations | None,
    now: float,
    *,
    num_gateways: int = 1,
) -> ScalingDecision:
    """Decide the number of replicas of a role.

    Args:
        role: the role, with its scaling settings.
        current: `spec.replicas` of the role's scaler.
        ready: number of ready pods.
        report: the gateway's report, if available.
        history: result of the last decision; `None` for the first decision.
        now: time in seconds, of the same clock as `report.at`.
        num_gateways: number of gateways; the report is of one of them, and their queues are about equal.
    """
    scaling = role.scaling
    before = history or Recommendations(busy_at=now, began_at=now)
    if report is None or now - report.at > _FRESH_SECONDS:
        # While its load is unknown, a role does not count as idle.
        return ScalingDecision(current, "no current report from the gateway: unchanged", replace(before, busy_at=now))
    workers = [worker for worker in report.of_role(role.name) if worker.takes_work]
    # Pods that accept no new requests are included, since they still run requests.
    load = sum(worker.num_requests + worker.load.num_tickets for worker in report.of_role(role.name)) + report.held
    work = _work(role.name, load, report.queue, max(1, num_gateways))
    load += work.queued
    if load or len(workers) < ready or ready == 0:
        before = replace(before, busy_at=now)
    if len(workers) < ready or ready == 0:
        return ScalingDecision(current, f"{len(workers)} of {ready} ready pods have reported: unchanged", before)
    recommended, reason = _recommend(scaling, workers, work, ready)
    after = replace(before, recommendations=(*_kept(before.recommendations, scaling, now), (now, recommended)))
    number = _settle(scaling, after, current, now)
    if scaling.min_replicas == 0 and now - after.busy_at >= scaling.scale_to_zero.idle_seconds:
        return ScalingDecision(0, f"no requests for {scaling.scale_to_zero.idle_seconds} s", after)
    number = role.bounded(max(1, number))
    return ScalingDecision(number, reason if number != current else f"{reason}: unchanged", after)


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of a role, at its pods and in the gateways' queues."""

    requests: int
    """Requests at the pods."""
    queued: int
    """Requests that wait in the gateways for this role."""
    prompt_tokens: int
    """Prompt tokens of the role that are not computed yet."""


def _work(role: str, requests: int, queue: GatewayQueue, num_gateways: int) -> _Work:
    """Return the work of a role. Requests that wait for another role, or for their tenant's share, are not counted."""
    computes = role in (_PREFILL, _BOTH)
    is_waited_for = (computes and queue.waits_for_prefill) or (role != _PREFILL and queue.waits_for_sequences)
    queued = queue.requests * num_gateways if is_waited_for else 0
    tokens = queue.dispatched_prompt_tokens + (queue.prompt_tokens if is_waited_for else 0)
    return _Work(requests, queued, tokens * num_gateways if computes else 0)


def _recommend(scaling: ScalingSpec, workers: Sequence[WorkerReport], work: _Work, ready: int) -> tuple[int, str]:
    use = _percentile_90([worker.load.kv_usage for worker in workers])
    ratio = use / scaling.target_kv_usage
    by_kv = ready if abs(ratio - 1) <= _TOLERANCE else math.ceil(ready * ratio)
    requests, waiting = work.requests + work.queued, f", {work.queued} of them waiting" if work.queued else ""
    recommendations = (
        (math.ceil(requests / scaling.target_requests),
         f"{requests} requests{waiting}, target {scaling.target_requests} per pod"),
        (by_kv, f"KV use {use:.0%} at the 90th percentile of pods, target {scaling.target_kv_usage:.0%}"),
        (min(math.ceil(work.prompt_tokens / _PROMPT_TOKENS), requests),
         f"{work.prompt_tokens} prompt tokens to compute, target {_PROMPT_TOKENS} per pod"),
        (ready + 1 if work.queued else 0, f"{work.queued} requests wait in the gateways for this role"),
    )  # fmt: skip
    return max(recommendations, key=lambda one: one[0])


def _percentile_90(uses: Sequence[float]) -> float:
    ordered = sorted(uses)
    return ordered[min(len(ordered) - 1, math.floor(len(ordered) * 0.9))]


def _kept(entries: tuple[tuple[float, int], ...], scaling: ScalingSpec, now: float) -> tuple[tuple[float, int], ...]:
    longest = max(scaling.scale_up.stabilization_window_seconds, scaling.scale_down.stabilization_window_seconds)
    return tuple((at, recommended) for at, recommended in entries if now - at <= longest)


def _settle(scaling: ScalingSpec, history: Recommendations, current: int, now: float) -> int:
    """Stabilize the number of replicas with the recommendations in both windows. While the history does not cover a
    window, because the operator has just started, that window does not change the number."""
    windows = scaling.scale_up.stabilization_window_seconds, scaling.scale_down.stabilization_window_seconds
    up = min(recommended for at, recommended in history.recommendations if now - at <= windows[0])
    down = max(recommended for at, recommended in history.recommendations if now - at <= windows[1])
    if up > current and now - history.began_at >= windows[0]:
        return min(up, max(current * _MAX_GROWTH, current + _MIN_STRIDE))
    if down < current and now - history.began_at >= windows[1]:
        return down
    return current
