"""What the steps of one reconcile share: the pool, the facts, what earlier passes remembered, problems met."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.core.errors import Unavailable
from kvferry.operator import names
from kvferry.operator.api import ApiRefusal, FieldConflict, KubeApi
from kvferry.operator.autoscale import History
from kvferry.operator.children import Children
from kvferry.operator.facts import Key, PoolFacts
from kvferry.operator.spec import Json, Pool
from kvferry.operator.status import Problem

_REPLICAS = ".spec.replicas"


@dataclass(slots=True)
class Memory:
    """What the reconciles of a pool remember. Losing it costs a few calls, never a decision."""

    uid: str
    """The pool's; another pool of the same name begins anew."""
    children: Children
    applied_at: float
    """When all objects were last applied whatever was remembered of them."""
    revisions: dict[str, dict[str, Json]] = field(default_factory=dict)
    """Deployments by revision and role, as recorded."""
    born_at: float = 0.0
    """When this memory began."""
    keys_until: float = float("-inf")
    """Till when the Secret of keys is taken to be there; nobody watches it, so that it is asked for anew."""
    readable: int = -1
    """The generation of the spec that pods were seen to be makeable from."""
    histories: dict[str, History] = field(default_factory=dict)
    """Of the autoscaler, by role."""
    seeded: dict[str, str] = field(default_factory=dict)
    """Roles whose scaler has a number of somebody else's, and the mode in which that was seen to."""
    scaling_log: list[Json] = field(default_factory=list)
    progress: tuple[object, ...] = ()
    moved_at: float = 0.0
    """When `progress` last changed."""
    settled_at: float | None = None
    """Since when nothing is waited for; `None`: something is."""
    pruned_for: tuple[frozenset[str], int] | None = None
    """The revisions that were needed, and the limit, when superfluous records were last removed."""
    status: Json | None = None
    """As last written."""
    told: dict[str, str] = field(default_factory=dict)
    """Reason of each condition, as last said in an event."""


@dataclass(slots=True)
class PoolPass:
    """One reconcile of one pool."""

    api: KubeApi
    key: Key
    pool: Pool
    facts: PoolFacts
    memory: Memory
    before: Mapping[str, Any]
    """The status as it stands."""
    now: float
    """Seconds of a monotonic clock."""
    stamp: str
    """The wall clock's, RFC 3339."""
    default_image: str
    installed: frozenset[tuple[str, str]]
    contested: Problem | None = None
    refused: Problem | None = None
    rollback: Problem | None = None
    extension: Problem | None = None

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """A refusal of one object keeps no other from being applied; it becomes a condition.

        Raises:
            Unavailable: the API server is away; nothing else can be done either.
        """
        try:
            yield
        except Unavailable:
            raise
        except FieldConflict as conflict:
            self._conflict(what, conflict)
        except ApiRefusal as refusal:
            self.refused = Problem("Refused", f"{what}: {refusal.message}")

    def _conflict(self, what: str, conflict: FieldConflict) -> None:
        others = [c for c in conflict.conflicts if c.manager not in names.OWN_MANAGERS]
        owners = ", ".join(sorted({c.manager for c in others}))
        fields = ", ".join(sorted({c.field for c in others}))
        if fields == _REPLICAS:
            kind, _, name = what.partition(" ")
            instead = (
                f"Set the role's scaling.mode to External to let {owners} decide"
                if kind == "PoolRoleScaler"
                else "Scale the role's PoolRoleScaler instead"
            )
            self.contested = Problem(
                "OtherManager",
                f"{what}: {owners} writes spec.replicas too, so the operator leaves the number alone. {instead}; or, "
                f"once that writer is gone, give the field back, with your number for N: kubectl patch {kind} "
                f'{name} --type merge --field-manager {names.FIELD_MANAGER} -p \'{{"spec":{{"replicas":N}}}}\'',
            )
        else:
            self.refused = Problem(
                "FieldsOwnedByOthers",
                f"{what}: {owners} owns {fields}; remove these fields there, or change them in the pool",
            )
