"""Checks of a cluster for `kvferry doctor --cluster`: version, definitions, operator, nodes, pools. Read-only."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.operator.api import KubeApi
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.pool import names
from kvferry.operator.pool.names import Condition
from kvferry.operator.process.leader import LeaseHolder

_OLDEST = (1, 29)
_SPECIAL = re.compile(r"(gpu|rdma|hca|roce)", re.IGNORECASE)

Verdict = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    verdict: Verdict
    about: str
    detail: str
    """Description of the result, with a remedy if there is a problem."""


def check_cluster(api: KubeApi, leaders: Mapping[str, LeaseHolder]) -> list[CheckResult]:
    """Check that a cluster meets the requirements of pools.

    Args:
        api: client of the cluster's API server.
        leaders: holders of the operators' leases that are renewed, by namespace of the lease.

    Raises:
        Unavailable: the API server is unavailable.
        ApiRefusal: the account has no permission to read.
    """
    found = [judge_version(api.raw("/version"))]
    missing = [plural for plural in (names.POOLS, names.SCALERS) if not api.serves(names.API_VERSION, plural)]
    found.append(judge_definitions(missing))
    found += judge_operators(leaders)
    for kind, use in (
        (POD_MONITOR, "served; pools get PodMonitors"),
        (EXTENSION_POOL, "served; pools can get an InferencePool of the inference extension"),
    ):
        there = api.serves(*kind)
        found.append(
            CheckResult("ok" if there else "note", kind[1], use if there else f"{kind[0]} is not served; optional")
        )
    found.append(judge_nodes(api.list("v1", "Node", None)))
    if not missing:
        found += [judge_pool(pool, leaders) for pool in api.list(names.API_VERSION, "InferencePool", None)]
    return found


def judge_version(version: Mapping[str, Any]) -> CheckResult:
    """Check the version of the API server."""
    git_version = str(version.get("gitVersion", "?"))
    number = tuple(int(re.sub(r"\D", "", str(version.get(part, "0"))) or 0) for part in ("major", "minor"))
    if number < _OLDEST:
        return CheckResult("bad", "Kubernetes", f"{git_version}; the CustomResourceDefinitions require 1.29 or newer")
    return CheckResult("ok", "Kubernetes", git_version)


def judge_operators(leaders: Mapping[str, LeaseHolder]) -> list[CheckResult]:
    """Check that an operator leads."""
    if not leaders:
        why = "no lease is renewed; install the chart, or check the logs of the operator pods"
        return [CheckResult("bad", "operator", why)]
    found = []
    for at, leader in leaders.items():
        where = f"namespaces {', '.join(leader.namespaces)}" if leader.namespaces else "all namespaces"
        detail = f"{leader.identity} leads and reconciles pools in {where} (lease in namespace {at})"
        found.append(CheckResult("ok", "operator", detail))
    return found


def judge_definitions(missing: Iterable[str]) -> CheckResult:
    """Check that the CustomResourceDefinitions are installed."""
    absent = ", ".join(missing)
    if absent:
        remedy = "kubectl apply --server-side -f charts/kvferry/files/crds"
        return CheckResult("bad", "definitions", f"no {absent} of {names.API_VERSION}; {remedy}")
    return CheckResult("ok", "definitions", names.API_VERSION)


def judge_nodes(nodes: Iterable[Mapping[str, Any]]) -> CheckResult:
    """Report the nodes and devices that pods can use."""
    ready, special = 0, dict[str, int]()
    for node in nodes:
        status = node.get("status") or {}
        if any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()):
            ready += 1
            for resource, amount in (status.get("allocatable") or {}).items():
                if _SPECIAL.search(resource) and str(amount).isdecimal():
                    special[resource] = special.get(resource, 0) + int(amount)
    if not ready:
        return CheckResult("bad", "nodes", "no nodes are ready, so no pods can run")
    devices = ", ".join(f"{n} {resource}" for resource, n in sorted(special.items()))
    return CheckResult("ok", "nodes", f"{ready} ready, {devices or 'without GPUs or RDMA devices: pods run on CPUs'}")


def judge_pool(pool: Mapping[str, Any], leaders: Mapping[str, LeaseHolder]) -> CheckResult:
    """Report the conditions of a pool, and whether an operator reconciles its namespace.

    Args:
        pool: the InferencePool object.
        leaders: holders of the operators' leases that are renewed, by namespace of the lease.
    """
    meta, status = pool["metadata"], pool.get("status") or {}
    about = f"pool {meta['namespace']}/{meta['name']}"
    by_type = {c["type"]: c for c in status.get("conditions") or ()}
    ready = by_type.get(Condition.READY)
    watched = {namespace for leader in leaders.values() for namespace in leader.namespaces}
    is_reconciled = ready is not None and status.get("observedGeneration", 0) >= meta.get("generation", 0)
    is_watched = meta["namespace"] in watched or any(not leader.namespaces for leader in leaders.values())
    if leaders and not is_watched and not is_reconciled:
        return CheckResult(
            "bad",
            about,
            f"no operator reconciles pools in namespace {meta['namespace']}, only in {', '.join(sorted(watched))}; add "
            "it to operator.namespaces of the chart (--namespace of `kvferry operator run`)",
        )
    if ready is None or not is_reconciled:
        return CheckResult("bad", about, "the operator has not reconciled its current spec; see `operator` above")
    if ready["status"] != "True":
        return CheckResult("bad", about, f"{ready['reason']}: {ready['message']}")
    warned = [by_type[c] for c in (Condition.TRANSPORT_DEGRADED, Condition.REPLICAS_CONTESTED) if c in by_type]
    for condition in warned:
        if condition["status"] == "True":
            return CheckResult("note", about, f"serves, but {condition['reason']}: {condition['message']}")
    certificates = by_type.get(Condition.CERTIFICATES_VALID)
    if certificates is None:
        return CheckResult("ok", about, f"{ready['message']}; calls between its pods are not encrypted (spec.tls)")
    if certificates["status"] == "False":
        return CheckResult("note", about, f"serves, but {certificates['reason']}: {certificates['message']}")
    return CheckResult("ok", about, f"{ready['message']}; {certificates['message']}")
