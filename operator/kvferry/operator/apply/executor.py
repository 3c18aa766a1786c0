"""Execution of actions against the Kubernetes API, in order: server-side apply, ownership checks, rejections as
problems.

After a rejected action, execution continues with the next action. It stops early if a required action is rejected (the
pool is replanned) or if the API server is unavailable (the pass fails).
"""

import base64
import itertools
import logging
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.errors import KvferryError, Unavailable
from kvferry.operator.api import ApiRefusal, FieldConflict, KubeApi
from kvferry.operator.apply.certificates import Certificates
from kvferry.operator.objects.keys import key_secret_data
from kvferry.operator.plan.actions import (
    Action,
    ApplyObject,
    Autoscale,
    CreateKeys,
    CreateRecord,
    DeleteObject,
    DiagnosePods,
    Done,
    EmitEvent,
    MarkDeletionCosts,
    Outcome,
    Problem,
    PruneRecords,
    SeedScaler,
    SetReplicas,
    WriteStatus,
    WriteTls,
    target_of,
)
from kvferry.operator.plan.deletion_cost import changed_costs
from kvferry.operator.plan.pod_diagnostics import mount_failures, needs_events, troubles
from kvferry.operator.plan.revisions import superfluous
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key
from kvferry.operator.pool.ownership import entry_removal, is_orphan, owner_of
from kvferry.operator.pool.spec import Json

_log = logging.getLogger(__name__)
_REPLICAS = ".spec.replicas"
_MAX_CAUSES = 3
_MAX_EVENTS = 500


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """Pool whose actions are executed."""

    key: Key
    uid: str
    stuck: tuple[str, ...] = ()
    """Failures reported by the Deployment controller, for `DiagnosePods`."""


class NameTaken(ApiRefusal):
    """An object with the same name exists, and the pool is not its controller."""

    def __init__(self, target: str, *, is_terminating: bool) -> None:
        why = "is being deleted" if is_terminating else "exists and does not belong to this pool; rename it or the pool"
        super().__init__(409, "NameTaken", f"{target} {why}")


class Executor:
    """Executor of the planned actions. Different pools may be executed in parallel."""

    def __init__(
        self,
        api: KubeApi,
        instance: str,
        stamp: Callable[[], str],
        applied: Callable[[Json], None] = lambda body: None,
        wall: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            api: client for the planned writes and reads.
            instance: identity of the operator, for events.
            stamp: returns the wall-clock time as RFC 3339 text.
            applied: called with every object that was applied or created, or was found to exist, on the thread that
                executes.
            wall: returns the wall-clock time in seconds since the epoch.
        """
        self._api = api
        self._instance = instance
        self._stamp = stamp
        self._applied = applied
        self._certificates = Certificates(api, wall)

    def run(self, pool: PoolTarget, actions: Sequence[Action]) -> Outcome:
        """Execute actions in order; return the completed actions and the rejections."""
        done: list[Done] = []
        problems: dict[str, Problem] = {}
        for action in actions:
            try:
                result = self._execute(pool, action)
            except Unavailable as error:
                return Outcome(tuple(done), problems, failure=error)
            except ApiRefusal as refusal:
                if isinstance(action, WriteStatus) and action.manifest["kind"] == "InferencePool":
                    return Outcome(tuple(done), problems, failure=refusal)
                problems[action.target] = problem_of(
                    action.target, pool.key.namespace, refusal, self._held(action, refusal)
                )
                if _is_required(action):
                    return Outcome(tuple(done), problems, must_replan=True)
                continue
            done.append(result)
            if _differs(result):
                return Outcome(tuple(done), problems, must_replan=True)
        return Outcome(tuple(done), problems)

    def _execute(self, pool: PoolTarget, action: Action) -> Done:
        """Execute one action; return its result.

        Raises:
            ApiRefusal: the API server rejected the action.
            Unavailable: the API server is unavailable.
        """
        match action:
            case ApplyObject():
                return self._apply(action)
            case CreateKeys():
                keys = key_secret_data(*(secrets.token_hex(32) for _ in range(3)))
                data = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
                created = self._api.create({**action.manifest, "data": data})
                self._applied(created or action.manifest)
                return Done(action, created)
            case WriteTls():
                self._check_owner(action.config)
                stored = self._certificates.write(pool.uid, action)
                self._applied(stored)
                return Done(action, stored)
            case CreateRecord():
                return self._create_record(pool, action)
            case SeedScaler():
                return self._seed(action)
            case Autoscale():
                return Done(action, self._api.apply(action.manifest, manager=names.AUTOSCALER_MANAGER))
            case SetReplicas(name=name, replicas=replicas):
                change = {"spec": {"replicas": replicas}}
                return Done(action, self._api.patch("apps/v1", "Deployment", pool.key.namespace, name, change))
            case MarkDeletionCosts():
                return self._mark(pool, action)
            case DeleteObject():
                return self._delete(pool, action)
            case PruneRecords():
                return self._prune(pool, action)
            case DiagnosePods():
                return self._diagnose(pool, action)
            case WriteStatus():
                return Done(action, self._api.apply(action.manifest, subresource="status", force=True))
            case EmitEvent():
                return self._emit(pool, action)

    def _apply(self, action: ApplyObject) -> Done:
        is_created = action.check_owner and not self._check_owner(action.manifest)
        stored = self._api.apply(action.manifest)
        # Such an entry owns every field of the object besides the operator, which could then remove none of them.
        removal = entry_removal(stored, {names.RESET_MANAGER})
        if removal:
            meta = stored["metadata"]
            stored = self._api.json_patch(
                action.manifest["apiVersion"], action.manifest["kind"], meta["namespace"], meta["name"], removal
            )
        self._applied(stored)
        return Done(action, stored, is_created=is_created)

    def _held(self, action: Action, refusal: ApiRefusal) -> Json:
        """Return the object whose fields other managers own, to name its entries of managed fields; empty if the action
        was rejected for a different reason, or if the object cannot be read."""
        if not isinstance(refusal, FieldConflict) or not isinstance(action, ApplyObject | SeedScaler | Autoscale):
            return {}
        made = action.manifest
        try:
            found = self._api.get(
                made["apiVersion"], made["kind"], made["metadata"]["namespace"], made["metadata"]["name"]
            )
        except KvferryError as error:
            _log.debug("cannot read %s: %s", action.target, error.message)
            return {}
        return found or {}

    def _check_owner(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether an object exists.

        Raises:
            NameTaken: it does not belong to the pool, or is being deleted.
        """
        meta = manifest["metadata"]
        found = self._api.get(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])
        if found is None:
            return False
        is_terminating = "deletionTimestamp" in found["metadata"]
        is_ours = owner_of(found) == owner_of(manifest) or is_orphan(found)
        if not is_ours or is_terminating:
            owners = found["metadata"].get("ownerReferences") or ()
            pools = {owner["name"] for owner in owners if owner["kind"] == "InferencePool"}
            # The object belongs to an earlier pool of the same name and has not been garbage-collected yet.
            was_ours = meta["ownerReferences"][0]["name"] in pools
            raise NameTaken(target_of(manifest), is_terminating=is_terminating or was_ours)
        return True

    def _create_record(self, pool: PoolTarget, action: CreateRecord) -> Done:
        stored = self._api.create(action.manifest)
        if stored is None:
            name = action.manifest["metadata"]["name"]
            found = self._api.get("apps/v1", "ControllerRevision", pool.key.namespace, name)
            if found is None or owner_of(found) != pool.uid:
                raise NameTaken(action.target, is_terminating=False)
            stored = found
        self._applied(stored)
        return Done(action, stored)

    def _seed(self, action: SeedScaler) -> Done:
        try:
            return Done(action, self._api.apply(action.manifest, manager=names.SEED_MANAGER))
        except FieldConflict as conflict:
            if any(c.field != _REPLICAS for c in conflict.conflicts):
                raise
            return Done(action)

    def _mark(self, pool: PoolTarget, action: MarkDeletionCosts) -> Done:
        labels = {names.LABEL_POOL: pool.key.pool, names.LABEL_ROLE: action.role}
        current = {}
        for pod in self._api.list("v1", "Pod", pool.key.namespace, labels):
            annotations = pod["metadata"].get("annotations") or {}
            current[pod["metadata"]["name"]] = int(annotations.get(names.ANNOTATION_DELETION_COST, 0))
        for name, cost in changed_costs(action.costs, current).items():
            change = {"metadata": {"annotations": {names.ANNOTATION_DELETION_COST: str(cost)}}}
            self._api.patch("v1", "Pod", pool.key.namespace, name, change)
        return Done(action)

    def _delete(self, pool: PoolTarget, action: DeleteObject) -> Done:
        place, uid = pool.key.namespace, action.uid
        if not uid:
            found = self._api.get(action.api_version, action.kind, place, action.name)
            if found is None or owner_of(found) != pool.uid:
                return Done(action)
            uid = found["metadata"]["uid"]
        self._api.delete(action.api_version, action.kind, place, action.name, uid)
        return Done(action)

    def _diagnose(self, pool: PoolTarget, action: DiagnosePods) -> Done:
        place = pool.key.namespace
        pods = list(self._api.list("v1", "Pod", place, {names.LABEL_POOL: pool.key.pool}))
        mounts = {}
        if needs_events(pods):
            fields = {"involvedObject.kind": "Pod", "type": "Warning", "reason": "FailedMount"}
            events = itertools.islice(self._api.list("v1", "Event", place, fields=fields), _MAX_EVENTS)
            mounts = mount_failures(events)
        return Done(action, diagnosis="; ".join([*troubles(pods, mounts), *pool.stuck][:_MAX_CAUSES]))

    def _prune(self, pool: PoolTarget, action: PruneRecords) -> Done:
        labels = {names.LABEL_POOL: pool.key.pool}
        listed = self._api.list("apps/v1", "ControllerRevision", pool.key.namespace, labels)
        uids = {found["metadata"]["name"]: found for found in listed if owner_of(found) == pool.uid}
        gone = superfluous(uids.values(), action.needed, action.limit)
        for name in gone:
            uid = uids[name]["metadata"]["uid"]
            self._api.delete("apps/v1", "ControllerRevision", pool.key.namespace, name, uid)
        return Done(action, deleted=tuple(gone))

    def _emit(self, pool: PoolTarget, action: EmitEvent) -> Done:
        stamp = self._stamp()
        event: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{pool.key.pool}.", "namespace": pool.key.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": "InferencePool",
                "namespace": pool.key.namespace,
                "name": pool.key.pool,
                "uid": pool.uid,
            },
            "type": action.type,
            "reason": action.reason,
            "message": action.message[:1024],
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            self._api.create(event)
        except KvferryError as error:
            _log.warning("pool %s: cannot write event %s: %s", pool.key, action.reason, error.message)
        return Done(action)


def problem_of(target: str, namespace: str, refusal: ApiRefusal, held: Mapping[str, Any]) -> Problem:
    """Convert the rejection of a write to a problem for the pool's status.

    Args:
        target: kind and name of the object.
        namespace: namespace of the object.
        refusal: the rejection.
        held: the object as stored; empty if it is not known.
    """
    if not isinstance(refusal, FieldConflict):
        message = refusal.message if refusal.message.startswith(target) else f"{target}: {refusal.message}"
        return Problem("Refused", message)
    others = [conflict for conflict in refusal.conflicts if conflict.manager not in names.OWN_MANAGERS]
    managers = {conflict.manager for conflict in others}
    owners = ", ".join(sorted(managers))
    owned = ", ".join(sorted({conflict.field for conflict in others}))
    kind, _, name = target.partition(" ")
    if owned != _REPLICAS:
        removal = entry_removal(held, managers) if held else []
        remedy = (
            f"return them to the operator: kubectl patch {kind} {name} -n {namespace} --type json -p "
            f"{shlex.quote(msgspec.json.encode(removal).decode())}"
            if removal
            else "delete the object, and the operator creates it again"
        )
        return Problem(
            "FieldsOwnedByOthers",
            f"{target}: {owners} owns {owned}, so the operator does not change them. Once {owners} no longer writes "
            f"them, {remedy}",
        )
    instead = (
        f"Set the role's scaling.mode to External to let {owners} scale it"
        if kind == "PoolRoleScaler"
        else "Scale the role's PoolRoleScaler instead"
    )
    return Problem(
        "OtherManager",
        f"{target}: {owners} owns spec.replicas too, so the operator does not change it. {instead}; or, once {owners} "
        f"no longer writes it, return the field to the operator, with the desired number for N: kubectl patch {kind} "
        f'{name} -n {namespace} --type merge --field-manager {names.FIELD_MANAGER} -p \'{{"spec":{{"replicas":N}}}}\'',
    )


def _is_required(action: Action) -> bool:
    """Return whether later actions assume that this action succeeds."""
    match action:
        case ApplyObject(is_required=required):
            return required
        case SeedScaler() | Autoscale() | CreateRecord():
            return True
        case _:
            return False


def _differs(done: Done) -> bool:
    """Return whether the stored object differs from the planned object, which would make later actions wrong."""
    match done:
        case Done(action=SeedScaler() as seed, stored=stored) if stored is not None:
            return int(stored["spec"]["replicas"]) != seed.replicas
        case Done(action=CreateRecord(manifest=manifest), stored=stored) if stored is not None:
            return bool(stored.get("data") != manifest["data"])
        case _:
            return False
