"""Input of a pool's plan: spec, observed facts, memory, and the rejections of this pass so far. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.operator.objects.worker_pods import revision_of
from kvferry.operator.plan.actions import Action, ApplyObject, Autoscale, Done, Problem, SeedScaler
from kvferry.operator.plan.memory import PassMemory, digest_of, place_of
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import FleetReport, PoolFacts
from kvferry.operator.pool.spec import InferencePool, Json


@dataclass(frozen=True, slots=True)
class PlanContext:
    """Input of the planner."""

    pool: InferencePool
    facts: PoolFacts
    """Observed objects that the pool controls."""
    memory: PassMemory
    """Results of earlier passes; `records` contains all existing records of the revisions in `revisions_to_read`."""
    next_record: int
    """Number of the next ControllerRevision, if one is created."""
    status: Mapping[str, Any]
    """Stored status of the pool."""
    default_image: str
    """Image for pools without `spec.image`."""
    installed: frozenset[tuple[str, str]]
    """Optional kinds that the cluster serves, as (apiVersion, plural)."""
    now: float
    """Time in seconds by a monotonic clock."""
    stamp: str
    """Wall-clock time as RFC 3339 text."""
    wall: float = 0.0
    """Wall-clock time in seconds since the epoch."""
    operator: str = ""
    """Namespace and name of this operator's lease; empty for previews."""
    problems: Mapping[str, Problem] = field(default_factory=dict)
    """Rejections of this pass, by target. Actions with these targets are not planned."""
    scaled: Mapping[str, int] = field(default_factory=dict)
    """Numbers of replicas that this pass has written to scalers, by role."""

    @property
    def report(self) -> FleetReport | None:
        """Latest report of the gateway; `None` if there is none."""
        return self.facts.report

    def record(self, revision: str) -> Mapping[str, Json]:
        """Return the recorded Deployments of a revision by role; empty if the revision has no record."""
        return self.memory.records.get(revision, {})

    def apply_if_changed(self, manifest: Json, *, is_required: bool = False) -> tuple[ApplyObject, ...]:
        """Return an action that applies `manifest`, or no action if it was applied and the applied fields have not
        changed since."""
        live = self.facts.version(names.kind_of(manifest), manifest["metadata"]["name"])
        applied = self.memory.applied.get(place_of(manifest))
        if applied is not None and applied.digest == digest_of(manifest) and live == applied.version:
            return ()
        return (ApplyObject(manifest, check_owner=applied is None or live == "", is_required=is_required),)

    def without_refused(self, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Return the actions whose targets were not rejected in this pass."""
        return tuple(action for action in actions if action.target not in self.problems)


def revisions_to_read(pool: InferencePool, facts: PoolFacts, default_image: str) -> tuple[str, ...]:
    """Return the revisions whose records the plan needs: the target revision, then the revisions of existing worker
    Deployments."""
    target = pool.spec.rollout.rollback_to or revision_of(pool, default_image)
    running = (d.revision for d in facts.deployments.values() if d.role in names.WORKER_ROLES and not d.deleting)
    return tuple(dict.fromkeys((target, *(revision for revision in running if revision))))


def scaled_by(done: Iterable[Done]) -> dict[str, int]:
    """Return the numbers of replicas that actions wrote to scalers, by role."""
    found: dict[str, int] = {}
    for one in done:
        match one.action:
            case SeedScaler(role=role):
                found[role] = int((one.stored or one.action.manifest)["spec"]["replicas"])
            case Autoscale(role=role, replicas=replicas):
                found[role] = replicas
    return found
