"""Manages a pool on the node of a test cluster: the documented example with the overlay for the node."""

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.kube.cluster import Cluster
from harness.kube.runtime import Runtime
from kvferry.bench.commit import ROOT
from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable
from kvferry.operator.pool.names import GATEWAY_ADMIN, LABEL_POOL, LABEL_ROLE

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
    """A pool on a test cluster, and operations on it."""

    cluster: Cluster
    namespace: str
    name: str = "chat"

    def kubectl(self, *words: object, stdin: str | None = None) -> str:
        """Run kubectl in the pool's namespace and return its output."""
        return self.cluster.kubectl("-n", self.namespace, *words, stdin=stdin)

    def apply(self, changes: Mapping[str, Any] | None = None, overlay: Path = OVERLAY) -> None:
        """Apply the example pool, merged with the overlay as documented, then with `changes`."""
        merge = ("patch", "--local", "--type", "merge", "-o", "json")
        made = self.cluster.kubectl(*merge, "-f", EXAMPLE, "--patch-file", overlay)
        if changes:
            made = self.cluster.kubectl(*merge, "-f", "-", "-p", json.dumps(changes), stdin=made)
        self.kubectl("apply", "-f", "-", stdin=made)

    def patch(self, *operations: Mapping[str, Any]) -> None:
        """Apply a JSON patch to the pool."""
        self.kubectl("patch", "kvpool", self.name, "--type", "json", "-p", json.dumps(operations))

    def get(self) -> Json:
        """Return the pool object with its status."""
        found: Json = json.loads(self.kubectl("get", "kvpool", self.name, "-o", "json"))
        return found

    def wait_ready(self, seconds: float = READY_SECONDS) -> Json:
        """Wait until the pool's status matches its spec, and return the pool."""
        return self.until(is_settled, "the pool is ready", seconds)

    def until(self, holds: Callable[[Json], bool], what: str, seconds: float = READY_SECONDS) -> Json:
        """Wait until `holds(pool)` is true, and return the pool.

        Raises:
            AssertionError: the condition is not true within `seconds`; the message contains the pool's conditions.
        """
        pool: Json = {}

        def looks() -> bool:
            nonlocal pool
            pool = self.get()
            return holds(pool)

        eventually(looks, what, seconds, lambda: f"{_conditions(pool)}\n{self.kubectl('get', 'pods', '-o', 'wide')}")
        return pool

    def pods(self, role: str, *, ready: bool = True) -> list[str]:
        """Return the names of a role's pods that are not terminating, oldest first."""
        return [pod["metadata"]["name"] for pod in self._pods(role) if not ready or _is_ready(pod)]

    def wait_pods(self, role: str, count: int, seconds: float = READY_SECONDS) -> None:
        """Wait until the role has `count` pods and all are ready."""
        eventually(
            lambda: len(self.pods(role)) == count == len(self.pods(role, ready=False)),
            f"{count} ready pods of {role}",
            seconds,
            lambda: self.kubectl("get", "pods", "-o", "wide"),
        )

    def settled_away(self, pod: str, seconds: float = READY_SECONDS) -> None:
        """Wait until a pod no longer exists."""
        eventually(
            lambda: not self.kubectl("get", "pod", pod, "--ignore-not-found", "-o", "name"),
            f"pod {pod} is gone",
            seconds,
            lambda: self.kubectl("get", "pods", "-o", "wide"),
        )

    def kill(self, pod: str) -> None:
        """Send SIGKILL to the init process of a pod's container, bypassing the API server."""
        kill_container(self.cluster, self.namespace, pod)

    def evict(self, pod: str) -> bool:
        """Evict a pod with the eviction API, like `kubectl drain`; return false if a disruption budget forbids it."""
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
        """IP address of the gateway's Service, reachable from this machine."""
        return self.kubectl("get", "service", self.name, "-o", "jsonpath={.spec.clusterIP}")

    @property
    def http(self) -> str:
        """Base URL of the OpenAI-compatible API."""
        return f"http://{self.address}/v1"

    @property
    def grpc(self) -> str:
        """`host:port` of the gateway's gRPC server."""
        return f"{self.address}:9000"

    def busy_gateway(self, seconds: float = 30.0) -> str:
        """Wait for a gateway pod that has calls to workers in flight, and return its name."""
        found: list[str] = []

        def looks() -> bool:
            for pod in self._pods("gateway"):
                url = f"http://{pod['status']['podIP']}:{GATEWAY_ADMIN}/fleet"
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
    """Return whether the pool is ready, has no rollout in progress, and its status is that of the current
    generation."""
    by_type = {one["type"]: one for one in pool.get("status", {}).get("conditions", [])}
    if not {"Ready", "Progressing"} <= by_type.keys():
        return False
    of_this = all(
        by_type[kind]["observedGeneration"] == pool["metadata"]["generation"] for kind in ("Ready", "Progressing")
    )
    return of_this and by_type["Ready"]["status"] == "True" and by_type["Progressing"]["status"] == "False"


def eventually(holds: Callable[[], bool], what: str, seconds: float, explain: Callable[[], str] = lambda: "") -> None:
    """Wait until `holds()` is true.

    Raises:
        AssertionError: the condition is not true within `seconds`.
    """
    pause, deadline = threading.Event(), CLOCK.monotonic() + seconds
    while not _without_hiccup(holds):
        assert CLOCK.monotonic() < deadline, f"not met within {seconds:.0f} s: {what}\n{explain()}"
        pause.wait(_LOOK_SECONDS)


def kill_container(cluster: Cluster, namespace: str, pod: str) -> None:
    """Send SIGKILL to the init process of a pod's only container."""
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
    by_type = pool.get("status", {}).get("conditions", [])
    return "\n".join(f"{one['type']}={one['status']} {one['reason']}: {one['message']}" for one in by_type)
