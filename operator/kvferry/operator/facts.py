"""What the operator keeps of the objects that it watches: a few numbers each, not the objects.

Thousands of Deployments fit into little memory this way, and a decision cannot depend on a field that nobody named.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.core.errors import InvariantBroken
from kvferry.operator import names


@dataclass(frozen=True, slots=True)
class Key:
    """A pool's place."""

    namespace: str
    pool: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pool}"


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    """One Deployment of ours."""

    name: str
    uid: str
    owner: str
    """The pool's uid."""
    role: str
    revision: str
    """Empty: the gateway's."""
    generation: int
    settled: bool
    """Its controller has seen the latest generation, so that the numbers below speak of it."""
    desired: int
    pods: int
    """That exist, terminating ones aside."""
    ready: int
    updated: int
    stuck: str
    """What its controller says stands in the way; empty: nothing."""
    deleting: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "DeploymentFacts":
        """From the object."""
        meta, spec, status = body["metadata"], body["spec"], body.get("status") or {}
        labels = meta.get("labels") or {}
        stuck = ""
        for condition in status.get("conditions") or ():
            failed = condition["type"] == "ReplicaFailure" and condition["status"] == "True"
            late = condition["type"] == "Progressing" and condition["status"] == "False"
            if failed or late:
                stuck = str(condition.get("message") or condition.get("reason") or "")
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            owner=owner_of(body),
            role=labels.get(names.LABEL_ROLE, ""),
            revision=labels.get(names.LABEL_REVISION, ""),
            generation=meta.get("generation", 0),
            settled=status.get("observedGeneration", 0) >= meta.get("generation", 0),
            desired=spec.get("replicas", 1),
            pods=status.get("replicas", 0),
            ready=status.get("readyReplicas", 0),
            updated=status.get("updatedReplicas", 0),
            stuck=stuck,
            deleting="deletionTimestamp" in meta,
        )


@dataclass(frozen=True, slots=True)
class ScalerFacts:
    """One role's scaler."""

    role: str
    uid: str
    owner: str
    replicas: int
    generation: int
    shown: tuple[int, str]
    """Its status: replicas and selector."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ScalerFacts":
        """From the object."""
        status = body.get("status") or {}
        spec = body["spec"]
        shown = (status.get("replicas", -1), status.get("selector", ""))
        meta = body["metadata"]
        return cls(spec["role"], meta["uid"], owner_of(body), spec.get("replicas", 1), meta.get("generation", 0), shown)


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """One Service of ours."""

    name: str
    version: str
    """Its resourceVersion: it has no generation, and no status that we would see change."""
    address: str
    """Its address inside the cluster; empty: it has none."""
    http_port: int = 0
    """Of its port named http; 0: it has none."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ServiceFacts":
        """From the object."""
        address = body["spec"].get("clusterIP") or ""
        ports = {port.get("name"): port["port"] for port in body["spec"].get("ports") or ()}
        return cls(
            body["metadata"]["name"],
            body["metadata"]["resourceVersion"],
            "" if address == "None" else address,
            ports.get("http", 0),
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker as a gateway sees it."""

    name: str
    role: str
    takes_work: bool
    why_not: str = ""
    fingerprint: str = ""
    family: str = ""
    connector: str = ""
    model_digest: str = ""
    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    exports: int = 0

    @property
    def load(self) -> int:
        """Requests that it holds."""
        return max(self.in_flight, self.running + self.waiting)

    @property
    def kv_use(self) -> float:
        """Share of its blocks in use; 0 for one without blocks."""
        return 1 - self.blocks_free / self.blocks_total if self.blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a gateway says about its workers."""

    at: float
    """When it was read, by the operator's clock."""
    workers: tuple[WorkerReport, ...]
    held: int = 0
    """Requests that wait for a pool without workers."""
    handoffs: Mapping[str, int] = field(default_factory=dict)
    """By outcome, since the gateway started."""
    gateway: str = ""
    """Which process said this."""

    def of_role(self, role: str) -> tuple[WorkerReport, ...]:
        """The workers of one role."""
        return tuple(worker for worker in self.workers if worker.role == role)


@dataclass(slots=True)
class PoolFacts:
    """Everything that is known of one pool."""

    body: Mapping[str, Any] | None = None
    """The pool's own object; `None`: it does not exist, or has not been seen yet."""
    deployments: dict[str, DeploymentFacts] = field(default_factory=dict)
    scalers: dict[str, ScalerFacts] = field(default_factory=dict)
    """By role."""
    services: dict[str, ServiceFacts] = field(default_factory=dict)
    report: FleetReport | None = None

    def take(self, kind: str, body: Mapping[str, Any], *, gone: bool) -> bool:
        """Note one object; whether anything is otherwise than before."""
        name = body["metadata"]["name"]
        match kind:
            case "InferencePool":
                before, self.body = self.body, None if gone else body
                return _matters(before) != _matters(self.body)
            case "Deployment":
                known = self.deployments.get(name)
                # The answer to a write of ours may be here before the watch tells of what was before it.
                if known and known.uid == body["metadata"]["uid"] and not gone and _is_older(body, known.generation):
                    return False
                return _put(self.deployments, name, None if gone else DeploymentFacts.of(body))
            case "PoolRoleScaler":
                role = body["spec"]["role"]
                scaler = self.scalers.get(role)
                if scaler and not gone and scaler.uid == body["metadata"]["uid"] and _is_older(body, scaler.generation):
                    return False
                return _put(self.scalers, role, None if gone else ScalerFacts.of(body))
            case "Service":
                return _put(self.services, name, None if gone else ServiceFacts.of(body))
        raise InvariantBroken(f"nobody watches {kind}")

    def owned_by(self, uid: str) -> "PoolFacts":
        """Without what is left of an earlier pool of the same name, which is on its way out."""
        return replace(
            self,
            deployments={name: d for name, d in self.deployments.items() if d.owner == uid},
            scalers={role: s for role, s in self.scalers.items() if s.owner == uid},
        )

    def drop(self, kind: str, pool: str, name: str) -> bool:
        """Forget an object by its name; whether it was known."""
        match kind:
            case "InferencePool":
                known, self.body = self.body is not None and name == pool, None if name == pool else self.body
                return known
            case "Deployment":
                return self.deployments.pop(name, None) is not None
            case "PoolRoleScaler":
                return self.scalers.pop(name.removeprefix(f"{pool}-"), None) is not None
            case _:
                return self.services.pop(name, None) is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of the pool."""
        return self.body is None and not (self.deployments or self.scalers or self.services)


class Store:
    """Facts of all pools, fed by the watches. Changed only on the event loop; a reconcile gets copies."""

    def __init__(self) -> None:
        self._pools: dict[Key, PoolFacts] = {}

    def facts(self, key: Key) -> PoolFacts:
        """A copy of what is known of one pool."""
        found = self._pools.get(key, PoolFacts())
        return PoolFacts(found.body, dict(found.deployments), dict(found.scalers), dict(found.services), found.report)

    def pools(self) -> list[Key]:
        """The pools that exist."""
        return [key for key, facts in self._pools.items() if facts.body is not None]

    def names(self, kind: str) -> set[tuple[str, str]]:
        """Namespace and name of every object of a kind that is known."""
        found: set[tuple[str, str]] = set()
        for key, facts in self._pools.items():
            place = key.namespace
            match kind:
                case "InferencePool":
                    found |= {(place, key.pool)} if facts.body is not None else set()
                case "Deployment":
                    found |= {(place, name) for name in facts.deployments}
                case "PoolRoleScaler":
                    found |= {(place, names.role_object(key.pool, role)) for role in facts.scalers}
                case "Service":
                    found |= {(place, name) for name in facts.services}
        return found

    def drop(self, kind: str, namespace: str, name: str) -> Key | None:
        """Forget an object that is not there any more; the pool that it belonged to, if it was known."""
        for key, facts in list(self._pools.items()):
            if key.namespace == namespace and facts.drop(kind, key.pool, name):
                if facts.is_empty:
                    del self._pools[key]
                return key
        return None

    def take_report(self, key: Key, report: FleetReport | None) -> None:
        """What the pool's gateway says now."""
        if key in self._pools:
            self._pools[key].report = report

    def take(self, kind: str, body: Mapping[str, Any], *, gone: bool) -> tuple[Key | None, bool]:
        """Note an event of a watch: the pool that it concerns, if one, and whether it changed anything for it."""
        meta = body["metadata"]
        pool = meta["name"] if kind == "InferencePool" else (meta.get("labels") or {}).get(names.LABEL_POOL)
        if not pool:
            return None, False
        key = Key(meta["namespace"], pool)
        facts = self._pools.setdefault(key, PoolFacts())
        changed = facts.take(kind, body, gone=gone)
        if facts.is_empty:
            del self._pools[key]
        return key, changed


def owner_of(body: Mapping[str, Any]) -> str:
    """The uid of the controller of an object; empty: it has none."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _matters(body: Mapping[str, Any] | None) -> tuple[object, ...]:
    """What of a pool a reconcile depends on. Not its status: that is ours, and writing it is no news."""
    if body is None:
        return ()
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), "deletionTimestamp" in meta


def _is_older(body: Mapping[str, Any], generation: int) -> bool:
    return bool(body["metadata"].get("generation", 0) < generation)


def _put(table: dict[str, Any], name: str, value: object | None) -> bool:
    before = table.get(name)
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value
    return before != value
