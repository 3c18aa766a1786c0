"""A pool's status, computed from observations: conditions with messages that include a remedy. Pure.

Each condition is computed by one function of `Observed`. Its transition time changes only with its status, it has the
observed generation, and it is `Unknown` if it cannot be determined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.handoffs import LOST, TRIED, HandoffOutcome
from kvferry.operator.objects.pods import keys_secret_of
from kvferry.operator.plan.actions import Problem
from kvferry.operator.plan.conditions.certificates import TlsSeen, certificates_condition
from kvferry.operator.plan.conditions.condition_state import ConditionState
from kvferry.operator.plan.conditions.workers import adapters_condition, devices_of
from kvferry.operator.plan.rollout import PAIRED, RoleState
from kvferry.operator.pool.facts import FleetReport, WorkerReport
from kvferry.operator.pool.names import Condition
from kvferry.operator.pool.spec import InferencePool, Json

_MIN_HANDOFFS = 20
"""Minimum number of recent hand-offs for evaluating the transport."""
_MAX_RECOMPUTED = 0.2
_MIN_UNKNOWN_KEYS, _MAX_UNKNOWN_KEYS = 3, 0.05
"""Number and share of recent hand-offs with an unknown ticket key above which the pods' keys are reported to differ."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations from which a pool's status is computed."""

    pool: InferencePool
    revision: str
    roles: Sequence[RoleState]
    waiting_for: str
    """Reason why the rollout of roles and gateway is not complete; empty if it is complete."""
    gateway_desired: int
    gateway_ready: int
    report: FleetReport | None
    """Latest report of the gateway; `None` if there is none, or if one from after the rollout is overdue."""
    is_report_old: bool = False
    """Whether `report` is from before the end of the rollout."""
    handoffs: Mapping[str, int] = field(default_factory=dict)
    """Numbers of recent hand-offs, by outcome."""
    stuck: str = ""
    """Reason why the rollout exceeded its progress deadline; empty if it did not."""
    contested: Problem | None = None
    refused: Problem | None = None
    """Rejected writes of the pass, if any."""
    rollback: Problem | None = None
    extension: Problem | None = None
    """State of the inference extension's InferencePool: reason `Emitted` if it was applied, `None` if it is
    disabled."""
    keys: str = ""
    """Identifier of the generated keys; empty for the first keys."""
    fleet: FleetReport | None = None
    """Latest report of the gateway, even if it is older than the end of the rollout."""
    is_answering: bool = False
    """Whether a gateway answered recently, although its Deployment is not known."""
    tls: TlsSeen | None = None
    diagnosis: str = ""
    """Reasons why pods are not ready; empty if unknown."""


def status_of(seen: Observed, before: Mapping[str, Any], now: str) -> Json:
    """Build the status to apply.

    Args:
        seen: the observations.
        before: the stored status, for transition times.
        now: wall-clock time, RFC 3339.
    """
    pool = seen.pool
    states: dict[Condition, ConditionState] = {}
    for condition, state_of in _STATES.items():
        state = state_of(seen)
        if state is not None:
            states[condition] = state
    states[Condition.READY] = _ready(seen, states)
    earlier = {entry["type"]: entry for entry in before.get("conditions") or ()}
    conditions = []
    for condition in Condition:
        if condition not in states:
            continue
        status, reason, message = states[condition]
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
        **({"keys": seen.keys} if seen.keys else {}),
        **({"tls": seen.tls.status()} if seen.tls else {}),
        "url": f"{'https' if pool.spec.gateway.tls_secret else 'http'}://{pool.name}.{pool.namespace}.svc:{pool.spec.gateway.service.http_port}/v1",
        "roles": [_role(seen, role) for role in seen.roles if pool.spec.role(role.name) is not None],
        "gateway": {"desired": seen.gateway_desired, "ready": min(seen.gateway_ready, seen.gateway_desired)},
        "conditions": conditions,
    }


def first_status(pool: InferencePool, now: str) -> Json:
    """Build the status of a new pool."""
    return {
        "conditions": [
            {
                "type": condition.value,
                "status": "Unknown",
                "reason": "Observing",
                "message": "the operator has not reconciled this pool yet",
                "lastTransitionTime": now,
                "observedGeneration": pool.generation,
            }
            for condition in (Condition.READY, Condition.PROGRESSING)
        ]
    }


def unreadable_status(body: Mapping[str, Any], message: str, now: str) -> Json:
    """Build the status of a pool whose spec cannot be parsed; its pods are not changed."""
    generation, before = int(body["metadata"]["generation"]), body.get("status") or {}
    was = next((c for c in before.get("conditions") or () if c["type"] == Condition.READY), None)
    return {
        "observedGeneration": generation,
        **({"keys": before["keys"]} if before.get("keys") else {}),
        "conditions": [
            {
                "type": Condition.READY.value,
                "status": "False",
                "reason": "InvalidSpec",
                "message": f"{message}; pods are not changed. Check that the operator is as new as its definitions",
                "lastTransitionTime": was["lastTransitionTime"] if was and was["status"] == "False" else now,
                "observedGeneration": generation,
            }
        ],
    }


def _role(seen: Observed, role: RoleState) -> Json:
    return {
        "name": role.name,
        "summary": f"{min(role.ready, role.replicas)}/{role.replicas}",
        "desired": role.replicas,
        "ready": role.ready,
        "updated": role.of(seen.revision).ready,
        **devices_of(seen.fleet, role.name),
        "revisions": [
            {"revision": revision, "desired": count.desired, "ready": count.ready}
            for revision, count in sorted(role.revisions.items())
            if count.desired or count.ready
        ],
    }


# -- one function for each condition ---------------------------------------------------------------------------------


def _is_scaled_to_zero(seen: Observed) -> bool:
    kept = [role for role in seen.roles if seen.pool.spec.role(role.name) is not None]
    return not any(role.replicas for role in kept)


def _ready(seen: Observed, states: Mapping[Condition, ConditionState]) -> ConditionState:
    needed = (
        Condition.CHILDREN_APPLIED,
        Condition.GATEWAY_READY,
        Condition.ROLES_READY,
        Condition.MODEL_AVAILABLE,
        Condition.PAIRING_COMPATIBLE,
        *(() if _is_scaled_to_zero(seen) else (Condition.AVAILABLE,)),
    )
    for condition in needed:
        status, reason, message = states[condition]
        if status == "False":
            return "False", reason, message
    if seen.is_report_old:
        return "False", "NotAllReady", "the pods are ready; waiting for the gateway's report about them"
    unknown = [c for c in needed if states[c][0] == "Unknown" and not _is_scaled_to_zero(seen)]
    if unknown:
        return "Unknown", states[unknown[0]][1], states[unknown[0]][2]
    if _is_scaled_to_zero(seen):
        return "True", "ScaledToZero", "all roles are scaled to zero; a request scales up roles with minReplicas 0"
    return "True", "Serving", "the desired pods serve requests"


def _progressing(seen: Observed) -> ConditionState:
    if seen.rollback is not None:
        return "False", seen.rollback.reason, seen.rollback.message
    if not seen.waiting_for:
        return "False", "Complete", f"all pods run revision {seen.revision}"
    if seen.pool.spec.rollout.paused:
        return "False", "Paused", f"{seen.waiting_for}; set spec.rollout.paused to false to continue"
    if seen.stuck:
        return "False", "DeadlineExceeded", seen.stuck
    return "True", "RollingOut", seen.waiting_for


def _available(seen: Observed) -> ConditionState:
    gateway = _gateway(seen)
    if seen.gateway_desired == 0 or (gateway[0] == "False" and not seen.is_answering):
        return gateway
    workers = () if seen.fleet is None else seen.fleet.workers
    serving = {worker.role for worker in workers if worker.takes_work}
    if "both" in serving or serving >= PAIRED:
        return "True", "Serving", f"{sum(worker.takes_work for worker in workers)} workers accept requests"
    roles = [(role, seen.pool.spec.role(role.name)) for role in seen.roles]
    empty = [spec for role, spec in roles if spec is not None and not role.replicas]
    if any(role.name == "both" and role.replicas for role in seen.roles):
        empty = []  # A pool with pods of this role needs no others.
    stopped = [role.name for role in empty if role.scaling.mode == "Static"]
    if stopped:
        return (
            "False",
            "RoleWithoutPods",
            (
                f"role {' and role '.join(stopped)} has replicas 0, so requests are not served: set roles[].replicas "
                "to at least 1, or use scaling.mode Auto or External with minReplicas 0, which requests scale up"
            ),
        )
    if empty:
        return "True", "ScaledToZero", "a request is held until a pod of each role is ready"
    if seen.fleet is None:
        return "Unknown", "GatewayReportMissing", "the gateway has not reported its workers yet"
    missing = [role.name for role in seen.roles if role.replicas and role.name not in serving]
    those = f" of role {' and of role '.join(missing)}" if missing else ""
    return "False", "NoWorkerServes", f"no workers{those} accept requests{_why_not(workers)}{_because(seen)}"


def _why_not(workers: Sequence[WorkerReport]) -> str:
    """Name the workers that accept no requests, with their reasons; empty if no reason is known."""
    reasons = [f"{worker.name}: {worker.why_not}" for worker in workers if not worker.takes_work and worker.why_not]
    return f": {'; '.join(reasons[:3])}" if reasons else ""


def _because(seen: Observed) -> str:
    return f" ({seen.diagnosis})" if seen.diagnosis else ""


def _gateway(seen: Observed) -> ConditionState:
    if seen.gateway_desired == 0:
        return "False", "NoGateway", "spec.gateway.replicas is 0, so requests are not served"
    if seen.gateway_ready < 1:
        return "False", "NoGatewayPodReady", f"0 of {seen.gateway_desired} gateway pods are ready{_because(seen)}"
    ready = min(seen.gateway_ready, seen.gateway_desired)  # During a rollout, there may be more.
    return "True", "GatewayPodsReady", f"{ready} of {seen.gateway_desired} gateway pods are ready"


def _roles(seen: Observed) -> ConditionState:
    if seen.rollback is not None:
        return "False", seen.rollback.reason, seen.rollback.message
    if not seen.waiting_for:
        return "True", "AllReady", "; ".join(f"{role.name}: {role.ready}/{role.replicas}" for role in seen.roles)
    if seen.stuck:
        return "False", "DeadlineExceeded", seen.stuck
    return "False", "Paused" if seen.pool.spec.rollout.paused else "NotAllReady", seen.waiting_for


def _model(seen: Observed) -> ConditionState:
    if seen.report is None:
        return "Unknown", "GatewayReportMissing", "the gateway has not reported its workers yet"
    serving = [worker for worker in seen.report.workers if worker.takes_work]
    if not serving:
        reason = "ScaledToZero" if _is_scaled_to_zero(seen) else "NoWorkerServes"
        return "Unknown", reason, f"no workers accept requests{_why_not(seen.report.workers)}"
    expected = seen.pool.spec.model.digest
    wrong = sorted(w.name for w in serving if expected and w.model_digest and not w.model_digest.startswith(expected))
    if wrong:
        found = next(w.model_digest for w in serving if w.name == wrong[0])
        return (
            "False",
            "DigestMismatch",
            (
                f"{', '.join(wrong[:3])} serve a model with digest {found}, but spec.model.digest is {expected}; "
                "correct the digest, or the files in the cache"
            ),
        )
    return "True", "Serving", f"{len(serving)} workers serve {seen.pool.spec.model.name}"


def _pairing(seen: Observed) -> ConditionState:
    names = {role.name for role in seen.roles if role.replicas}
    if not names & PAIRED:
        return "True", "NotNeeded", "no role needs a pair of pods"
    if seen.report is None:
        return "Unknown", "GatewayReportMissing", "the gateway has not reported its workers yet"
    prefill = [w for w in seen.report.of_role("prefill") if w.takes_work]
    decode = [w for w in seen.report.of_role("decode") if w.takes_work]
    if not prefill or not decode:
        return "Unknown", "NoPairYet", f"{len(prefill)} prefill and {len(decode)} decode pods accept requests"
    shared = {w.fingerprint for w in prefill} & {w.fingerprint for w in decode}
    if shared:
        return "True", "EqualLayouts", f"{len(shared)} KV layouts are common to prefill and decode pods"
    families = {w.family for w in prefill if w.family} & {w.family for w in decode if w.family}
    if families:
        return (
            "True",
            "Converted",
            (
                "prefill and decode pods have different KV layouts; blocks are converted on transfer, which is slower. "
                "Set spec.model.dtype instead of auto"
            ),
        )
    return (
        "False",
        "NoCommonLayout",
        (
            "no decode pod can use the KV of any prefill pod: model files, connector or domain differ. "
            "Compare spec.model.source and the images of both roles"
        ),
    )


def _context(seen: Observed) -> ConditionState:
    if seen.report is None:
        return "Unknown", "GatewayReportMissing", "the gateway has not reported its workers yet"
    serving = [worker for worker in seen.report.workers if worker.takes_work and worker.context_tokens]
    max_tokens = min((n for n in (seen.pool.spec.model.max_model_len, seen.report.model_tokens) if n), default=0)
    if not serving or not max_tokens:
        return "Unknown", "NoWorkerServes", "no workers have reported their context length"
    smallest = min(serving, key=lambda worker: (worker.context_tokens, worker.name))
    if smallest.context_tokens >= max_tokens:
        return "True", "FullContext", f"requests can have {max_tokens:,} tokens"
    return (
        "False",
        "LimitedByKvMemory",
        (
            f"requests can have only {smallest.context_tokens:,} of {max_tokens:,} tokens, since the KV memory of "
            f"{smallest.name} holds no more. Increase roles[].engine.kvMemory of role {smallest.role} by the factor "
            f"{max_tokens / smallest.context_tokens:.1f}, or set model.maxModelLen to {smallest.context_tokens}"
        ),
    )


def _adapters(seen: Observed) -> ConditionState | None:
    return adapters_condition(seen.pool.spec.adapters, seen.report)


def _transport(seen: Observed) -> ConditionState:
    total = sum(seen.handoffs.get(outcome, 0) for outcome in TRIED)
    unknown = seen.handoffs.get(HandoffOutcome.KEY_UNKNOWN, 0)
    if unknown >= _MIN_UNKNOWN_KEYS and unknown / total > _MAX_UNKNOWN_KEYS:
        return (
            "True",
            "KeysDiffer",
            (
                f"{unknown} of the last {total} hand-offs were recomputed, since the pods have different ticket keys "
                f"(TICKET_KEY_UNKNOWN): the Secret {keys_secret_of(seen.pool)} has changed after some of them started. "
                "A rollout gives all pods the same keys: change an annotation in roles[].template.metadata.annotations"
            ),
        )
    if total < _MIN_HANDOFFS:
        return "Unknown", "InsufficientSamples", f"{total} recent hand-offs are too few for an assessment"
    lost = sum(seen.handoffs.get(outcome, 0) for outcome in LOST)
    summary = f"{lost} of the last {total} hand-offs failed and were recomputed"
    if lost / total > _MAX_RECOMPUTED:
        return (
            "True",
            "HandoffsFail",
            (
                f"{summary}: peers restart or the network is slow. `kvferry explain REQUEST_ID` shows the reason of "
                "a request; spec.connector.type tcp rules out the fabric"
            ),
        )
    return "False", "HandoffsFetched", summary


def _contested(seen: Observed) -> ConditionState:
    if seen.contested is None:
        return "False", "SingleWriter", "no other field manager owns the numbers of replicas"
    return "True", seen.contested.reason, seen.contested.message


def _children(seen: Observed) -> ConditionState:
    if seen.refused is None:
        return "True", "Applied", "all objects of this pool are applied"
    return "False", seen.refused.reason, seen.refused.message


def _extension(seen: Observed) -> ConditionState | None:
    if seen.extension is None:
        return None
    is_applied = seen.extension.reason == "Emitted"
    return "True" if is_applied else "False", seen.extension.reason, seen.extension.message


_STATES: Mapping[Condition, Callable[[Observed], ConditionState | None]] = {
    Condition.AVAILABLE: _available,
    Condition.PROGRESSING: _progressing,
    Condition.GATEWAY_READY: _gateway,
    Condition.ROLES_READY: _roles,
    Condition.MODEL_AVAILABLE: _model,
    Condition.PAIRING_COMPATIBLE: _pairing,
    Condition.CONTEXT_AVAILABLE: _context,
    Condition.ADAPTERS_LOADED: _adapters,
    Condition.CERTIFICATES_VALID: lambda seen: certificates_condition(seen.tls),
    Condition.TRANSPORT_DEGRADED: _transport,
    Condition.REPLICAS_CONTESTED: _contested,
    Condition.CHILDREN_APPLIED: _children,
    Condition.GATEWAY_INTEGRATION: _extension,
}
