"""Diagnosis of pods that are not ready, from the pod status reported by the kubelet and the scheduler."""

from collections.abc import Iterable, Mapping
from typing import Any


def troubles(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe each cause of unready pods in a sentence with an example pod, the most frequent cause first."""
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
            return f"{container['name']} was OOM-killed; raise resources.limits.memory or lower engine.kvMemory"
        if reason == "CrashLoopBackOff":
            return f"{container['name']} exits with {last.get('exitCode')}; see `kubectl logs --previous`"
        if reason and reason not in {"ContainerCreating", "PodInitializing"}:
            return f"{container['name']} is waiting: {reason} {waiting.get('message', '')}".rstrip()
    return ""
