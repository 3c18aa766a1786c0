"""What stands between a cluster and a working pool: `kvferry doctor --cluster`. Reads, and changes nothing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.operator import names
from kvferry.operator.api import KubeApi
from kvferry.operator.names import Condition
from kvferry.operator.surroundings import EXTENSION_POOL, POD_MONITOR

_OLDEST = (1, 29)
_SPECIAL = re.compile(r"(gpu|rdma|hca|roce)", re.IGNORECASE)

Verdict = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    about: str
    told: str
    """With the remedy, where there is something to mend."""


def check_cluster(api: KubeApi, leader: str) -> list[Finding]:
    """Look at everything that a pool needs.

    Args:
        leader: who holds the operator's lease; empty: nobody.

    Raises:
        Unavailable: the API server does not answer.
        ApiRefusal: the account may not even read.
    """
    found = [judge_version(api.raw("/version"))]
    missing = [plural for plural in (names.POOLS, names.SCALERS) if not api.serves(names.API_VERSION, plural)]
    found.append(judge_definitions(missing))
    found.append(
        Finding("ok", "operator", f"{leader} leads")
        if leader
        else Finding("bad", "operator", "nobody renews its lease; `helm install` the chart, or look at its pods' logs")
    )
    for kind, use in (
        (POD_MONITOR, "pools are scraped by PodMonitors"),
        (EXTENSION_POOL, "gateways can route to pools"),
    ):
        there = api.serves(*kind)
        found.append(Finding("ok" if there else "note", kind[1], use if there else f"no {kind[0]} here; optional"))
    found.append(judge_nodes(api.list("v1", "Node", None)))
    if not missing:
        found += [judge_pool(pool) for pool in api.list(names.API_VERSION, "InferencePool", None)]
    return found


def judge_version(version: Mapping[str, Any]) -> Finding:
    """Whether the API server is new enough."""
    said = str(version.get("gitVersion", "?"))
    number = tuple(int(re.sub(r"\D", "", str(version.get(part, "0"))) or 0) for part in ("major", "minor"))
    if number < _OLDEST:
        return Finding("bad", "Kubernetes", f"{said}; the rules of the definitions need 1.29 or newer")
    return Finding("ok", "Kubernetes", said)


def judge_definitions(missing: Iterable[str]) -> Finding:
    """Whether our kinds are installed."""
    absent = ", ".join(missing)
    if absent:
        remedy = "kubectl apply --server-side -f charts/kvferry/files/crds"
        return Finding("bad", "definitions", f"no {absent} of {names.API_VERSION}; {remedy}")
    return Finding("ok", "definitions", names.API_VERSION)


def judge_nodes(nodes: Iterable[Mapping[str, Any]]) -> Finding:
    """What pods can run on."""
    ready, special = 0, dict[str, int]()
    for node in nodes:
        status = node.get("status") or {}
        if any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()):
            ready += 1
            for resource, amount in (status.get("allocatable") or {}).items():
                if _SPECIAL.search(resource) and str(amount).isdecimal():
                    special[resource] = special.get(resource, 0) + int(amount)
    if not ready:
        return Finding("bad", "nodes", "none is ready, so that no pod can run")
    devices = ", ".join(f"{n} {resource}" for resource, n in sorted(special.items()))
    return Finding("ok", "nodes", f"{ready} ready, {devices or 'without GPUs or RDMA devices: pods compute on CPUs'}")


def judge_pool(pool: Mapping[str, Any]) -> Finding:
    """What a pool says of itself."""
    meta, status = pool["metadata"], pool.get("status") or {}
    about = f"pool {meta['namespace']}/{meta['name']}"
    told = {c["type"]: c for c in status.get("conditions") or ()}
    ready = told.get(Condition.READY)
    if ready is None or status.get("observedGeneration", 0) < meta.get("generation", 0):
        return Finding("bad", about, "the operator has not looked at it as it is now; see `operator` above")
    if ready["status"] != "True":
        return Finding("bad", about, f"{ready['reason']}: {ready['message']}")
    warned = [told[c] for c in (Condition.TRANSPORT_DEGRADED, Condition.REPLICAS_CONTESTED) if c in told]
    for condition in warned:
        if condition["status"] == "True":
            return Finding("note", about, f"serves, but {condition['reason']}: {condition['message']}")
    return Finding("ok", about, ready["message"])
