"""Plan of a reconcile: an ordered list of writes, computed from spec, observed facts and memory. Pure.

The plan assumes that required writes succeed. If the executor reports that a required write was rejected, the pool is
replanned with the rejection as a fact. Order of the actions:

1. keys and support objects (Services, policies and others), each only if it changed; unwanted objects are deleted
2. scalers, which determine the number of pods of each role
3. the record of the target revision, before anything is created from it
4. the next step of the rollout: deletion costs of a shrinking role, then numbers of replicas
5. the gateway
6. cleanup: old Deployments, objects of removed roles, records beyond the history limit
7. status of the scalers

`pool_report` plans the pool's status from the outcome.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvferry.core.errors import UsageError
from kvferry.operator.objects.gateway_pods import gateway_deployment
from kvferry.operator.objects.keys import KEY_ENTRIES
from kvferry.operator.objects.pods import child
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR, surroundings
from kvferry.operator.objects.worker_pods import deployments, revision_of, with_replicas
from kvferry.operator.plan.actions import (
    Action,
    ApplyObject,
    CreateKeys,
    CreateRecord,
    DeleteObject,
    DiagnosePods,
    MarkDeletionCosts,
    Problem,
    PruneRecords,
    SetReplicas,
    WriteStatus,
)
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.plan.deletion_cost import deletion_costs
from kvferry.operator.plan.memory import PassMemory
from kvferry.operator.plan.revisions import record, recorded
from kvferry.operator.plan.rollout import Count, RoleState, Step, next_step
from kvferry.operator.plan.scaler_plan import plan_scale_status, plan_scalers
from kvferry.operator.plan.status import first_status
from kvferry.operator.plan.template_policy import TemplatePolicy, check_templates
from kvferry.operator.plan.tls_plan import plan_tls
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json

DIAGNOSE_SECONDS = 5.0
"""Time in seconds without progress of the rollout after which the operator reads the pods to diagnose them."""
_ROLE_KINDS = (("v1", "Service"), ("policy/v1", "PodDisruptionBudget"), (names.API_VERSION, "PoolRoleScaler"))


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one pass: actions, and decisions for the status."""

    actions: tuple[Action, ...]
    memory: PassMemory
    """Memory for the next pass, before completed actions are added with `remember`."""
    revision: str
    """Target revision of the worker pods."""
    roles: tuple[RoleState, ...]
    step: Step
    waiting_for: str
    """Reason why the rollout of roles and gateway is not complete; empty if it is complete."""
    gateway_ready: int
    rollback: Problem | None
    """Reason why `spec.rollout.rollbackTo` cannot be applied; `None` if it can."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Target revision of worker pods."""

    revision: str
    made: Mapping[str, Json]
    """Deployments of the revision, by role."""
    actions: tuple[Action, ...] = ()
    problem: Problem | None = None


def verify(pool: InferencePool, default_image: str, policy: TemplatePolicy = TemplatePolicy.ANY) -> None:
    """Check a spec by building all manifests of the pool, since user templates have no schema and can fail in any way.

    Args:
        pool: the pool.
        default_image: image for pools without `spec.image`.
        policy: what its templates may contain.

    Raises:
        UsageError: the manifests cannot be built, or a template has a field that is not permitted.
    """
    check_templates(pool, policy)
    try:
        surroundings(pool, frozenset({POD_MONITOR, EXTENSION_POOL}))
        gateway_deployment(pool, default_image)
        deployments(pool, revision_of(pool, default_image), default_image)
    except Exception as error:
        raise UsageError(f"cannot build pods from spec templates and quantities: {error!r}", field="spec") from error


def plan_pool(ctx: PlanContext) -> Plan:
    """Plan one reconcile of a pool: its actions, and the memory for the next one."""
    rollout = ctx.pool.spec.rollout
    scalers = plan_scalers(ctx)
    target = _target(ctx)
    roles = role_states(ctx, scalers.replicas)
    step = next_step(roles, target.revision, rollout)
    gateway = gateway_deployment(ctx.pool, ctx.default_image, _new_account(ctx))
    gateway_ready, gateway_needs = _gateway_state(ctx, gateway["metadata"]["name"])
    waiting_for = "; ".join(needs for needs in (step.waiting_for, gateway_needs) if needs)
    memory = replace(
        _progressed(ctx, roles, waiting_for),
        histories=scalers.histories,
        seeded={
            name: mode
            for name, mode in ctx.memory.seeded.items()
            if (role := ctx.pool.spec.role(name)) is not None and role.scaling.mode != "Static"
        },
    )
    actions: list[Action] = [
        *_first_status(ctx),
        *_surroundings(ctx),
        *scalers.actions,
        *target.actions,
        *_lost_records(ctx),
        *(() if target.problem is not None else _step_actions(ctx, roles, step, target)),
        *ctx.apply_if_changed(gateway),
        *_cleanup(ctx, target.revision, step.done),
        *plan_scale_status(ctx, roles),
    ]
    if ctx.now - memory.moved_at >= DIAGNOSE_SECONDS:
        actions.append(DiagnosePods())
    return Plan(
        actions=ctx.without_refused(actions),
        memory=memory,
        revision=target.revision,
        roles=tuple(roles),
        step=step,
        waiting_for=waiting_for,
        gateway_ready=gateway_ready,
        rollback=target.problem,
    )


def role_states(ctx: PlanContext, replicas: Mapping[str, int]) -> list[RoleState]:
    """Return the state of each role, from its Deployments. A role that was removed from the spec should have 0
    pods."""
    found: dict[str, dict[str, Count]] = {name: {} for name in replicas}
    for facts in ctx.facts.deployments.values():
        if facts.role in names.WORKER_ROLES and facts.revision and not facts.deleting:
            # The template of a Deployment never changes, so its ready pods have its revision even if the status is
            # stale.
            count = Count(facts.desired, min(facts.ready, facts.desired))
            found.setdefault(facts.role, {})[facts.revision] = count
    return [RoleState(name, replicas.get(name, 0), counts, name not in replicas) for name, counts in found.items()]


def _first_status(ctx: PlanContext) -> tuple[Action, ...]:
    if ctx.status.get("conditions") or ctx.memory.status is not None:
        return ()
    return (WriteStatus(pool_status(ctx.pool.namespace, ctx.pool.name, first_status(ctx.pool, ctx.stamp))),)


def pool_status(namespace: str, name: str, status: Json) -> Json:
    """Build the manifest with which a pool's status is applied."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "InferencePool",
        "metadata": {"namespace": namespace, "name": name},
        "status": status,
    }


# -- support objects ---------------------------------------------------------------------------------------------------


def _surroundings(ctx: PlanContext) -> list[Action]:
    actions: list[Action] = []
    if not ctx.pool.spec.internal_keys.secret_name and (ctx.facts.is_without_keys or not ctx.memory.has_keys):
        secret = child(ctx.pool, "v1", "Secret", names.keys_secret(ctx.pool.name), type="Opaque")
        actions.append(CreateKeys(secret, KEY_ENTRIES, is_replacement=bool(ctx.facts.deployments)))
    actions += plan_tls(ctx)
    for made in surroundings(ctx.pool, ctx.installed):
        actions += ctx.apply_if_changed(made)
    return [*actions, *_unwanted(ctx)]


def _unwanted(ctx: PlanContext) -> list[Action]:
    spec, name = ctx.pool.spec, ctx.pool.name
    found = []
    if spec.network_policy == "Off":
        policies = (names.worker_policy(name), names.gateway_policy(name))
        found += [DeleteObject("networking.k8s.io/v1", "NetworkPolicy", policy) for policy in policies]
    if spec.observability.pod_monitor == "Off" and POD_MONITOR in ctx.installed:
        found.append(DeleteObject(POD_MONITOR[0], "PodMonitor", name))
    if spec.gateway.inference_extension == "Off" and EXTENSION_POOL in ctx.installed:
        found.append(DeleteObject(EXTENSION_POOL[0], "InferencePool", name))
    return [action for action in found if (action.kind, action.name) not in ctx.memory.removed]


# -- worker pods -------------------------------------------------------------------------------------------------------


def _target(ctx: PlanContext) -> _Target:
    """Determine the target revision and its Deployments, and the record to create if it has none."""
    pool = ctx.pool
    if pool.spec.rollout.rollback_to:
        return _rollback_target(ctx, pool.spec.rollout.rollback_to)
    revision = revision_of(pool, ctx.default_image)
    kept = ctx.record(revision)
    if kept:
        return _Target(revision, kept)
    manifest = record(pool, revision, ctx.next_record, deployments(pool, revision, ctx.default_image))
    create = CreateRecord(revision, manifest)
    if create.target in ctx.problems:
        return _Target(revision, {})
    return _Target(revision, recorded(pool, revision, manifest), (create,))


def _lost_records(ctx: PlanContext) -> list[Action]:
    """Plan to restore the known records that do not exist or have no owner."""
    actions: list[Action] = []
    for revision, kept in ctx.memory.records.items():
        name = names.revision_object(ctx.pool.name, revision)
        if kept and ctx.facts.is_lost("ControllerRevision", name):
            actions.append(ApplyObject(record(ctx.pool, revision, ctx.next_record, kept)))
    return actions


def _rollback_target(ctx: PlanContext, revision: str) -> _Target:
    kept = ctx.record(revision)
    spec_roles = {role.name for role in ctx.pool.spec.roles}
    if set(kept) == spec_roles:
        return _Target(revision, kept)
    if kept:
        problem = Problem(
            "RevisionHasOtherRoles",
            f"revision {revision} has the roles {', '.join(sorted(kept))}, spec.roles has "
            f"{', '.join(sorted(spec_roles))}; pods are not changed. Change spec.roles together with rollbackTo",
        )
    else:
        known = ", ".join(sorted(ctx.memory.records)) or "none"
        problem = Problem(
            "RevisionNotFound",
            f"spec.rollout.rollbackTo names revision {revision}, which has no ControllerRevision (found: {known}); "
            "pods are not changed. `kubectl get controllerrevisions` lists the revisions",
        )
    return _Target(_leading(ctx) or revision, {}, problem=problem)


def _leading(ctx: PlanContext) -> str:
    """Return the revision with the most ready pods; empty without pods."""
    ready: dict[str, int] = {}
    for facts in ctx.facts.deployments.values():
        if facts.revision:
            ready[facts.revision] = ready.get(facts.revision, 0) + facts.ready
    return max(ready, key=lambda revision: (ready[revision], revision), default="")


def _step_actions(ctx: PlanContext, roles: list[RoleState], step: Step, target: _Target) -> list[Action]:
    """Plan the writes of the step's numbers of replicas. Before a role shrinks, deletion costs are set on its pods."""
    actions: list[Action] = []
    for role in roles:
        shrinks = any(step.desired[role.name, revision] < count.desired for revision, count in role.revisions.items())
        if shrinks and ctx.report is not None:
            actions.append(MarkDeletionCosts(role.name, deletion_costs(ctx.report.of_role(role.name))))
    for (role_name, revision), pods in step.desired.items():
        name = names.deployment_name(ctx.pool.name, role_name, revision)
        facts = ctx.facts.deployments.get(name)
        made = (target.made if revision == target.revision else ctx.record(revision)).get(role_name)
        if made is None:
            # Without a record the template is unknown, but an old Deployment can be scaled down.
            if facts is not None and facts.desired != pods:
                actions.append(SetReplicas(name, pods))
        elif facts is not None or pods > 0:
            actions += ctx.apply_if_changed(with_replicas(made, pods))
    return actions


def _cleanup(ctx: PlanContext, revision: str, done: bool) -> list[Action]:
    """Plan the deletions of old Deployments without pods, of objects of removed roles and, after the rollout, of old
    records."""
    actions: list[Action] = []
    for facts in ctx.facts.deployments.values():
        old = facts.role in names.WORKER_ROLES and facts.revision and facts.revision != revision
        if old and facts.settled and facts.desired == 0 and facts.pods == 0 and not facts.deleting:
            actions.append(DeleteObject("apps/v1", "Deployment", facts.name, facts.uid))
    # Gateways discover a role's pods through its Service, so the Service is kept until the last pod is gone.
    serving = {facts.role for facts in ctx.facts.deployments.values() if facts.desired or facts.pods}
    for role in names.WORKER_ROLES:
        if ctx.pool.spec.role(role) is None and role in ctx.facts.scalers and role not in serving:
            name = names.role_object(ctx.pool.name, role)
            actions += [
                DeleteObject(api_version, kind, name)
                for api_version, kind in _ROLE_KINDS
                if (kind, name) not in ctx.memory.removed
            ]
    if done:
        needed = frozenset({facts.revision for facts in ctx.facts.deployments.values()} | {revision})
        limit = ctx.pool.spec.rollout.history_limit
        if ctx.memory.pruned_for != (needed, limit):
            actions.append(PruneRecords(needed, limit))
    return actions


# -- progress ----------------------------------------------------------------------------------------------------------


def _new_account(ctx: PlanContext) -> str:
    """Return the uid of the gateway's ServiceAccount if it was created again after the gateway's Deployment, since the
    tokens of running pods are then invalid and the pods must be replaced; otherwise an empty string."""
    name = names.role_object(ctx.pool.name, names.ROLE_GATEWAY)
    account = ctx.facts.children.get(("ServiceAccount", name))
    deployment = ctx.facts.children.get(("Deployment", name))
    if account is None or deployment is None or account.created <= deployment.created:
        return ""
    return account.uid


def _gateway_state(ctx: PlanContext, name: str) -> tuple[int, str]:
    """Return the number of ready gateway pods, and the reason why the gateway's rollout is not complete."""
    found = ctx.facts.deployments.get(name)
    if found is None:
        return 0, "gateway: not created yet"
    replicas = ctx.pool.spec.gateway.replicas
    if not found.settled or found.desired != replicas:
        return found.ready, "gateway: the Deployment controller has not observed the last change yet"
    old = found.pods - found.updated
    good = min(max(0, found.ready - old), replicas)  # All old pods may be among the ready pods.
    if old > 0:
        return found.ready, f"gateway: {good} of {replicas} pods updated and ready, {old} old pods left"
    if found.pods > replicas:
        return found.ready, f"gateway: {found.pods - replicas} more pods than desired"
    return found.ready, "" if good == replicas else f"gateway: {good} of {replicas} pods ready"


def _progressed(ctx: PlanContext, roles: list[RoleState], waiting_for: str) -> PassMemory:
    """Return the memory with updated times: when the rollout completed, and when the numbers of pods last changed."""
    memory = ctx.memory
    progress = (ctx.pool.generation, *((role.name, role.replicas, tuple(role.revisions.items())) for role in roles))
    moved = progress != memory.progress or not waiting_for
    settled_at = None if waiting_for else ctx.now if memory.settled_at is None else memory.settled_at
    return replace(
        memory,
        progress=progress,
        moved_at=ctx.now if moved else memory.moved_at,
        settled_at=settled_at,
    )
