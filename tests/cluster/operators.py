"""Shared parts of the operator's tests: the operator as a process, fake pods that become ready, and pools."""

import base64
import http.server
import json
import secrets
import socketserver
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import yaml
from harness.kube import assets, cluster
from harness.kube.cluster import Cluster
from harness.kube.control_plane import PlaneOptions
from harness.servers.processes import RunningProcess, running
from kubernetes import client, config

from kvferry.core.clock import SystemClock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.operator.api import KubeApi

CHART = Path(__file__).parents[2] / "charts/kvferry"
API = "kvferry.dev/v1alpha1"
SECONDS = 30.0
CLOCK = SystemClock()


def eventually(found: Callable[[], Any], what: str = "", seconds: float = SECONDS) -> Any:
    """Return the first true result of `found`; fail with `what` if there is none in time."""
    pause = threading.Event()
    deadline = CLOCK.monotonic() + seconds
    while True:
        value = found()
        if value:
            return value
        assert CLOCK.monotonic() < deadline, f"not met within {seconds} s: {what or found}"
        pause.wait(0.05)


def stays(same: Callable[[], Any], seconds: float) -> None:
    """Fail if the result of `same` changes within `seconds`."""
    pause = threading.Event()
    deadline, first = CLOCK.monotonic() + seconds, same()
    while CLOCK.monotonic() < deadline:
        assert same() == first
        pause.wait(0.2)


class Kube:
    """A cluster without nodes, and clients with an administrator's rights."""

    def __init__(self, made: Cluster) -> None:
        self.cluster = made
        self.kubeconfig = made.kubeconfig
        self.client: client.ApiClient = config.new_client_from_config(config_file=str(made.kubeconfig))
        self.api = KubeApi(self.client)

    def kubectl(self, *words: object, input: str | None = None, seconds: float = 120.0) -> str:  # noqa: A002
        return self.cluster.kubectl(*words, stdin=input, seconds=seconds)

    def apply(self, *made: Mapping[str, Any]) -> None:
        text = "\n---\n".join(json.dumps(one) for one in made)
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)

    def define(self, *definitions: Mapping[str, Any]) -> None:
        """Install definitions, and wait until their kinds are served."""
        self.apply(*definitions)
        for made in definitions:
            eventually(lambda name=made["metadata"]["name"]: self.can_list(name))

    def can_list(self, plural: str) -> bool:
        """Return whether objects of a kind can be listed, which is some time after its definition is established."""
        try:
            self.kubectl("get", plural, "-A")
        except Unavailable:
            return False
        return True

    @contextmanager
    def namespace(self) -> Iterator[str]:
        name = f"test-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        yield name
        self.kubectl("delete", "namespace", name, "--wait=false")

    def pool(self, namespace: str, name: str = "chat") -> dict[str, Any]:
        found = self.api.get(API, "InferencePool", namespace, name)
        assert found is not None
        return found

    def condition(self, namespace: str, kind: str, name: str = "chat") -> dict[str, Any]:
        """Return a condition of the pool's present generation, or an empty mapping."""
        pool = self.pool(namespace, name)
        for found in (pool.get("status") or {}).get("conditions") or ():
            if found["type"] == kind and found["observedGeneration"] == pool["metadata"]["generation"]:
                return dict(found)
        return {}

    def rolled_out(self, namespace: str, name: str = "chat", seconds: float = SECONDS) -> None:
        """Wait until all roles are ready; on a timeout, print the objects and the status."""
        try:
            eventually(
                lambda: self.condition(namespace, "RolesReady", name).get("status") == "True",
                f"pool {namespace}/{name}: roles ready",
                seconds,
            )
        except AssertionError:
            print(self.kubectl("get", "deployments,pods,kvscale", "-n", namespace))
            print(json.dumps(self.pool(namespace, name).get("status"), indent=1))
            raise

    def change(self, namespace: str, name: str = "chat", **spec: Any) -> None:
        self.api.patch(API, "InferencePool", namespace, name, {"spec": spec}, manager="test")


@contextmanager
def a_cluster(folder: Path, plane: PlaneOptions | None = None, *, defined: bool = True) -> Iterator[Kube]:
    """Run a control plane, by default with kvferry's definitions."""
    with cluster.running(folder, assets.find(["control"]), plane=plane) as running_:
        made = Kube(running_)
        try:
            if defined:
                made.define(*(yaml.safe_load(path.read_text()) for path in (CHART / "files/crds").glob("*.yaml")))
            yield made
        finally:
            made.client.close()


def minimal_definition(api_version: str, plural: str, kind: str) -> dict[str, Any]:
    """Return a CustomResourceDefinition that accepts any object."""
    group, _, version = api_version.partition("/")
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Without this annotation the API server refuses groups of k8s.io.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}],
        },
    }


def helm(*words: object, kubeconfig: Path | None = None, seconds: float = 120.0) -> str:
    """Run helm and return its output."""
    command = [str(assets.find(["tools"]).path("helm")), *map(str, words)]
    command += ["--kubeconfig", str(kubeconfig)] if kubeconfig else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"helm {' '.join(map(str, words))}: {done.stdout}{done.stderr}"
    return done.stdout


def rendered(namespace: str, *flags: str) -> list[dict[str, Any]]:
    """Return the chart's objects as helm would install them for release `kvferry`."""
    made = helm("template", "kvferry", CHART, "--namespace", namespace, *flags)
    return [one for one in yaml.safe_load_all(made) if one]


def account_kubeconfig(kube: Kube, namespace: str, account: str, path: Path) -> Path:
    """Write a kubeconfig with the token of a ServiceAccount as its only credentials; return its path."""
    token = kube.kubectl("create", "token", account, "-n", namespace, "--duration=1h").strip()
    made = json.loads(kube.kubeconfig.read_text())
    made["users"] = [{"name": "admin", "user": {"token": token}}]
    path.write_text(json.dumps(made))
    return path


def a_pool(namespace: str, name: str = "chat", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "tiny"},
            "roles": [{"name": "prefill"}, {"name": "decode"}],
            "connector": {"type": "tcp"},
            **spec,
        },
    }


@dataclass
class AnOperator:
    """A running operator."""

    process: RunningProcess

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of `/healthz`, `/readyz` or `/metrics`."""
        port = self.process.wait_for("listening")["health"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as refusal:
            return refusal.code, refusal.read().decode()

    def numbers(self) -> dict[str, float]:
        """Return the values of `/metrics` by name and labels."""
        lines = (line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@contextmanager
def an_operator(kubeconfig: Path, namespace: str, *flags: str, leads: bool = True) -> Iterator[AnOperator]:
    """Run an operator for the pools of one namespace; wait until it leads, unless `leads` is false."""
    words = ("--kubeconfig", str(kubeconfig), "--lease-namespace", namespace, "--health", "127.0.0.1:0")
    where = () if "--everywhere" in flags else ("--namespace", namespace)
    with running("operator", "run", *words, *where, *(flag for flag in flags if flag != "--everywhere")) as process:
        process.wait_for("listening")
        if leads:
            process.wait_for("leading")
        yield AnOperator(process)


@dataclass
class FakePods:
    """Sets pods to ready while the context is open, since no node runs them."""

    api: KubeApi
    namespace: str
    ends: threading.Event = field(default_factory=threading.Event)
    num_made: int = 0
    are_stuck: bool = False
    """If true, new pods report that their containers are being created."""

    def run(self) -> None:
        while not self.ends.wait(0.1):
            with suppress(KvferryError):  # the API server may be unavailable, and pods may be deleted
                for pod in self.api.list("v1", "Pod", self.namespace):
                    self.make_ready(pod)

    def make_ready(self, pod: Mapping[str, Any]) -> None:
        by_type = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
        if by_type.get("Ready") == "True" or "deletionTimestamp" in pod["metadata"]:
            return
        place, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        if self.are_stuck:
            if by_type.get("PodScheduled") != "True":
                waits = {"name": "worker", "ready": False, "restartCount": 0, "image": "x", "imageID": "x"}
                waits["state"] = {"waiting": {"reason": "ContainerCreating"}}
                scheduled = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
                status = {"conditions": scheduled, "containerStatuses": [waits]}
                self.api.patch("v1", "Pod", place, name, {"status": status}, subresource="status")
            return
        self.num_made += 1
        status = {
            "phase": "Running",
            "podIP": f"10.244.{self.num_made // 250}.{self.num_made % 250 + 1}",
            "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")],
        }
        self.api.patch("v1", "Pod", place, name, {"status": status}, subresource="status")


@contextmanager
def fake_pods(kube: Kube, namespace: str) -> Iterator[FakePods]:
    made = FakePods(KubeApi.connect(str(kube.kubeconfig)), namespace)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield made
    finally:
        made.ends.set()
        thread.join(20)


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own method would look up the host's name


@contextmanager
def fake_gateway(address: str, port: int, fleet: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Serve `/fleet` at the address of a Service, which must be an address of this machine."""

    class Fleet(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(fleet()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no log."""

    with _HttpServer((address, port), Fleet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(10)


def decoded(secret: Mapping[str, Any], key: str) -> str:
    return base64.b64decode(secret["data"][key]).decode()
