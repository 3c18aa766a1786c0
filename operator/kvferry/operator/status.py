"""A pool's status from what was observed: conditions that name the remedy. Pure.

Each condition is one function of `Observed`. A transition time moves only when the status flips; every condition
carries the generation that it speaks of; what is not known yet is `Unknown`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.operator.facts import FleetReport
from kvferry.operator.names import Condition
from kvferry.operator.rollout import PAIRED, RoleState
from kvferry.operator.spec import Json, Pool

_MIN_HANDOFFS = 20
"""Fewer hand-offs than this say nothing about the transport."""
_MAX_RECOMPUTED = 0.2


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was refused or is in the way."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a status is made from."""

    pool: Pool
    revision: str
    roles: Sequence[RoleState]
    waiting_for: str
    """Of the rollout of roles and gateway; empty: done."""
    gateway_desired: int
    gateway_ready: int
    report: FleetReport | None
    handoffs: Mapping[str, int] = field(default_factory=dict)
    """By outcome, of the last minutes."""
    stuck: str = ""
    """No progress within the deadline, and what is in the way."""
    contested: Problem | None = None
    refused: Problem | None = None
    """A child that could not be applied."""
    rollback: Problem | None = None
    extension: Problem | None = None
    """About the InferencePool of the inference extension; reason `Emitted` when all is well, `None` when unwanted."""


Told = tuple[str, str, str]
"""status, reason, message"""


def status_of(seen: Observed, before: Mapping[str, Any], now: str) -> Json:
    """The status to apply.

    Args:
        before: the status as it stands, for the times of transitions and for what others wrote there.
        now: RFC 3339.
    """
    pool = seen.pool
    told: dict[Condition, Told] = {}
    for condition, judge in _JUDGES.items():
        verdict = judge(seen)
        if verdict is not None:
            told[condition] = verdict
    told[Condition.READY] = _ready(seen, told)
    earlier = {entry["type"]: entry for entry in before.get("conditions") or ()}
    conditions = []
    for condition in Condition:
        if condition not in told:
            continue
        status, reason, message = told[condition]
        was = earlier.get(condition.value)
        conditions.append(
            {
                "type": condition.value,
                "status": status,
                "reason": reason,
                "message": message[:32768],
                "lastTransitionTime": was["lastTransitionTime"] if was and was["status"] == status else now,
                "observedGeneration": pool.generation,
            }
        )
    return {
        "observedGeneration": pool.generation,
        "revision": seen.revision,
        "url": f"{'https' if pool.spec.gateway.tls_secret else 'http'}://{pool.name}.{pool.namespace}.svc:{pool.spec.gateway.service.http_port}/v1",
        "roles": [_role(seen, role) for role in seen.roles if pool.spec.role(role.name) is not None],
        "gateway": {"desired": seen.gateway_desired, "ready": seen.gateway_ready},
        "conditions": conditions,
    }


def first_status(pool: Pool, now: str) -> Json:
    """Of a pool that has just been seen for the first time."""
    return {
        "conditions": [
            {
                "type": condition.value,
                "status": "Unknown",
                "reason": "Observing",
                "message": "the operator has just seen this pool",
                "lastTransitionTime": now,
                "observedGeneration": pool.generation,
            }
            for condition in (Condition.READY, Condition.PROGRESSING)
        ]
    }


def unreadable_status(generation: int, message: str, before: Mapping[str, Any], now: str) -> Json:
    """Of a pool whose spec the operator cannot read; its pods stay as they are."""
    was = next((c for c in before.get("conditions") or () if c["type"] == Condition.READY), None)
    return {
        "observedGeneration": generation,
        "conditions": [
            {
                "type": Condition.READY.value,
                "status": "False",
                "reason": "SpecNotUnderstood",
                "message": f"{message}; pods are left as they are. Is the operator as new as the definition?",
                "lastTransitionTime": was["lastTransitionTime"] if was and was["status"] == "False" else now,
                "observedGeneration": generation,
            }
        ],
    }


def _role(seen: Observed, role: RoleState) -> Json:
    return {
        "name": role.name,
        "summary": f"{role.ready}/{role.wanted}",
        "desired": role.wanted,
        "ready": role.ready,
        "updated": role.of(seen.revision).ready,
        "revisions": [
            {"revision": revision, "desired": count.desired, "ready": count.ready}
            for revision, count in sorted(role.revisions.items())
            if count.desired or count.ready
        ],
    }


# -- one function for each condition ---------------------------------------------------------------------------------


def _asleep(seen: Observed) -> bool:
    wanted = [role for role in seen.roles if seen.pool.spec.role(role.name) is not None]
    return not any(role.wanted for role in wanted)


def _ready(seen: Observed, told: Mapping[Condition, Told]) -> Told:
    needed = (
        Condition.CHILDREN_APPLIED,
        Condition.GATEWAY_READY,
        Condition.ROLES_READY,
        Condition.MODEL_AVAILABLE,
        Condition.PAIRING_COMPATIBLE,
    )
    for condition in needed:
        status, reason, message = told[condition]
        if status == "False":
            return "False", reason, message
    unknown = [c for c in needed if told[c][0] == "Unknown" and not _asleep(seen)]
    if unknown:
        return "Unknown", told[unknown[0]][1], told[unknown[0]][2]
    if _asleep(seen):
        return "True", "Asleep", "no role has pods; a request wakes those that may sleep"
    return "True", "Serving", "requests are served by the pods that the spec asks for"


def _progressing(seen: Observed) -> Told:
    if seen.rollback is not None:
        return "False", seen.rollback.reason, seen.rollback.message
    if not seen.waiting_for:
        return "False", "Complete", f"revision {seen.revision} runs everywhere"
    if seen.pool.spec.rollout.paused:
        return "False", "Paused", f"{seen.waiting_for}; set spec.rollout.paused to false to go on"
    if seen.stuck:
        return "False", "DeadlineExceeded", seen.stuck
    return "True", "RollingOut", seen.waiting_for


def _gateway(seen: Observed) -> Told:
    if seen.gateway_desired == 0:
        return "False", "NoGateway", "spec.gateway.replicas is 0, so that nobody takes requests"
    if seen.gateway_ready < 1:
        return "False", "NoGatewayPodReady", f"0 of {seen.gateway_desired} gateway pods are ready"
    return "True", "GatewayPodsReady", f"{seen.gateway_ready} of {seen.gateway_desired} gateway pods are ready"


def _roles(seen: Observed) -> Told:
    if seen.rollback is not None:
        return "False", seen.rollback.reason, seen.rollback.message
    if not seen.waiting_for:
        return "True", "AllReady", "; ".join(f"{role.name}: {role.ready}/{role.wanted}" for role in seen.roles)
    if seen.stuck:
        return "False", "DeadlineExceeded", seen.stuck
    return "False", "Paused" if seen.pool.spec.rollout.paused else "NotAllReady", seen.waiting_for


def _model(seen: Observed) -> Told:
    if seen.report is None:
        return "Unknown", "NoGatewayWord", "the gateway has not told yet what its workers serve"
    serving = [worker for worker in seen.report.workers if worker.takes_work]
    if not serving:
        why = "; ".join(f"{w.name}: {w.why_not}" for w in seen.report.workers[:3])
        asleep = "Asleep" if _asleep(seen) else "NoWorkerServes"
        return "Unknown", asleep, f"no worker serves now{': ' if why else ''}{why}"
    expected = seen.pool.spec.model.digest
    wrong = sorted(w.name for w in serving if expected and w.model_digest and not w.model_digest.startswith(expected))
    if wrong:
        found = next(w.model_digest for w in serving if w.name == wrong[0])
        return (
            "False",
            "DigestMismatch",
            (
                f"{', '.join(wrong[:3])} serve a model with digest {found}, spec.model.digest is {expected}; "
                "correct the digest, or the files in the cache"
            ),
        )
    return "True", "Serving", f"{len(serving)} workers serve {seen.pool.spec.model.name}"


def _pairing(seen: Observed) -> Told:
    names = {role.name for role in seen.roles if role.wanted}
    if not names & PAIRED:
        return "True", "NotNeeded", "no request needs a pair of pods"
    if seen.report is None:
        return "Unknown", "NoGatewayWord", "the gateway has not told yet what its workers are"
    prefill = [w for w in seen.report.of_role("prefill") if w.takes_work]
    decode = [w for w in seen.report.of_role("decode") if w.takes_work]
    if not prefill or not decode:
        return "Unknown", "NoPairYet", f"{len(prefill)} prefill and {len(decode)} decode pods take work now"
    shared = {w.fingerprint for w in prefill} & {w.fingerprint for w in decode}
    if shared:
        return "True", "EqualLayouts", f"{len(shared)} KV layouts are shared by prefill and decode pods"
    families = {w.family for w in prefill if w.family} & {w.family for w in decode if w.family}
    if families:
        return (
            "True",
            "Converted",
            (
                "no prefill pod has a decode pod's KV layout; blocks are converted on the way, which costs time. "
                "Name spec.model.dtype instead of auto"
            ),
        )
    return (
        "False",
        "NoCommonLayout",
        (
            "no decode pod can use any prefill pod's KV: other model files, connector or domain. "
            "Compare spec.model.source and the images of both roles"
        ),
    )


def _transport(seen: Observed) -> Told:
    total = sum(seen.handoffs.values())
    if total < _MIN_HANDOFFS:
        return "Unknown", "FewHandoffs", f"{total} hand-offs lately, too few to judge"
    lost = seen.handoffs.get("failed", 0)
    told = f"{lost} of the last {total} hand-offs failed and were computed anew"
    if lost / total > _MAX_RECOMPUTED:
        return (
            "True",
            "HandoffsFail",
            (
                f"{told}: peers die or the link is slow. `kvferry explain REQUEST_ID` gives a request's reason; "
                "spec.connector.type tcp rules out the fabric"
            ),
        )
    return "False", "HandoffsFetched", told


def _contested(seen: Observed) -> Told:
    if seen.contested is None:
        return "False", "OneWriter", "nobody else writes the numbers of replicas that this operator writes"
    return "True", seen.contested.reason, seen.contested.message


def _children(seen: Observed) -> Told:
    if seen.refused is None:
        return "True", "Applied", "all objects of this pool are as it wants them"
    return "False", seen.refused.reason, seen.refused.message


def _extension(seen: Observed) -> Told | None:
    if seen.extension is None:
        return None
    well = seen.extension.reason == "Emitted"
    return "True" if well else "False", seen.extension.reason, seen.extension.message


_JUDGES: Mapping[Condition, Callable[[Observed], Told | None]] = {
    Condition.PROGRESSING: _progressing,
    Condition.GATEWAY_READY: _gateway,
    Condition.ROLES_READY: _roles,
    Condition.MODEL_AVAILABLE: _model,
    Condition.PAIRING_COMPATIBLE: _pairing,
    Condition.TRANSPORT_DEGRADED: _transport,
    Condition.REPLICAS_CONTESTED: _contested,
    Condition.CHILDREN_APPLIED: _children,
    Condition.GATEWAY_INTEGRATION: _extension,
}
