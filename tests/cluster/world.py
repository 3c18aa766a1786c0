"""A namespace with a running operator, for tests of pools; the test makes pods ready."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.kube.fake_kubelet import FakeKubelet
from harness.servers.processes import running

from kvferry.bench.commit import ROOT
from kvferry.core.clock import SystemClock
from kvferry.operator.api import KubeApi

DEFINITIONS: Path = ROOT / "charts/kvferry/files/crds"
PATIENCE = 60.0
COLLECTED = 90.0
"""Seconds for the garbage collector, which discovers new kinds every 30 s."""
LOOK = 0.1

Json = dict[str, Any]


def spec(**fields: Any) -> Json:
    return {
        "model": {"name": "m"},
        "roles": [{"name": "prefill", "replicas": 1}, {"name": "decode", "replicas": 2}],
        **fields,
    }


@dataclass
class World:
    """One namespace with a running operator."""

    kube: Any
    api: KubeApi
    namespace: str
    kubelet: FakeKubelet
    _clock: SystemClock = field(default_factory=SystemClock)

    def apply(self, name: str = "chat", *, scheduler: str = "nobody", **fields: Any) -> None:
        """Apply a pool. The scheduler ignores its pods, so their state is set by the test only."""
        wanted = spec(**fields)
        of_nobody = {"template": {"spec": {"schedulerName": scheduler}}}
        wanted["roles"] = [{**role, **of_nobody} for role in wanted["roles"]]
        wanted["gateway"] = {**of_nobody, **wanted.get("gateway", {})}
        body = {
            "apiVersion": "kvferry.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": wanted,
        }
        self.kube.kubectl(
            "apply", "--server-side", "--force-conflicts", "-n", self.namespace, "-f", "-", input=json.dumps(body)
        )

    def get(self, kind: str, name: str) -> Json:
        return json.loads(self.kube.kubectl("get", kind, name, "-n", self.namespace, "-o", "json"))

    def all(self, kind: str) -> dict[str, Json]:
        found = json.loads(self.kube.kubectl("get", kind, "-n", self.namespace, "-o", "json"))["items"]
        return {item["metadata"]["name"]: item for item in found}

    def status(self, name: str = "chat") -> Json:
        return self.get("kvpool", name).get("status") or {}

    def condition(self, kind: str, name: str = "chat") -> tuple[str, str, str]:
        for entry in self.status(name).get("conditions") or ():
            if entry["type"] == kind:
                return entry["status"], entry["reason"], entry["message"]
        return "", "", ""

    def until(self, what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Return the first true result of `what`; after `seconds`, fail with the last one."""
        deadline = self._clock.monotonic() + seconds
        while True:
            answer = what()
            if answer:
                return answer
            assert self._clock.monotonic() < deadline, (
                f"still {answer!r}; {self.kubectl('get', 'kvpool', '-o', 'json')}"
            )
            self.kubelet._stop.wait(LOOK)

    def settled(self, name: str = "chat") -> Json:
        """Wait until a rollout of the present spec is complete; return the status."""

        def done() -> Json | None:
            pool = self.get("kvpool", name)
            status = pool.get("status") or {}
            by_type = {c["type"]: c for c in status.get("conditions") or ()}
            same = status.get("observedGeneration") == pool["metadata"]["generation"]
            return status if same and by_type.get("Progressing", {}).get("reason") == "Complete" else None

        return self.until(done)

    def deployments(self) -> dict[str, int]:
        """Return the replicas of worker Deployments by name."""
        found = self.all("deployment")
        return {n: d["spec"]["replicas"] for n, d in found.items() if not n.endswith("-gateway")}

    def kubectl(self, *words: object, **more: Any) -> str:
        return self.kube.kubectl(*words, "-n", self.namespace, **more)


def operator(stack: ExitStack, kube: Any, *arguments: str) -> Any:
    process = stack.enter_context(
        running("operator", "run", "--kubeconfig", str(kube.kubeconfig), "--health", "127.0.0.1:0", *arguments)
    )
    process.wait_for("leading", 30)
    return process
