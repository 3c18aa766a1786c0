"""Why pods are not ready, in a sentence: what the kubelet and the scheduler say of them. Pure but for one listing."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.operator import names
from kvferry.operator.pool_pass import PoolPass
from kvferry.operator.spec import Json

_MOST = 3


def in_the_way(this: PoolPass) -> str:
    """What keeps the pool's pods from being ready; empty: nothing that anybody says."""
    stuck = [f"{d.name}: {d.stuck}" for d in this.facts.deployments.values() if d.stuck]
    pods: list[Json] = []
    with this.noting("pods"):
        pods = list(this.api.list("v1", "Pod", this.pool.namespace, {names.LABEL_POOL: this.pool.name}))
    return "; ".join([*troubles(pods), *stuck][:_MOST])


def troubles(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """One sentence for each kind of trouble, with a pod that has it, the most frequent first."""
    seen: dict[str, list[str]] = {}
    for pod in pods:
        if "deletionTimestamp" not in pod["metadata"]:
            trouble = _of(pod)
            if trouble:
                seen.setdefault(trouble, []).append(pod["metadata"]["name"])
    ordered = sorted(seen.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{pods[0]}{f' and {len(pods) - 1} more' if len(pods) > 1 else ''}: {text}" for text, pods in ordered]


def _of(pod: Mapping[str, Any]) -> str:
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"cannot be scheduled: {condition.get('message', '')}"
        if condition["type"] == "Ready" and condition["status"] == "True":
            return ""
    for container in (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or []):
        state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated") or {}
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason", "")
        if last.get("reason") == "OOMKilled":
            return f"{container['name']} was killed for memory; raise resources.limits.memory or lower engine.kvMemory"
        if reason == "CrashLoopBackOff":
            return f"{container['name']} exits with {last.get('exitCode')}; `kubectl logs --previous` says why"
        if reason and reason not in {"ContainerCreating", "PodInitializing"}:
            return f"{container['name']} waits: {reason} {waiting.get('message', '')}".rstrip()
    return ""
