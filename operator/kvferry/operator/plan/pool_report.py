"""Report of a pass: the pool's status, its events and the time of the next pass, planned from the outcome. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvferry.operator.objects.support_objects import EXTENSION_POOL
from kvferry.operator.plan.actions import Action, EmitEvent, Outcome, Problem, WriteStatus
from kvferry.operator.plan.conditions.certificates import TlsSeen
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.plan.memory import PassMemory
from kvferry.operator.plan.pool_plan import DIAGNOSE_SECONDS, Plan, pool_status
from kvferry.operator.plan.process.rivals import RENEWED_SECONDS
from kvferry.operator.plan.repairs import named, repair_events
from kvferry.operator.plan.status import Observed, status_of
from kvferry.operator.plan.tls_plan import SPREAD_SECONDS, state_of
from kvferry.operator.pool import names
from kvferry.operator.pool.names import Condition
from kvferry.operator.pool.spec import Json

_AUTOSCALE_SECONDS = 2.0
_REFUSED_SECONDS = 5.0
_OVERDUE_SECONDS = 15.0
"""Time in seconds after a rollout within which the gateway's report about its pods is expected. Until then, conditions
follow the last report."""
_ANSWERING_SECONDS = 30.0
"""Age in seconds of a gateway's report up to which the gateway is assumed to run if its Deployment is not known."""

_WARNING_STATUS: Mapping[Condition, str] = {
    Condition.PROGRESSING: "",
    Condition.CHILDREN_APPLIED: "False",
    Condition.MODEL_AVAILABLE: "False",
    Condition.PAIRING_COMPATIBLE: "False",
    Condition.REPLICAS_CONTESTED: "True",
    Condition.CONTEXT_AVAILABLE: "False",
    Condition.CERTIFICATES_VALID: "False",
    Condition.TRANSPORT_DEGRADED: "True",
    Condition.READY: "",
}
"""Conditions that emit events on both transitions, with the status for which the event is a warning."""
_WARNING_REASONS = frozenset({"DeadlineExceeded", "RevisionNotFound"})
_QUIET_REASONS = frozenset(
    {
        "Observing",
        "GatewayReportMissing",
        "InsufficientSamples",
        "NoPairYet",
        "NoWorkerServes",
        "ScaledToZero",
        "NotReportedYet",
    }
)


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Status and event writes at the end of a pass."""

    actions: tuple[Action, ...]
    memory: PassMemory
    again_seconds: float
    """Seconds until the next pass; a change of an object triggers an earlier pass."""


def plan_report(ctx: PlanContext, plan: Plan, outcome: Outcome, memory: PassMemory) -> PoolReport:
    """Plan the status and events after a pass.

    Args:
        ctx: observations before the pass.
        plan: plan of the pass.
        outcome: outcome of all actions of the pass.
        memory: memory updated with these actions.
    """
    problems = dict(outcome.problems)
    extension = _extension(ctx, problems)
    contested = _combined({t: problem for t, problem in problems.items() if problem.reason == "OtherManager"})
    refused = _combined({t: problem for t, problem in problems.items() if problem.reason != "OtherManager"})
    deadline = ctx.pool.spec.rollout.progress_deadline_seconds
    stuck = ""
    if ctx.now - memory.moved_at >= deadline:
        stuck = f"no progress for {deadline} s: {outcome.diagnosis or plan.waiting_for}"
    is_old = _is_report_old(ctx, memory)
    is_overdue = is_old and memory.settled_at is not None and ctx.now - memory.settled_at >= _OVERDUE_SECONDS
    waiting_for = f"{plan.waiting_for} ({outcome.diagnosis})" if outcome.diagnosis else plan.waiting_for
    status = status_of(
        Observed(
            pool=ctx.pool,
            revision=plan.revision,
            roles=plan.roles,
            waiting_for=waiting_for,
            gateway_desired=ctx.pool.spec.gateway.replicas,
            gateway_ready=plan.gateway_ready,
            report=None if is_overdue else ctx.report,
            is_report_old=is_old and not is_overdue,
            handoffs=ctx.report.handoffs if ctx.report is not None else {},
            stuck=stuck,
            contested=contested,
            refused=refused,
            rollback=plan.rollback,
            extension=extension,
            keys=memory.keys or ctx.pool.keys,
            fleet=ctx.report,
            is_answering=_is_answering(ctx),
            diagnosis=outcome.diagnosis,
            tls=_tls(ctx, memory),
        ),
        ctx.status,
        ctx.stamp,
    )
    log = memory.scaling_log or ctx.status.get("scaling")
    if log:
        status["scaling"] = list(log)
    if ctx.operator:
        status["operator"] = ctx.operator
    changes, reasons = new_events(status, memory.reasons)
    events = [*repair_events(ctx, outcome), *changes]
    is_due = ctx.now - memory.observed_at >= RENEWED_SECONDS
    written = None if is_due else memory
    actions: list[Action] = [*events, *status_change(ctx.pool.namespace, ctx.pool.name, status, written, ctx.stamp)]
    again = again_seconds(ctx, memory, plan.waiting_for, is_refused=refused is not None or contested is not None)
    observed_at = ctx.now if is_due or len(actions) > len(events) else memory.observed_at
    return PoolReport(tuple(actions), replace(memory, reasons=reasons, observed_at=observed_at), again)


def status_change(
    namespace: str, name: str, status: Json, memory: PassMemory | None, stamp: str
) -> tuple[WriteStatus, ...]:
    """Return the action that writes `status` with the time of the observation, or no action if it was already written.

    Args:
        namespace, name: namespace and name of the pool.
        status: the status without `observedAt`.
        memory: memory with the last written status; `None` to write in any case.
        stamp: wall-clock time, RFC 3339.
    """
    if memory is not None and memory.status is not None:
        before = {name: value for name, value in memory.status.items() if name != "observedAt"}
        if status == before:
            return ()
    return (WriteStatus(pool_status(namespace, name, {**status, "observedAt": stamp})),)


def new_events(status: Mapping[str, Any], reasons: Mapping[str, str]) -> tuple[list[EmitEvent], dict[str, str]]:
    """Return an event for each condition whose reason changed, and the new reasons by condition type. `Ready` has no
    event of its own if it repeats another condition.

    Args:
        status: the status, with all conditions.
        reasons: reason of the most recent event, by condition type.
    """
    events, after = dict[tuple[str, str], EmitEvent](), dict(reasons)
    for entry in sorted(status["conditions"], key=lambda entry: entry["type"] == Condition.READY):
        condition, reason = Condition(entry["type"]), entry["reason"]
        if condition not in _WARNING_STATUS or reason in _QUIET_REASONS or reasons.get(condition) == reason:
            continue
        is_warning = entry["status"] == _WARNING_STATUS[condition] or reason in _WARNING_REASONS
        if condition not in reasons and not is_warning and condition not in (Condition.READY, Condition.PROGRESSING):
            continue  # no event for a new pool without problems
        after[condition.value] = reason
        message = f"{condition} is {entry['status']}: {entry['message']}"
        events.setdefault((reason, entry["message"]), EmitEvent("Warning" if is_warning else "Normal", reason, message))
    return list(events.values()), after


def again_seconds(ctx: PlanContext, memory: PassMemory, waiting_for: str, *, is_refused: bool) -> float:
    """Return the time until the next pass in seconds, for changes that no watch reports.

    Args:
        ctx: observations before the pass.
        memory: memory updated with the actions of the pass.
        waiting_for: reason why the rollout is not complete; empty if it is complete.
        is_refused: whether a write was rejected or conflicted with a different field manager.
    """
    if memory.keys and memory.keys != ctx.pool.keys:
        return 0.0  # Pods with lost keys are replaced.
    waits = []
    if any(role.scaling.mode == "Auto" for role in ctx.pool.spec.roles):
        waits.append(_AUTOSCALE_SECONDS)
    if _is_report_old(ctx, memory):
        waits.append(_AUTOSCALE_SECONDS)
    if is_refused:
        waits.append(_REFUSED_SECONDS)
    if waiting_for:
        waits.append(DIAGNOSE_SECONDS)
    if memory.holds_ca:
        waits.append(SPREAD_SECONDS)
    return min(waits, default=RENEWED_SECONDS)


def _is_report_old(ctx: PlanContext, memory: PassMemory) -> bool:
    """Return whether the gateway's report was read before the end of the last rollout."""
    return ctx.report is not None and memory.settled_at is not None and ctx.report.at < memory.settled_at


def _is_answering(ctx: PlanContext) -> bool:
    """Return whether a gateway runs although its Deployment is not known, since its labels were just removed."""
    is_known = names.role_object(ctx.pool.name, names.ROLE_GATEWAY) in ctx.facts.deployments
    return not is_known and ctx.report is not None and ctx.now - ctx.report.at <= _ANSWERING_SECONDS


def _tls(ctx: PlanContext, memory: PassMemory) -> TlsSeen | None:
    """Return what is known about the pool's certificates; `None` without TLS."""
    mode = ctx.pool.spec.tls.mode
    if mode == "Off":
        return None
    state = state_of(replace(ctx, memory=memory))
    reported = ctx.report.certificate_not_after if ctx.report is not None else 0
    return TlsSeen(mode, state.not_after if mode == "Managed" else reported, ctx.wall, len(state.bundle))


def _extension(ctx: PlanContext, problems: dict[str, Problem]) -> Problem | None:
    """Return the state of the inference extension's InferencePool; its rejection is not a problem of the pool
    itself."""
    if ctx.pool.spec.gateway.inference_extension == "Off":
        return None
    refused = problems.pop(f"InferencePool {ctx.pool.name}", None)
    if EXTENSION_POOL not in ctx.installed:
        return Problem(
            "KindNotInstalled",
            f"the cluster does not serve InferencePool of {EXTENSION_POOL[0]}; install the Gateway API Inference "
            "Extension, or set spec.gateway.inferenceExtension to Off",
        )
    if refused is not None:
        return Problem("Refused", refused.message)
    return Problem(
        "Emitted",
        f"{EXTENSION_POOL[0]} InferencePool {ctx.pool.name} selects the gateway pods. Every gateway pod accepts every "
        "request, so there is no endpoint picker: its failureMode is FailOpen",
    )


def _combined(problems: Mapping[str, Problem]) -> Problem | None:
    """Return the first problem, which names the targets of the others; `None` if there are none."""
    if not problems:
        return None
    first, *others = problems.items()
    more = f". Also affected: {named([target for target, _ in others])}" if others else ""
    return Problem(first[1].reason, f"{first[1].message}{more}")
