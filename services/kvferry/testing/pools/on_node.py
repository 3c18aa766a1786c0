"""A pool on the node of a test's cluster: the documented example with the node's overlay, and what is done to it."""

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.commit import ROOT
from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable
from kvferry.operator.names import GATEWAY_HTTP, LABEL_POOL, LABEL_ROLE
from kvferry.testing.kube.cluster import Cluster
from kvferry.testing.kube.runtime import Runtime

EXAMPLE = ROOT / "docs" / "examples" / "pool.yaml"
OVERLAY = ROOT / "tests" / "cluster" / "overlay" / "pool.yaml"
VALUES = ROOT / "tests" / "cluster" / "overlay" / "values.yaml"
CHART = ROOT / "charts" / "kvferry"
MODEL = "smollm2-135m-instruct"
READY_SECONDS = 180.0
_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
CLOCK = SystemClock()

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PoolOnNode:
    """One pool."""

    cluster: Cluster
    namespace: str
    name: str = "chat"

    def kubectl(self, *words: object, stdin: str | None = None) -> str:
        """In the pool's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *words, stdin=stdin)

    def apply(self, changes: Mapping[str, Any] | None = None, overlay: Path = OVERLAY) -> None:
        """The example, with the overlay merged over it as documented, then `changes`."""
        merge = ("patch", "--local", "--type", "merge", "-o", "json")
        made = self.cluster.kubectl(*merge, "-f", EXAMPLE, "--patch-file", overlay)
        if changes:
            made = self.cluster.kubectl(*merge, "-f", "-", "-p", json.dumps(changes), stdin=made)
        self.kubectl("apply", "-f", "-", stdin=made)

    def patch(self, *operations: Mapping[str, Any]) -> None:
        """A JSON patch of the pool."""
        self.kubectl("patch", "kvpool", self.name, "--type", "json", "-p", json.dumps(operations))

    def get(self) -> Json:
        """The object, with its status."""
        found: Json = json.loads(self.kubectl("get", "kvpool", self.name, "-o", "json"))
        return found

    def wait_ready(self, seconds: float = READY_SECONDS) -> Json:
        """Until the status says that all is as the spec wants it; the pool."""
        return self.until(is_settled, "the pool is ready", seconds)

    def until(self, holds: Callable[[Json], bool], what: str, seconds: float = READY_SECONDS) -> Json:
        """Until the pool is so.

        Raises:
            AssertionError: not in that time; the message has its conditions.
        """
        pool: Json = {}

        def looks() -> bool:
            nonlocal pool
            pool = self.get()
            return holds(pool)

        eventually(looks, what, seconds, lambda: f"{_conditions(pool)}\n{self.kubectl('get', 'pods', '-o', 'wide')}")
        return pool

    def pods(self, role: str, *, ready: bool = True) -> list[str]:
        """Names of a role's pods that are not going away, the oldest first."""
        return [pod["metadata"]["name"] for pod in self._pods(role) if not ready or _is_ready(pod)]

    def wait_pods(self, role: str, count: int, seconds: float = READY_SECONDS) -> None:
        """Until the role has so many pods and all are ready."""
        eventually(
            lambda: len(self.pods(role)) == count == len(self.pods(role, ready=False)),
            f"{count} ready pods of {role}",
            seconds,
            lambda: self.kubectl("get", "pods", "-o", "wide"),
        )

    def settled_away(self, pod: str, seconds: float = READY_SECONDS) -> None:
        """Until a pod is no longer there."""
        eventually(
            lambda: not self.kubectl("get", "pod", pod, "--ignore-not-found", "-o", "name"),
            f"pod {pod} is gone",
            seconds,
            lambda: self.kubectl("get", "pods", "-o", "wide"),
        )

    def kill(self, pod: str) -> None:
        """SIGKILL to the first process of its container; nobody is asked."""
        kill_container(self.cluster, self.namespace, pod)

    def evict(self, pod: str) -> bool:
        """By the eviction API, as `kubectl drain` does; False: a budget forbids it now."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        try:
            self.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
        except Unavailable as refused:
            if "disruption budget" not in refused.message:
                raise
            return False
        return True

    @property
    def address(self) -> str:
        """Of the gateway's Service; reached from this machine."""
        return self.kubectl("get", "service", self.name, "-o", "jsonpath={.spec.clusterIP}")

    @property
    def http(self) -> str:
        """The OpenAI-compatible API."""
        return f"http://{self.address}/v1"

    @property
    def grpc(self) -> str:
        """`host:port` for `kvferry.client`."""
        return f"{self.address}:9000"

    def busy_gateway(self, seconds: float = 30.0) -> str:
        """A gateway pod that has calls to workers just now."""
        found: list[str] = []

        def looks() -> bool:
            for pod in self._pods("gateway"):
                url = f"http://{pod['status']['podIP']}:{GATEWAY_HTTP}/fleet"
                with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
                    if any(worker["in_flight"] for worker in json.load(answer)["workers"]):
                        found.append(pod["metadata"]["name"])
                        return True
            return False

        eventually(looks, "a gateway has calls running", seconds)
        return found[0]

    def _pods(self, role: str) -> list[Json]:
        selector = f"{LABEL_POOL}={self.name},{LABEL_ROLE}={role}"
        found = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        left = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(left, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def is_settled(pool: Json) -> bool:
    """Ready, nothing moves any more, and the status speaks of this very spec."""
    said = {one["type"]: one for one in pool.get("status", {}).get("conditions", [])}
    if not {"Ready", "Progressing"} <= said.keys():
        return False
    of_this = all(
        said[kind]["observedGeneration"] == pool["metadata"]["generation"] for kind in ("Ready", "Progressing")
    )
    return of_this and said["Ready"]["status"] == "True" and said["Progressing"]["status"] == "False"


def eventually(holds: Callable[[], bool], what: str, seconds: float, explain: Callable[[], str] = lambda: "") -> None:
    """Look until it is so.

    Raises:
        AssertionError: it is not in that time.
    """
    pause, deadline = threading.Event(), CLOCK.monotonic() + seconds
    while not _without_hiccup(holds):
        assert CLOCK.monotonic() < deadline, f"not so within {seconds:.0f} s: {what}\n{explain()}"
        pause.wait(_LOOK_SECONDS)


def kill_container(cluster: Cluster, namespace: str, pod: str) -> None:
    """SIGKILL to the first process of a pod's only container."""
    path = "jsonpath={.status.containerStatuses[0].containerID}"
    container = cluster.kubectl("-n", namespace, "get", "pod", pod, "-o", path).removeprefix("containerd://")
    tasks = Runtime(cluster.box).ctr("tasks", "ls", seconds=_ANSWER_SECONDS).splitlines()
    pid = next(line.split()[1] for line in tasks if line.startswith(container))
    cluster.box.run("kill", "-KILL", pid)


def _without_hiccup(holds: Callable[[], bool]) -> bool:
    with suppress(OSError):
        return holds()
    return False


def _is_ready(pod: Json) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def _conditions(pool: Json) -> str:
    said = pool.get("status", {}).get("conditions", [])
    return "\n".join(f"{one['type']}={one['status']} {one['reason']}: {one['message']}" for one in said)
