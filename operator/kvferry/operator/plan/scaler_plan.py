"""Plan of the PoolRoleScalers: writes of `spec.replicas` in each scaling mode, and the number of pods of each role.
Pure.

| mode | writer of the scaler's `spec.replicas` |
| --- | --- |
| Static | the operator, from the pool; it never overwrites a number that another field manager set |
| External | another controller or kubectl; the operator writes only the initial number |
| Auto | the autoscaler, under its own field manager |
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.operator.objects.support_objects import scaler
from kvferry.operator.plan.actions import Action, ApplyObject, Autoscale, SeedScaler, WriteStatus
from kvferry.operator.plan.autoscale import Recommendations, decide
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.plan.rollout import RoleState
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import RoleSpec


@dataclass(frozen=True, slots=True)
class ScalerPlan:
    """Writes to the scalers, and the numbers of pods if these writes succeed."""

    actions: tuple[Action, ...]
    replicas: Mapping[str, int]
    """Number of pods that each role should have."""
    histories: Mapping[str, Recommendations]


def plan_scalers(ctx: PlanContext) -> ScalerPlan:
    """Plan the scalers of all roles in the spec."""
    actions: list[Action] = []
    replicas: dict[str, int] = {}
    histories = dict(ctx.memory.histories)
    for role in ctx.pool.spec.roles:
        match role.scaling.mode:
            case "Static":
                number, writes = _static(ctx, role)
            case "External":
                number, writes = _external(ctx, role)
            case "Auto":
                number, writes, histories[role.name] = _auto(ctx, role)
        actions += writes
        replicas[role.name] = role.bounded(number)
    return ScalerPlan(tuple(actions), replicas, histories)


def plan_scale_status(ctx: PlanContext, roles: list[RoleState]) -> list[Action]:
    """Plan the scalers' status, which the /scale subresource shows: number of existing pods, and their label
    selector."""
    actions: list[Action] = []
    for role in roles:
        facts = ctx.facts.scalers.get(role.name)
        if facts is None or ctx.pool.spec.role(role.name) is None:
            continue
        selector = f"{names.LABEL_POOL}={ctx.pool.name},{names.LABEL_ROLE}={role.name}"
        pods = sum(d.pods for d in ctx.facts.deployments.values() if d.role == role.name)
        if facts.shown != (pods, selector):
            name = names.role_object(ctx.pool.name, role.name)
            actions.append(
                WriteStatus(
                    {
                        "apiVersion": names.API_VERSION,
                        "kind": "PoolRoleScaler",
                        "metadata": {"namespace": ctx.pool.namespace, "name": name},
                        "status": {"replicas": pods, "selector": selector},
                    }
                )
            )
    return actions


def _static(ctx: PlanContext, role: RoleSpec) -> tuple[int, list[Action]]:
    if _is_refused(ctx, role):
        return _current(ctx, role), []
    return role.replicas, list(ctx.apply_if_changed(scaler(ctx.pool, role, role.replicas), is_required=True))


def _external(ctx: PlanContext, role: RoleSpec) -> tuple[int, list[Action]]:
    return ctx.scaled.get(role.name, _current(ctx, role)), _seed(ctx, role)


def _auto(ctx: PlanContext, role: RoleSpec) -> tuple[int, list[Action], Recommendations]:
    """Plan a role in mode Auto; return its number of pods, the writes and the history. If a write is rejected, the
    number does not change, but the history is still extended."""
    current = _current(ctx, role)
    ready = sum(d.ready for d in ctx.facts.deployments.values() if d.role == role.name)
    history = ctx.memory.histories.get(role.name)
    if role.name not in ctx.facts.scalers:
        return *_external(ctx, role), history or Recommendations(busy_at=ctx.now, began_at=ctx.now)
    gateways = sum(d.ready for d in ctx.facts.deployments.values() if d.role == names.ROLE_GATEWAY)
    decision = decide(role, current, ready, ctx.facts.report, history, ctx.now, num_gateways=gateways)
    actions = _seed(ctx, role)
    if role.name in ctx.scaled or _is_refused(ctx, role) or decision.replicas == current:
        return ctx.scaled.get(role.name, current), actions, decision.history
    manifest = scaler(ctx.pool, role, decision.replicas)
    actions.append(Autoscale(role.name, manifest, current, decision.replicas, decision.reason))
    return decision.replicas, actions, decision.history


def _seed(ctx: PlanContext, role: RoleSpec) -> list[Action]:
    """Plan to apply the scaler without `spec.replicas`, and to seed that field if it has no owner in this mode.

    An existing number is seeded before the scaler is applied, since a field without owners is reset to its default. A
    new scaler is first applied with the number, so that it never has the default.
    """
    if _is_refused(ctx, role):
        return []
    apply = ctx.apply_if_changed(scaler(ctx.pool, role, None), is_required=True)
    is_new = role.name not in ctx.facts.scalers
    if ctx.memory.seeded.get(role.name) == role.scaling.mode and not is_new:
        return list(apply)
    whole = scaler(ctx.pool, role, _current(ctx, role))
    required = {
        "apiVersion": whole["apiVersion"],
        "kind": whole["kind"],
        "metadata": {"namespace": ctx.pool.namespace, "name": whole["metadata"]["name"]},
        "spec": whole["spec"],
    }
    seed = SeedScaler(role.name, role.scaling.mode, required)
    return [ApplyObject(whole, is_required=True), seed, *apply] if is_new else [seed, *apply]


def _current(ctx: PlanContext, role: RoleSpec) -> int:
    """Return the current number of replicas: from the scaler; without one, the number that ran before it was deleted;
    and for a new role, the initial number of its mode."""
    facts = ctx.facts.scalers.get(role.name)
    if facts is not None:
        return facts.replicas
    if role.scaling.mode != "Static" and not _is_refused(ctx, role):
        ran = _number_in_status(ctx, role)
        return role.bounded(max(1, role.scaling.min_replicas) if ran is None else ran)
    return role.replicas


def _number_in_status(ctx: PlanContext, role: RoleSpec) -> int | None:
    """Return the number of replicas of a role in the status as last written; `None` for a new role."""
    status = ctx.memory.status or ctx.status
    return next((int(one["desired"]) for one in status.get("roles") or () if one["name"] == role.name), None)


def _is_refused(ctx: PlanContext, role: RoleSpec) -> bool:
    return f"PoolRoleScaler {names.role_object(ctx.pool.name, role.name)}" in ctx.problems
