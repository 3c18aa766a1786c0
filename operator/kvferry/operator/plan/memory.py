"""State that is kept in memory between the reconciles of a pool, as an immutable value.

The state saves API calls, and keeps the autoscaler's history and the times of the last changes. It is not persisted; a
restarted operator reads and applies everything once and then makes the same decisions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from blake3 import blake3

from kvferry.operator.objects.pool_tls import tls_config
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.plan.actions import (
    ApplyObject,
    Autoscale,
    CreateKeys,
    CreateRecord,
    DeleteObject,
    Done,
    PruneRecords,
    SeedScaler,
    WriteStatus,
    WriteTls,
)
from kvferry.operator.plan.autoscale import Recommendations
from kvferry.operator.plan.revisions import recorded
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Place
from kvferry.operator.pool.ownership import version_of
from kvferry.operator.pool.quantities import canonical
from kvferry.operator.pool.spec import InferencePool, Json
from kvferry.operator.pool.tls_state import TlsState, read_state

_RESYNC_SECONDS = 600.0
_SCALING_LOG_ENTRIES = 5

_OPTIONAL_KINDS = {POD_MONITOR: "PodMonitor", EXTENSION_POOL: "InferencePool"}


@dataclass(frozen=True, slots=True)
class Applied:
    """Digest and version of an object at its last apply."""

    digest: bytes
    """Digest of the applied manifest."""
    version: str
    """Version of the applied fields of the stored object."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Results of earlier reconcile passes over one pool."""

    uid: str
    """Uid of the pool; a pool of the same name with a different uid starts with an empty memory."""
    resynced_at: float
    """Time of the last resync, in which all objects are applied even if they appear unchanged."""
    moved_at: float
    """Time when `progress` last changed."""
    progress: tuple[object, ...] = ()
    """Numbers of pods by role and revision in the last pass."""
    applied: Mapping[Place, Applied] = field(default_factory=dict)
    removed: frozenset[Place] = frozenset()
    """Unwanted objects that are known to be deleted or to have a different owner."""
    records: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """Recorded Deployments, by revision and role."""
    has_keys: bool = False
    """Whether the Secret with the generated keys was created or found since the last resync."""
    keys: str = ""
    """Identifier of the generated keys, if they replaced lost keys since the operator started."""
    tls: TlsState | None = None
    """State of the managed TLS as last written; `None` if it was not written yet."""
    holds_ca: bool = False
    """Whether the executor holds the private key of the newest CA, which has not signed yet."""
    verified_generation: int = -1
    """Latest generation of the spec whose manifests were built without an error."""
    histories: Mapping[str, Recommendations] = field(default_factory=dict)
    """History of the autoscaler, by role."""
    seeded: Mapping[str, str] = field(default_factory=dict)
    """Scaling mode in which `spec.replicas` of a role's scaler got an owner, by role."""
    scaling_log: tuple[Json, ...] = ()
    settled_at: float | None = None
    """Time when the rollout completed; `None` while the rollout waits for pods."""
    pruned_for: tuple[frozenset[str], int] | None = None
    """Needed revisions and history limit of the last `PruneRecords`; `None` before the first one."""
    status: Json | None = None
    """Status of the pool as last written; `None` before the first write."""
    observed_at: float = float("-inf")
    """Time when `status.observedAt` was last written."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reason by condition type, from the last event, or, after a restart, from the stored status."""


def begin_pass(
    memory: PassMemory | None,
    body: Mapping[str, Any],
    installed: frozenset[tuple[str, str]],
    now: float,
) -> PassMemory:
    """Return the memory for a pass: empty if the pool's uid has changed, and without applied objects if a resync is
    due.

    Args:
        memory: result of the last pass; `None` for the first pass.
        body: the InferencePool object.
        installed: optional kinds that the cluster serves, as (apiVersion, plural). Objects of other kinds are dropped.
        now: monotonic time in seconds.
    """
    uid = body["metadata"]["uid"]
    if memory is None or memory.uid != uid:
        memory = PassMemory(uid, now, now)
    if now - memory.resynced_at > _RESYNC_SECONDS:
        memory = replace(memory, applied={}, removed=frozenset(), has_keys=False, resynced_at=now)
    missing = {kind for resource, kind in _OPTIONAL_KINDS.items() if resource not in installed}
    if any(kind in missing for kind, _ in (*memory.applied, *memory.removed)):
        memory = replace(
            memory,
            applied={place: applied for place, applied in memory.applied.items() if place[0] not in missing},
            removed=frozenset(place for place in memory.removed if place[0] not in missing),
        )
    if not memory.reasons:
        conditions = (body.get("status") or {}).get("conditions") or ()
        memory = replace(memory, reasons={entry["type"]: entry["reason"] for entry in conditions})
    return memory


def remember(memory: PassMemory, done: Iterable[Done], pool: InferencePool, now: float, stamp: str) -> PassMemory:
    """Return `memory` updated with completed actions.

    Args:
        memory: memory before the actions.
        done: the completed actions, in order.
        pool: the pool.
        now: monotonic time in seconds.
        stamp: wall-clock time, RFC 3339.
    """
    for one in done:
        memory = _remember(memory, one, pool, now, stamp)
    return memory


def _remember(memory: PassMemory, done: Done, pool: InferencePool, now: float, stamp: str) -> PassMemory:
    match done.action:
        case ApplyObject(manifest=manifest):
            place = place_of(manifest)
            applied = Applied(digest_of(manifest), version_of(done.stored or {}))
            if place == ("ConfigMap", names.tls_object(pool.name)):
                memory = replace(memory, tls=read_state(manifest["data"]))
            return replace(memory, applied={**memory.applied, place: applied}, removed=memory.removed - {place})
        case CreateKeys(is_replacement=is_replacement):
            is_redrawn = is_replacement and done.stored is not None
            keys = str((done.stored or {})["metadata"]["uid"])[:8] if is_redrawn else memory.keys
            return replace(memory, has_keys=True, keys=keys)
        case WriteTls(issues=issues):
            state = read_state((done.stored or {}).get("data") or {})
            manifest = tls_config(pool, state or TlsState())
            applied = Applied(digest_of(manifest), version_of(done.stored or {}))
            return replace(
                memory, tls=state, holds_ca=not issues, applied={**memory.applied, place_of(manifest): applied}
            )
        case CreateRecord(revision=revision):
            kept = recorded(pool, revision, done.stored or {})
            return replace(memory, records={**memory.records, revision: kept})
        case SeedScaler(role=role, mode=mode):
            return replace(memory, seeded={**memory.seeded, role: mode})
        case Autoscale() as scaled:
            entry = {
                "role": scaled.role,
                "from": scaled.previous,
                "to": scaled.replicas,
                "at": stamp,
                "reason": scaled.reason,
            }
            return replace(memory, scaling_log=(entry, *memory.scaling_log)[:_SCALING_LOG_ENTRIES])
        case DeleteObject(kind=kind, name=name, uid=uid):
            place = (kind, name)
            left = {other: applied for other, applied in memory.applied.items() if other != place}
            return replace(memory, applied=left, removed=memory.removed if uid else memory.removed | {place})
        case PruneRecords(needed=needed, limit=limit):
            gone = {name.removeprefix(f"{pool.name}-") for name in done.deleted}
            kept_records = {revision: made for revision, made in memory.records.items() if revision not in gone}
            return replace(memory, records=kept_records, pruned_for=(needed, limit))
        case WriteStatus(manifest=manifest) if manifest["kind"] == "InferencePool":
            return replace(memory, status=manifest["status"])
        case _:
            return memory


def place_of(manifest: Mapping[str, Any]) -> Place:
    """Return the kind and name of an object."""
    return str(manifest["kind"]), str(manifest["metadata"]["name"])


def digest_of(manifest: Mapping[str, Any]) -> bytes:
    """Compute the digest of a manifest; manifests with equal values have equal digests."""
    return blake3(msgspec.json.encode(canonical(manifest), order="sorted")).digest(16)
