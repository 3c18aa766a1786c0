"""Facts: the fields of watched objects that the operator keeps in memory.

Keeping only these fields bounds the memory for thousands of Deployments, and shows which fields decisions depend on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.core.load import WorkerLoad
from kvferry.operator.pool import names
from kvferry.operator.pool.ownership import is_orphan, order_of, owner_of, version_of
from kvferry.operator.pool.tls_state import TlsState, read_state

Place = tuple[str, str]
"""Kind and name of an object, as in `names.kind_of` and the metadata."""
_TOMBSTONES = 64
"""Maximum number of deleted objects of a pool whose last resourceVersion is kept."""


@dataclass(frozen=True, slots=True)
class Key:
    """Namespace and name of a pool."""

    namespace: str
    pool: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pool}"


@dataclass(frozen=True, slots=True)
class ChildFacts:
    """Facts about any observed object of a pool."""

    version: str
    """Version of the fields that the operator has applied; see `ownership.version_of`."""
    owner: str
    """Uid of the owning pool; empty if there is none."""
    is_orphan: bool = False
    """Whether the operator wrote the object, but its owner reference was removed."""
    uid: str = ""
    created: str = ""
    """Creation time, RFC 3339 in UTC, which is ordered as text."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ChildFacts":
        """Extract the facts from an object."""
        meta = body["metadata"]
        uid, created = str(meta.get("uid") or ""), str(meta.get("creationTimestamp") or "")
        return cls(version_of(body), owner_of(body), is_orphan(body), uid, created)


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    """Facts about a pool's Deployment."""

    name: str
    uid: str
    role: str
    revision: str
    """Revision of the worker pods; empty for the gateway."""
    settled: bool
    """Whether the Deployment controller has observed the latest generation, so that the status is current."""
    desired: int
    pods: int
    """Number of existing pods, not counting terminating pods."""
    ready: int
    updated: int
    stuck: str
    """Failure reported by the Deployment controller; empty if none."""
    deleting: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "DeploymentFacts":
        """Extract the facts from a Deployment object."""
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
            role=labels.get(names.LABEL_ROLE, ""),
            revision=labels.get(names.LABEL_REVISION, ""),
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
    """Facts about a role's PoolRoleScaler."""

    name: str
    role: str
    uid: str
    replicas: int
    shown: tuple[int, str]
    """Status of the scaler: replicas and selector."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ScalerFacts":
        """Extract the facts from a PoolRoleScaler object."""
        status = body.get("status") or {}
        spec = body["spec"]
        shown = (status.get("replicas", -1), status.get("selector", ""))
        meta = body["metadata"]
        return cls(meta["name"], spec["role"], meta["uid"], spec.get("replicas", 1), shown)


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """Facts about a pool's Service."""

    name: str
    address: str
    """Cluster IP of the Service; empty if there is none."""
    admin_port: int = 0
    """Port number of the port named `admin`; 0 if there is none."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ServiceFacts":
        """Extract the facts from a Service object."""
        address = body["spec"].get("clusterIP") or ""
        ports = {port.get("name"): port["port"] for port in body["spec"].get("ports") or ()}
        return cls(
            body["metadata"]["name"],
            "" if address == "None" else address,
            ports.get("admin", 0),
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """State of one worker, as reported by a gateway."""

    name: str
    role: str
    takes_work: bool
    why_not: str = ""
    fingerprint: str = ""
    family: str = ""
    connector: str = ""
    model_digest: str = ""
    context_tokens: int = 0
    """Maximum number of tokens of a request on this worker; 0 if unknown."""
    device: str = ""
    """`cpu`, or the name of the GPU; empty if unknown."""
    is_staged: bool = False
    """Whether peers and tiers access KV through host memory, apart from the device's pages."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and digest, in hexadecimal digits, of each loaded adapter."""
    adapter_failures: Mapping[str, str] = field(default_factory=dict)
    """Why an adapter is not loaded, by name."""
    in_flight: int = 0
    load: WorkerLoad = WorkerLoad()  # noqa: RUF009  frozen

    @property
    def num_requests(self) -> int:
        """Number of requests in progress on the worker, as counted by the worker or by the gateway."""
        return max(self.in_flight, self.load.num_requests)


@dataclass(frozen=True, slots=True)
class GatewayQueue:
    """The requests that wait in one gateway for room on the workers, and what they wait for."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of these requests that are not cached, as the gateway expects."""
    dispatched_prompt_tokens: int = 0
    """Prompt tokens of dispatched requests that are not computed yet."""
    waits_for_prefill: bool = False
    """Whether the gateway dispatches no further prompts, because workers have enough prompt tokens to compute."""
    waits_for_sequences: bool = False
    """Whether the gateway dispatches no further requests, because all places in the workers' batches are taken."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A gateway's report about its workers."""

    at: float
    """Time when the report was read, in seconds by the operator's monotonic clock."""
    workers: tuple[WorkerReport, ...]
    held: int = 0
    """Number of requests that wait at the gateway for the pool's first worker."""
    handoffs: Mapping[str, int] = field(default_factory=dict)
    """Number of hand-offs by outcome, a value of `HandoffOutcome`."""
    gateway: str = ""
    """Name of the gateway process."""
    model_tokens: int = 0
    """Context length of the model in tokens; 0 if unknown."""
    certificate_not_after: int = 0
    """End of the validity of the gateway's certificate for the pool, wall-clock seconds; 0 without TLS."""
    queue: GatewayQueue = GatewayQueue()

    def of_role(self, role: str) -> tuple[WorkerReport, ...]:
        """Return the workers of one role."""
        return tuple(worker for worker in self.workers if worker.role == role)


@dataclass(slots=True)
class PoolFacts:
    """Observed objects of a pool."""

    body: Mapping[str, Any] | None = None
    """The InferencePool object; `None` if it does not exist or has not been observed yet."""
    children: dict[Place, ChildFacts] = field(default_factory=dict)
    """All observed objects of the pool."""
    deployments: dict[str, DeploymentFacts] = field(default_factory=dict)
    scalers: dict[str, ScalerFacts] = field(default_factory=dict)
    """Scalers by role."""
    services: dict[str, ServiceFacts] = field(default_factory=dict)
    report: FleetReport | None = None
    is_without_keys: bool = False
    """Whether the Secret with the generated keys was found missing."""
    is_without_tls: bool = False
    """Whether the Secret with the generated certificates was found missing."""
    tls: TlsState | None = None
    """State of the managed TLS; `None` without it."""
    orders: dict[Place, int] = field(default_factory=dict)
    """Latest observed resourceVersion of each object, including recently deleted ones."""

    def version(self, kind: str, name: str) -> str:
        """Return the version of an observed object; empty if it does not exist."""
        found = self.children.get((kind, name))
        return "" if found is None else found.version

    def is_lost(self, kind: str, name: str) -> bool:
        """Return whether an object does not exist or has lost its owner reference."""
        found = self.children.get((kind, name))
        return found is None or found.is_orphan

    def take(self, kind: str, body: Mapping[str, Any], *, gone: bool) -> bool:
        """Add, update or remove one object; return whether the facts changed.

        The response to a write may arrive before watch events of earlier changes, or after the event of a deletion.
        Observations that are older than the latest one are therefore ignored.
        """
        name = body["metadata"]["name"]
        if kind == names.POOL_KIND:
            before, self.body = self.body, None if gone else body
            return _matters(before) != _matters(self.body)
        place, order = (kind, name), order_of(body)
        if order < self.orders.get(place, 0):
            return False
        self._ordered(place, order, gone=gone)
        changed = _put(self.children, place, None if gone else ChildFacts.of(body))
        match kind:
            case "Deployment":
                return _put(self.deployments, name, None if gone else DeploymentFacts.of(body)) or changed
            case "PoolRoleScaler":
                return _put(self.scalers, body["spec"]["role"], None if gone else ScalerFacts.of(body)) or changed
            case "Service":
                return _put(self.services, name, None if gone else ServiceFacts.of(body)) or changed
            case "ConfigMap" if name == names.tls_object((body["metadata"].get("labels") or {})[names.LABEL_POOL]):
                self.tls = None if gone else read_state(body.get("data") or {})
        return changed

    def _ordered(self, place: Place, order: int, *, gone: bool) -> None:
        self.orders.pop(place, None)
        self.orders[place] = order
        if gone and len(self.orders) > len(self.children) + _TOMBSTONES:
            oldest = next(other for other in self.orders if other not in self.children)
            del self.orders[oldest]

    def owned_by(self, uid: str) -> "PoolFacts":
        """Return the facts without objects of other owners, such as objects of an earlier pool of the same name that
        are being garbage-collected. Orphans are included: the next apply restores their owner reference."""
        children = {place: c for place, c in self.children.items() if c.owner == uid or c.is_orphan}
        return replace(
            self,
            children=children,
            deployments={name: d for name, d in self.deployments.items() if ("Deployment", name) in children},
            scalers={role: s for role, s in self.scalers.items() if ("PoolRoleScaler", s.name) in children},
        )

    def drop(self, kind: str, pool: str, name: str) -> bool:
        """Remove an object by its name; return whether it was known."""
        if kind == names.POOL_KIND:
            known, self.body = self.body is not None and name == pool, None if name == pool else self.body
            return known
        self.orders.pop((kind, name), None)
        match kind:
            case "Deployment":
                self.deployments.pop(name, None)
            case "PoolRoleScaler":
                self.scalers.pop(name.removeprefix(f"{pool}-"), None)
            case "Service":
                self.services.pop(name, None)
            case "ConfigMap" if name == names.tls_object(pool):
                self.tls = None
        return self.children.pop((kind, name), None) is not None

    @property
    def is_empty(self) -> bool:
        """Whether no object of the pool has been observed."""
        return self.body is None and not self.children


class Store:
    """Facts about all pools, updated by the watches on the event loop. Each reconciliation works on a copy."""

    def __init__(self) -> None:
        self._pools: dict[Key, PoolFacts] = {}

    def facts(self, key: Key) -> PoolFacts:
        """Return a copy of the facts about a pool."""
        found = self._pools.get(key, PoolFacts())
        return replace(
            found,
            children=dict(found.children),
            deployments=dict(found.deployments),
            scalers=dict(found.scalers),
            services=dict(found.services),
            orders={},  # Only the store compares them.
        )

    def pools(self) -> list[Key]:
        """Return the keys of the existing pools."""
        return [key for key, facts in self._pools.items() if facts.body is not None]

    def names(self, kind: str) -> set[tuple[str, str]]:
        """Return the namespace and name of every known object of a kind."""
        found: set[tuple[str, str]] = set()
        for key, facts in self._pools.items():
            if kind == names.POOL_KIND:
                found |= {(key.namespace, key.pool)} if facts.body is not None else set()
            else:
                found |= {(key.namespace, name) for other, name in facts.children if other == kind}
        return found

    def drop(self, kind: str, namespace: str, name: str) -> Key | None:
        """Remove an object that no longer exists; return its pool if the object was known."""
        for key, facts in list(self._pools.items()):
            if key.namespace == namespace and facts.drop(kind, key.pool, name):
                if facts.is_empty:
                    del self._pools[key]
                return key
        return None

    def take_report(self, key: Key, report: FleetReport | None) -> None:
        """Store the latest report from a pool's gateway."""
        if key in self._pools:
            self._pools[key].report = report

    def take_keys(self, key: Key, *, missing: bool) -> bool:
        """Store whether the Secret with a pool's generated keys is missing; return whether this changed."""
        facts = self._pools.get(key)
        if facts is None or facts.is_without_keys == missing:
            return False
        facts.is_without_keys = missing
        return True

    def take_tls(self, key: Key, *, missing: bool) -> bool:
        """Store whether the Secret with a pool's generated certificates is missing; return whether this changed."""
        facts = self._pools.get(key)
        if facts is None or facts.is_without_tls == missing:
            return False
        facts.is_without_tls = missing
        return True

    def take(self, kind: str, body: Mapping[str, Any], *, gone: bool) -> tuple[Key | None, bool]:
        """Store an object from a watch event; return the affected pool, if any, and whether its facts changed."""
        meta = body["metadata"]
        pool = meta["name"] if kind == names.POOL_KIND else (meta.get("labels") or {}).get(names.LABEL_POOL)
        if not pool:
            return None, False
        key = Key(meta["namespace"], pool)
        facts = self._pools.setdefault(key, PoolFacts())
        changed = facts.take(kind, body, gone=gone)
        if facts.is_empty:
            del self._pools[key]
        return key, changed


def _matters(body: Mapping[str, Any] | None) -> tuple[object, ...]:
    """Return the fields of a pool whose changes trigger a reconcile. The status is not included, since the operator
    writes it."""
    if body is None:
        return ()
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), "deletionTimestamp" in meta


def _put(table: dict[Any, Any], name: object, value: object | None) -> bool:
    before = table.get(name)
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value
    return before != value
