"""Turns the planner's step into Deployments: the record of a revision first, then numbers of pods, then tidying."""

from collections.abc import Mapping

from kvferry.operator import names
from kvferry.operator.children import NameTaken
from kvferry.operator.facts import DeploymentFacts, owner_of
from kvferry.operator.pool_pass import PoolPass
from kvferry.operator.revisions import next_number, record, recorded, superfluous
from kvferry.operator.rollout import Count, RoleState, Step
from kvferry.operator.spec import Json
from kvferry.operator.status import Problem
from kvferry.operator.victims import deletion_costs
from kvferry.operator.workers import deployments, revision_of, with_replicas

_OF_A_ROLE = (("v1", "Service"), ("policy/v1", "PodDisruptionBudget"), (names.API_VERSION, "PoolRoleScaler"))


def target_revision(this: PoolPass) -> str:
    """The revision that pods should run, recorded before anything is made from it."""
    asked = this.pool.spec.rollout.rollback_to
    if asked:
        recorded_roles = set(_deployments_of(this, asked))
        wanted_roles = {role.name for role in this.pool.spec.roles}
        if recorded_roles == wanted_roles:
            return asked
        if recorded_roles:
            this.rollback = Problem(
                "RevisionHasOtherRoles",
                f"revision {asked} has the roles {', '.join(sorted(recorded_roles))}, spec.roles has "
                f"{', '.join(sorted(wanted_roles))}; pods stay as they are. Change spec.roles together with rollbackTo",
            )
            return _leading(this) or asked
        kept = ", ".join(sorted(this.memory.revisions)) or "none"
        this.rollback = Problem(
            "RevisionNotFound",
            f"spec.rollout.rollbackTo names revision {asked}, of which there is no record (known: {kept}); pods stay "
            "as they are. `kubectl get controllerrevisions` lists them",
        )
        return _leading(this) or asked
    revision = revision_of(this.pool, this.default_image)
    if not _deployments_of(this, revision):
        made = deployments(this.pool, revision, this.default_image)
        with this.noting(f"ControllerRevision {names.revision_object(this.pool.name, revision)}"):
            this.api.create(record(this.pool, revision, next_number(_records(this)), made))
            # Read back: had there been one already, that one counts.
            this.memory.revisions.pop(revision, None)
            if not _deployments_of(this, revision):
                name = names.revision_object(this.pool.name, revision)
                raise NameTaken("ControllerRevision", name, leaving=False)
    return revision


def role_states(this: PoolPass, wanted: Mapping[str, int]) -> list[RoleState]:
    """Roles as the Deployments show them; a role that the spec no longer has wants nothing."""
    found: dict[str, dict[str, Count]] = {name: {} for name in wanted}
    for facts in this.facts.deployments.values():
        if facts.role in names.WORKER_ROLES and facts.revision and not facts.deleting:
            # Its template never changes, so that ready pods are of this revision whatever its controller has seen.
            count = Count(facts.desired, min(facts.ready, facts.desired))
            found.setdefault(facts.role, {})[facts.revision] = count
    return [RoleState(name, wanted.get(name, 0), counts, name not in wanted) for name, counts in found.items()]


def apply_step(this: PoolPass, roles: list[RoleState], step: Step) -> None:
    """Make the Deployments have the pods that `step` says; the cheapest pods are marked before any goes."""
    shrinking = [
        role.name
        for role in roles
        if any(step.desired[role.name, revision] < count.desired for revision, count in role.revisions.items())
    ]
    for role in shrinking:
        _mark_victims(this, role)
    for (role_name, revision), pods in step.desired.items():
        name = names.deployment_name(this.pool.name, role_name, revision)
        facts = this.facts.deployments.get(name)
        if facts is None and pods == 0:
            continue
        made = _deployments_of(this, revision).get(role_name)
        if made is None:
            _scale_unrecorded(this, facts, pods)
            continue
        with this.noting(f"Deployment {name}"):
            this.memory.children.apply(with_replicas(made, pods), "" if facts is None else str(facts.generation))


def tidy(this: PoolPass, revision: str, done: bool) -> None:
    """Remove old Deployments without pods, the objects of roles that are gone, and records beyond the limit."""
    place, pool = this.pool.namespace, this.pool.name
    for facts in this.facts.deployments.values():
        old = facts.role in names.WORKER_ROLES and facts.revision and facts.revision != revision
        if old and facts.settled and facts.desired == 0 and facts.pods == 0 and not facts.deleting:
            this.api.delete("apps/v1", "Deployment", place, facts.name, facts.uid)
    serving = {facts.role for facts in this.facts.deployments.values() if facts.desired or facts.pods}
    for role in names.WORKER_ROLES:
        # Gateways find a role's pods by its Service, so that it stays as long as they do.
        if this.pool.spec.role(role) is None and role in this.facts.scalers and role not in serving:
            name = names.role_object(pool, role)
            for api_version, kind in _OF_A_ROLE:
                this.memory.children.remove(api_version, kind, place, name, this.pool.uid)
    if done:
        _prune(this, revision)


def _prune(this: PoolPass, revision: str) -> None:
    needed = frozenset({facts.revision for facts in this.facts.deployments.values()} | {revision})
    limit = this.pool.spec.rollout.history_limit
    if this.memory.pruned_for == (needed, limit):
        return
    for name in superfluous(_records(this), needed, limit):
        this.api.delete("apps/v1", "ControllerRevision", this.pool.namespace, name)
        this.memory.revisions.pop(name.removeprefix(f"{this.pool.name}-"), None)
    this.memory.pruned_for = needed, limit


def _records(this: PoolPass) -> list[Json]:
    labels = {names.LABEL_POOL: this.pool.name}
    return list(this.api.list("apps/v1", "ControllerRevision", this.pool.namespace, labels))


def _deployments_of(this: PoolPass, revision: str) -> dict[str, Json]:
    """The recorded Deployments of a revision; none when there is no record."""
    known = this.memory.revisions
    if revision not in known:
        name = names.revision_object(this.pool.name, revision)
        found = this.api.get("apps/v1", "ControllerRevision", this.pool.namespace, name)
        if found is None or owner_of(found) != this.pool.uid:
            return {}
        known[revision] = recorded(this.pool, revision, found)
    return known[revision]


def _leading(this: PoolPass) -> str:
    """The revision with the most ready pods; empty: there are no pods."""
    ready: dict[str, int] = {}
    for facts in this.facts.deployments.values():
        if facts.revision:
            ready[facts.revision] = ready.get(facts.revision, 0) + facts.ready
    return max(ready, key=lambda revision: (ready[revision], revision), default="")


def _scale_unrecorded(this: PoolPass, facts: DeploymentFacts | None, pods: int) -> None:
    """A Deployment whose record somebody deleted can still be made smaller, which is all that an old one needs."""
    if facts is None or facts.desired == pods:
        return
    with this.noting(f"Deployment {facts.name}"):
        this.api.patch("apps/v1", "Deployment", this.pool.namespace, facts.name, {"spec": {"replicas": pods}})


def _mark_victims(this: PoolPass, role: str) -> None:
    report = this.facts.report
    if report is None:
        return
    labels = {names.LABEL_POOL: this.pool.name, names.LABEL_ROLE: role}
    with this.noting(f"pods of role {role}"):
        pods = list(this.api.list("v1", "Pod", this.pool.namespace, labels))
        now = {
            pod["metadata"]["name"]: int(
                (pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_DELETION_COST, 0)
            )
            for pod in pods
        }
        for name, cost in deletion_costs(report.of_role(role), now).items():
            change = {"metadata": {"annotations": {names.ANNOTATION_DELETION_COST: str(cost)}}}
            this.api.patch("v1", "Pod", this.pool.namespace, name, change)
