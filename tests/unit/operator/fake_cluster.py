"""An in-memory API server for one namespace, and a cluster whose Deployments become ready on request."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unit.operator.pools import IMAGE, body

from kvferry.core.errors import Unavailable
from kvferry.operator.api import ApiRefusal, Conflict, FieldConflict
from kvferry.operator.apply.executor import Executor, PoolTarget
from kvferry.operator.plan.actions import Action, Outcome
from kvferry.operator.plan.template_policy import TemplatePolicy
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.process.watches import POLLED, WATCHED
from kvferry.operator.reconcile import Reconciler

KEY = Key("team", "chat")
Place = tuple[str, str, str]
"""API version, kind and name."""


class FakeApi:
    """An API server with one namespace. Server-side apply is a deep merge; field owners exist for `spec.replicas` and
    owner references only.
    """

    def __init__(self) -> None:
        self.objects: dict[Place, dict[str, Any]] = {}
        self.replica_owners: dict[Place, str] = {}
        self.metadata_owners: dict[Place, set[str]] = {}
        """Field managers that applied owner references."""
        self.writes: list[str] = []
        self.refuse: set[str] = set()
        """Kinds whose writes are refused."""
        self.fail_after = -1
        """Number of writes after which the server is unavailable."""
        self._numbers = itertools.count(1)

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.objects.get((api_version, kind, name)))

    def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Iterator[dict[str, Any]]:
        for (_, found, _), held in list(self.objects.items()):
            own = held["metadata"].get("labels") or {}
            if found == kind and all(own.get(k) == v for k, v in (labels or {}).items()):
                yield copy.deepcopy(held)

    def apply(
        self,
        manifest: Mapping[str, Any],
        *,
        manager: str = names.FIELD_MANAGER,
        subresource: str = "",
        force: bool = False,
    ) -> dict[str, Any]:
        place = _place(manifest)
        self._write("apply", place)
        replicas = (manifest.get("spec") or {}).get("replicas")
        held = self.objects.get(place)
        if replicas is not None:
            owner = self.replica_owners.get(place, manager)
            if owner not in names.OWN_MANAGERS and held is not None and held["spec"].get("replicas") != replicas:
                raise FieldConflict("conflict", (Conflict(owner, ".spec.replicas"),))
            if owner in names.OWN_MANAGERS:
                self.replica_owners[place] = manager
        before = copy.deepcopy(held)
        stored = self._new(manifest) if held is None else held
        _merge(stored, copy.deepcopy(dict(manifest)))
        if before is not None and before != stored:
            stored["metadata"]["resourceVersion"] = str(next(self._numbers))
            if before.get("spec") != stored.get("spec") and "generation" in stored["metadata"]:
                stored["metadata"]["generation"] += 1
        if not subresource:
            owners = self.metadata_owners.setdefault(place, set())
            if "ownerReferences" in manifest["metadata"]:
                owners.add(manager)
            elif owners == {manager}:  # The fields are removed when their last manager no longer applies them.
                owners.clear()
                del stored["metadata"]["ownerReferences"], stored["metadata"]["labels"]
        self.objects[place] = stored
        return copy.deepcopy(stored)

    def patch(self, api_version: str, kind: str, namespace: str, name: str, change: Mapping[str, Any]) -> None:
        place = (api_version, kind, name)
        self._write("patch", place)
        _merge(self.objects[place], copy.deepcopy(dict(change)))

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        if manifest["kind"] == "Event":
            return dict(manifest)
        place = _place(manifest)
        self._write("create", place)
        if place in self.objects:
            return None
        self.objects[place] = _merge(self._new(manifest), copy.deepcopy(dict(manifest)))
        return copy.deepcopy(self.objects[place])

    def would_create(self, manifest: Mapping[str, Any]) -> bool:
        return _place(manifest) not in self.objects

    def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        place = _place(manifest)
        self._write("replace", place)
        held = self.objects[place]
        uid = held["metadata"]["uid"]
        if manifest["metadata"].get("uid", uid) != uid:
            raise ApiRefusal(409, "Conflict", "the uid differs")
        self.objects[place] = copy.deepcopy(dict(manifest))
        self.objects[place]["metadata"] |= {"uid": uid, "resourceVersion": str(next(self._numbers))}
        return copy.deepcopy(self.objects[place])

    def delete(self, api_version: str, kind: str, namespace: str, name: str, uid: str = "") -> None:
        place = (api_version, kind, name)
        self._write("delete", place)
        held = self.objects.get(place)
        if held is not None and uid in ("", held["metadata"]["uid"]):
            del self.objects[place]

    def add(self, manifest: Mapping[str, Any]) -> None:
        """Create an object, as a writer other than the operator does."""
        self.objects[_place(manifest)] = _merge(self._new(manifest), copy.deepcopy(dict(manifest)))

    def _new(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        meta: dict[str, Any] = {"uid": f"uid-{number}", "resourceVersion": str(number)}
        if manifest["kind"] != "Service":  # Kubernetes gives Services no generation
            meta["generation"] = 1
        return {"metadata": meta}

    def _write(self, verb: str, place: Place) -> None:
        if self.fail_after == 0:
            raise Unavailable("no API server")
        self.fail_after -= 1
        self.writes.append(f"{verb} {place[1]} {place[2]}")
        if place[1] in self.refuse:
            raise ApiRefusal(403, "Forbidden", "not allowed")


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class RecordingExecutor(Executor):
    """An executor that records its actions."""

    actions: list[tuple[Action, ...]]

    def run(self, pool: PoolTarget, actions: Sequence[Action]) -> Outcome:
        self.actions.append(tuple(actions))
        return super().run(pool, actions)


class Cluster:
    """One pool, its operator, and a Deployment controller."""

    def __init__(self, installed: frozenset[tuple[str, str]] = frozenset(), **spec: Any) -> None:
        self.api, self.clock = FakeApi(), FakeClock()
        self.body = {**body(**spec), "status": {}}
        self.installed = installed
        self.template_policy = TemplatePolicy.ANY
        """The operator's setting for templates, from its next start on."""
        self.restart()
        self.report = None
        self.api.objects[_place(self.body)] = self.body

    def restart(self) -> None:
        """Replace the operator by a new one without the memory of the first."""
        self.reconciler = Reconciler(
            self.api,
            self.clock,
            identity="op",
            default_image=IMAGE,
            template_policy=self.template_policy,
            installed=lambda: self.installed,
        )
        self.executor = RecordingExecutor(self.api, "op", lambda: "now", wall=self.clock.wall)
        self.executor.actions = []
        self.reconciler._executor = self.executor

    def change(self, **spec: Any) -> None:
        self.body["spec"] = body(**spec)["spec"]
        self.body["metadata"]["generation"] += 1

    def reconcile(self) -> list[str]:
        """Run one pass over the present state of the watches; return the writes."""
        before = len(self.api.writes)
        store = Store()
        for held in list(self.api.objects.values()):
            watched = names.kind_of(held)
            if watched in WATCHED or watched in POLLED:
                store.take(watched, copy.deepcopy(held), gone=False)
        keys = ("v1", "Secret", names.keys_secret(KEY.pool))
        store.take_keys(KEY, missing=keys not in self.api.objects)
        store.take_tls(KEY, missing=("v1", "Secret", names.tls_object(KEY.pool)) not in self.api.objects)
        store.take_report(KEY, self.report)
        self.clock.now += 1
        self.again = self.reconciler.reconcile(KEY, store.facts(KEY))
        return self.api.writes[before:]

    def become_ready(self) -> None:
        """Make the pods of every Deployment ready."""
        for (_, kind, _), held in self.api.objects.items():
            if kind == "Deployment":
                n = held["spec"].get("replicas", 1)
                held["status"] = {"observedGeneration": held["metadata"]["generation"]} | dict.fromkeys(
                    ("replicas", "readyReplicas", "updatedReplicas"), n
                )

    def settle(self, passes: int = 60) -> None:
        """Reconcile until a pass writes nothing."""
        for _ in range(passes):
            if not self.reconcile():
                return
            self.become_ready()
        raise AssertionError(f"passes do not stop writing: {self.api.writes[-20:]}")

    def condition(self, type_: str) -> tuple[str, str, str]:
        found = {c["type"]: c for c in self.body["status"]["conditions"]}[type_]
        return found["status"], found["reason"], found["message"]

    def replicas(self, kind: str) -> dict[str, int]:
        return {name: o["spec"]["replicas"] for (_, k, name), o in self.api.objects.items() if k == kind}


def _place(manifest: Mapping[str, Any]) -> Place:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def _merge(into: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    for name, value in change.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
    return into
