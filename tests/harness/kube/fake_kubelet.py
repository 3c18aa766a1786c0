"""Fake kubelet for clusters without a node: writes the status of pods.

It is used in tests of the operator's decisions; tests marked `node` have a real kubelet.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.pool.spec import Json

_LOOK_SECONDS = 0.1
_NOW = "2026-01-01T00:00:00Z"

Verdict = Callable[[Mapping[str, Any]], Json | None]
"""Function from a pod to its new status; `None` leaves the status unchanged."""


def ready(_: Mapping[str, Any]) -> Json:
    """Return the status of a pod that is running and ready."""
    return {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": _NOW},
            {"type": "Ready", "status": "True", "lastTransitionTime": _NOW},
        ],
    }


def waiting(reason: str, message: str = "", *, exit_code: int | None = None, last: str = "") -> Json:
    """Return the status of a pod that is not ready: its container is waiting with `reason`. If `exit_code` is set, the
    container's last run ended with this code and reason `last`."""
    container: Json = {
        "name": "worker",
        "ready": False,
        "restartCount": 3,
        "image": "x",
        "imageID": "x",
        "state": {"waiting": {"reason": reason, "message": message}},
    }
    if exit_code is not None:
        container["lastState"] = {"terminated": {"exitCode": exit_code, "reason": last}}
    return {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": _NOW},
            {"type": "Ready", "status": "False", "lastTransitionTime": _NOW},
        ],
        "containerStatuses": [container],
    }


class FakeKubelet:
    """Writes the status of all pods in a namespace. `verdict` returns each status and may be replaced while running."""

    def __init__(self, api: KubeApi, namespace: str) -> None:
        self.verdict: Verdict = ready
        self._api = api
        self._namespace = namespace
        self._given: dict[str, Json] = {}
        self._stop = threading.Event()

    def run(self) -> None:
        """Update pods until `stop` is called."""
        while not self._stop.wait(_LOOK_SECONDS):
            with suppress(KvferryError):  # the namespace may be terminating
                for pod in self._api.list("v1", "Pod", self._namespace):
                    self._act(pod)

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.set()

    def _act(self, pod: Mapping[str, Any]) -> None:
        meta = pod["metadata"]
        status = self.verdict(pod)
        if status is None or "deletionTimestamp" in meta or self._given.get(meta["uid"]) == status:
            return
        self._api.patch("v1", "Pod", self._namespace, meta["name"], {"status": status}, subresource="status")
        self._given[meta["uid"]] = status


@contextmanager
def kubelet(api: KubeApi, namespace: str) -> Iterator[FakeKubelet]:
    """Yield a fake kubelet that runs during the `with` block."""
    made = FakeKubelet(api, namespace)
    thread = threading.Thread(target=made.run, name="fake kubelet", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join(10)
