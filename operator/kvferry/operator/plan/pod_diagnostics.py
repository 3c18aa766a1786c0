"""Diagnosis of pods that are not ready, from the pod status and the events of the kubelet and the scheduler. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

_LINE_CHARS = 300
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})


def needs_events(pods: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether an unready pod's status does not show the cause, in which case its events may show it."""
    return any("deletionTimestamp" not in pod["metadata"] and not _is_ready(pod) and not _of(pod) for pod in pods)


def mount_failures(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the latest message about a volume that cannot be mounted, for example of a missing Secret, by pod uid."""
    failures: dict[str, tuple[str, str]] = {}
    for event in events:
        uid, at = (
            event["involvedObject"].get("uid", ""),
            str(event.get("lastTimestamp") or event.get("eventTime") or ""),
        )
        if event.get("reason") == "FailedMount" and at >= failures.get(uid, ("", ""))[0]:
            failures[uid] = at, str(event.get("message") or "")
    return {uid: " ".join(message.split())[:_LINE_CHARS] for uid, (_, message) in failures.items()}


def troubles(pods: Iterable[Mapping[str, Any]], mounts: Mapping[str, str] | None = None) -> list[str]:
    """Describe each cause of unready pods in a sentence with an example pod, most frequent cause first.

    Args:
        pods: Pod objects; pods that are being deleted are ignored.
        mounts: messages about volumes that cannot be mounted, by pod uid.
    """
    seen: dict[str, list[str]] = {}
    for pod in pods:
        if "deletionTimestamp" not in pod["metadata"]:
            trouble = _of(pod)
            if not trouble and not _is_ready(pod):
                trouble = (mounts or {}).get(pod["metadata"].get("uid", ""), "")
            if trouble:
                seen.setdefault(trouble, []).append(pod["metadata"]["name"])
    ordered = sorted(seen.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{pods[0]}{f' and {len(pods) - 1} more' if len(pods) > 1 else ''}: {text}" for text, pods in ordered]


def _of(pod: Mapping[str, Any]) -> str:
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"cannot be scheduled: {condition.get('message', '')}"
    if _is_ready(pod):
        return ""
    for container in (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or []):
        state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated") or {}
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason", "")
        ended = state.get("terminated") or (last if reason == "CrashLoopBackOff" else {})
        if last.get("reason") == "OOMKilled":
            return f"{container['name']} was OOM-killed; raise resources.limits.memory or lower engine.kvMemory"
        if ended.get("exitCode"):
            lines = str(ended.get("message") or "").strip().splitlines()
            last_line = f": {lines[-1][:_LINE_CHARS]}" if lines else "; see `kubectl logs --previous`"
            return f"{container['name']} exits with {ended['exitCode']}{last_line}"
        if reason and reason not in _STARTING:
            return f"{container['name']} is waiting: {reason} {waiting.get('message', '')}".rstrip()
    return ""


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
