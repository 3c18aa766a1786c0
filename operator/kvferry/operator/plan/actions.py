"""Actions of a plan, with a frozen class for each kind of write. `apply.executor` executes them.

An action contains all data that the executor needs. If a check needs a read at the time of the write (owner, stored
record, existing pods), it is part of the action's contract and documented in its class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvferry.core.errors import KvferryError
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import Json
from kvferry.operator.pool.tls_state import TlsState


@dataclass(frozen=True, slots=True)
class Problem:
    """A rejected write, or a part of the spec that cannot be applied. It is reported in a condition."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ApplyObject:
    """Server-side apply of an object without force, as field manager `kvferry-operator`."""

    manifest: Json
    check_owner: bool = True
    """Whether to read the object first and reject the write if the object exists and the pool is not its controller."""
    is_required: bool = False
    """Whether later actions assume that this action succeeds. If it is rejected, the pool is replanned."""

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return target_of(self.manifest)

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        replicas = (self.manifest.get("spec") or {}).get("replicas")
        return f"apply {self.target}" + ("" if replicas is None else f" (replicas {replicas})")


@dataclass(frozen=True, slots=True)
class CreateKeys:
    """Create a Secret with random keys. An existing Secret is neither read nor changed."""

    manifest: Json
    """Secret without data; the executor generates the keys, so that plans do not contain them."""
    entries: tuple[str, ...]
    is_replacement: bool = False
    """Whether pods with earlier keys may exist, which must be replaced."""

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return target_of(self.manifest)

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"create {self.target} with {', '.join(self.entries)}, unless it exists"


@dataclass(frozen=True, slots=True)
class WriteTls:
    """Generate a CA and publish its certificate in the pool's ConfigMap, or sign the certificates in the pool's Secret
    with the generated CA, or both. The stored result is the ConfigMap.

    The executor generates and holds the keys, so that plans do not contain them. A Secret or a ConfigMap that does not
    belong to the pool is not changed.
    """

    config: Json
    """The ConfigMap, with the data of `state`."""
    secret: Json
    """The Secret without data."""
    state: TlsState
    """State before the action."""
    draws: bool
    """Whether to generate a CA and publish it."""
    issues: bool
    """Whether to sign certificates and write the Secret."""
    days: float
    """Validity of the CA and of the certificates in days."""

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return target_of(self.secret if self.issues else self.config)

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        drawn = f"generate a CA and apply {target_of(self.config)}" if self.draws else ""
        signed = f"sign the certificates in {target_of(self.secret)}" if self.issues else ""
        return "; ".join(part for part in (drawn, signed) if part)


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Create the ControllerRevision of a revision. If an object with its name exists and belongs to the pool, the
    stored record is used and the pool is replanned. If the object has a different owner, the action is rejected.
    """

    revision: str
    manifest: Json

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return target_of(self.manifest)

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"create {self.target}"


@dataclass(frozen=True, slots=True)
class SeedScaler:
    """Apply `spec.replicas` of a PoolRoleScaler as field manager `kvferry-operator-seed`, so that it has an owner.

    A conflict over `spec.replicas` alone counts as success, since the field has an owner.
    """

    role: str
    mode: str
    manifest: Json
    """Scaler with only the required fields; other fields would be co-owned with the operator's field manager."""

    @property
    def replicas(self) -> int:
        """Number of replicas to write."""
        return int(self.manifest["spec"]["replicas"])

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return target_of(self.manifest)

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"apply {self.target} as {names.SEED_MANAGER} (replicas {self.replicas})"


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Apply the autoscaler's decision to `spec.replicas` of a PoolRoleScaler, as field manager `kvferry-autoscaler`."""

    role: str
    manifest: Json
    previous: int
    replicas: int
    reason: str

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return target_of(self.manifest)

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"apply {self.target} as {names.AUTOSCALER_MANAGER} (replicas {self.replicas}): {self.reason}"


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Patch `spec.replicas` of a Deployment whose template is unknown because its ControllerRevision is missing."""

    name: str
    replicas: int

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return f"Deployment {self.name}"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"patch {self.target} (replicas {self.replicas})"


@dataclass(frozen=True, slots=True)
class MarkDeletionCosts:
    """Annotate the pods of a role with their deletion costs before the role's Deployment is scaled down.

    The executor lists the pods and patches each pod whose annotation differs.
    """

    role: str
    costs: Mapping[str, int]

    @property
    def target(self) -> str:
        """Pods to annotate, as shown in problems and summaries."""
        return f"pods of role {self.role}"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"annotate {self.target} with deletion costs"


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete an object of the pool."""

    api_version: str
    kind: str
    name: str
    uid: str = ""
    """Uid that the object must have. If empty, the object is read first, and deleted if the pool owns it."""

    @property
    def target(self) -> str:
        """Kind and name of the object, as shown in problems and summaries."""
        return f"{self.kind} {self.name}"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"delete {self.target}" + ("" if self.uid else ", if it belongs to the pool")


@dataclass(frozen=True, slots=True)
class PruneRecords:
    """Delete the pool's ControllerRevisions beyond the newest `limit` that are not in `needed`, oldest first."""

    needed: frozenset[str]
    limit: int

    @property
    def target(self) -> str:
        """ControllerRevisions of the pool, as shown in problems and summaries."""
        return "ControllerRevisions"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"delete {self.target} beyond spec.rollout.historyLimit ({self.limit})"


@dataclass(frozen=True, slots=True)
class DiagnosePods:
    """Read the pool's pods and report why they are not ready. Writes nothing."""

    @property
    def target(self) -> str:
        """Pods of the pool, as shown in problems and summaries."""
        return "pods"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return "list pods, to report why they are not ready"


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Server-side apply of a status subresource, with force.

    If the status of the InferencePool is rejected, the pass fails, since the status cannot report it.
    """

    manifest: Json

    @property
    def target(self) -> str:
        """Object whose status is written, as shown in problems and summaries."""
        return f"status of {target_of(self.manifest)}"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"write {self.target}"


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Create an Event of the pool. Best effort: a failure is logged."""

    type: str
    reason: str
    message: str

    @property
    def target(self) -> str:
        """The event, as shown in problems and summaries."""
        return f"Event {self.reason}"

    @property
    def summary(self) -> str:
        """One-line summary for logs and `kvferry operator plan`."""
        return f"emit {self.type} event {self.reason}: {self.message}"


Action = (
    ApplyObject
    | CreateKeys
    | WriteTls
    | CreateRecord
    | SeedScaler
    | Autoscale
    | SetReplicas
    | MarkDeletionCosts
    | DeleteObject
    | PruneRecords
    | DiagnosePods
    | WriteStatus
    | EmitEvent
)


@dataclass(frozen=True, slots=True)
class Done:
    """A completed action, with the results that later decisions need."""

    action: Action
    stored: Json | None = None
    """Object as stored by the API server; `None` if nothing was written or later decisions do not need it."""
    deleted: tuple[str, ...] = ()
    """Names of deleted ControllerRevisions."""
    diagnosis: str = ""
    is_created: bool = False
    """Whether the object did not exist before; known only for `ApplyObject` with `check_owner`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of executing a list of actions."""

    done: tuple[Done, ...] = ()
    problems: Mapping[str, Problem] = field(default_factory=dict)
    """Rejections by target, in the order in which they occurred."""
    must_replan: bool = False
    """Whether a required action was rejected, or an object was not in the expected state; later actions were not
    executed."""
    failure: KvferryError | None = None
    """Set if the API server is unavailable or rejected the pool's status; later actions were not executed."""

    @property
    def diagnosis(self) -> str:
        """Reasons why pods are not ready; empty if unknown."""
        return next((done.diagnosis for done in self.done if done.diagnosis), "")


def target_of(manifest: Mapping[str, Any]) -> str:
    """Return the kind and name of an object, as shown in problems and summaries."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def as_json(action: Action) -> Json:
    """Convert an action to JSON: class, summary and fields."""
    found = {part.name: getattr(action, part.name) for part in fields(action)}
    plain = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found.items()}
    return {"action": type(action).__name__, "summary": action.summary, **plain}
