"""Replica counts set by others: an HPA, kubectl, KEDA. The operator follows them, or reports the other manager."""

import base64
import datetime
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.neighbours import definition
from cluster.operators import API, Kube, a_cluster, a_pool, an_operator, eventually, fake_pods, stays
from harness.kube.certificates import Authority

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
METRICS = "external.metrics.k8s.io"


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with kube.namespace() as name, an_operator(kube.kubeconfig, name), fake_pods(kube, name):
        yield name


class Metric:
    """The value of the external metric."""

    value = 0


@contextmanager
def external_metric(kube: Kube, namespace: str, folder: Path) -> Iterator[Metric]:
    """Serve an external metric through API aggregation, as a metrics adapter does."""
    metric = Metric()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            name = self.path.partition("?")[0].rpartition("/")[2]
            item = {"metricName": name, "metricLabels": {}, "timestamp": stamp, "value": str(metric.value)}
            body = {"kind": "ExternalMetricValueList", "apiVersion": f"{METRICS}/v1beta1", "items": [item]}
            if "/namespaces/" not in self.path:
                body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{METRICS}/v1beta1"}
                body["resources"] = []
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Write no log."""

    authority = Authority.make("metrics")
    authority.server([f"metrics.{namespace}.svc"], [], folder / "metrics")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "metrics.crt", folder / "metrics.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        port = server.server_address[1]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "metrics", "namespace": namespace},
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        }
        api = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{METRICS}"},
            "spec": {
                "group": METRICS,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": {"name": "metrics", "namespace": namespace, "port": port},
                "caBundle": base64.b64encode(authority.pem).decode(),
            },
        }
        kube.apply(service, api)
        try:
            kube.kubectl("wait", f"apiservice/v1beta1.{METRICS}", "--for=condition=Available", "--timeout=30s")
            yield metric
        finally:
            kube.kubectl("delete", f"apiservice/v1beta1.{METRICS}")
            server.shutdown()
            thread.join(10)


def decode(**role: Any) -> list[dict[str, Any]]:
    return [{"name": "prefill"}, {"name": "decode", **role}]


def scaler(kube: Kube, namespace: str) -> dict[str, Any]:
    found = kube.api.get(API, "PoolRoleScaler", namespace, "chat-decode")
    assert found is not None
    return found


def owners(kube: Kube, namespace: str) -> set[str]:
    """Return the field manager that owns `replicas`."""
    entries = scaler(kube, namespace)["metadata"]["managedFields"]
    return {e["manager"] for e in entries if "f:replicas" in e["fieldsV1"].get("f:spec", {})}


def deployment(kube: Kube, namespace: str) -> dict[str, Any]:
    (found,) = kube.api.list("apps/v1", "Deployment", namespace, {"kvferry.dev/role": "decode"})
    return found


def contested(kube: Kube, namespace: str) -> dict[str, Any]:
    return kube.condition(namespace, "ReplicasContested")


def ready(kube: Kube, namespace: str, pods: int) -> bool:
    roles = kube.pool(namespace)["status"].get("roles") or ()
    return any(role["name"] == "decode" and role["summary"] == f"{pods}/{pods}" for role in roles)


def test_an_hpa_drives_a_role_up_and_down(kube: Kube, namespace: str, tmp_path: Path) -> None:
    kube.apply(a_pool(namespace, roles=decode(scaling={"mode": "External"})))
    kube.rolled_out(namespace)
    assert scaler(kube, namespace)["spec"]["replicas"] == 1
    hpa = yaml.safe_load((EXAMPLES / "hpa.yaml").read_text())
    hpa["metadata"]["namespace"] = namespace
    hpa["spec"]["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    hpa["spec"]["behavior"]["scaleUp"] = {"stabilizationWindowSeconds": 0}
    with external_metric(kube, namespace, tmp_path) as metric:
        metric.value = 4 * 16
        kube.apply(hpa)
        eventually(lambda: ready(kube, namespace, 4), "four decode pods", 60)
        assert owners(kube, namespace) == {"kube-controller-manager"}
        metric.value = 16
        eventually(lambda: ready(kube, namespace, 1), "one decode pod", 60)
        assert owners(kube, namespace) == {"kube-controller-manager"}
    assert contested(kube, namespace)["status"] == "False"


def test_a_change_of_the_mode_changes_no_number(kube: Kube, namespace: str) -> None:
    kube.apply(a_pool(namespace, roles=decode(replicas=2)))
    kube.rolled_out(namespace)
    before = deployment(kube, namespace)["metadata"]["generation"]
    for role in ({"scaling": {"mode": "External"}}, {"replicas": 2}) * 2:
        kube.change(namespace, roles=decode(**role))
        kube.rolled_out(namespace)
        assert scaler(kube, namespace)["spec"]["replicas"] == 2
        assert contested(kube, namespace)["status"] == "False"
    assert deployment(kube, namespace)["metadata"]["generation"] == before
    kube.change(namespace, roles=decode(replicas=3))  # the number comes from the pool's spec again
    eventually(lambda: ready(kube, namespace, 3))


@pytest.mark.parametrize("ran", [0, 3])
def test_a_deleted_scaler_is_restored_with_the_number_that_ran(kube: Kube, namespace: str, ran: int) -> None:
    kube.apply(a_pool(namespace, roles=decode(scaling={"mode": "External", "minReplicas": 0})))
    kube.rolled_out(namespace)
    kube.kubectl("scale", "kvscale/chat-decode", f"--replicas={ran}", "-n", namespace)
    eventually(lambda: ready(kube, namespace, ran))
    before, generation = scaler(kube, namespace), deployment(kube, namespace)["metadata"]["generation"]
    kube.kubectl("delete", "kvscale", "chat-decode", "-n", namespace)
    after = eventually(lambda: kube.api.get(API, "PoolRoleScaler", namespace, "chat-decode"))
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    eventually(lambda: owners(kube, namespace) == {"kvferry-operator-seed"})
    assert scaler(kube, namespace)["spec"]["replicas"] == ran
    kube.rolled_out(namespace)
    assert deployment(kube, namespace)["metadata"]["generation"] == generation, "the Deployment was not scaled"


def give_back(kube: Kube, namespace: str, replicas: int) -> None:
    """Release the field with the command that the condition's message gives."""
    words = (
        contested(kube, namespace)["message"].partition("number for N: kubectl ")[2].replace(":N}", f":{replicas}}}")
    )
    flags, _, change = words.partition(" -p ")
    kube.kubectl(*flags.split(), "-p", change.strip("'"), "-n", namespace)


def test_a_manager_that_scales_a_static_role_is_named_until_it_releases_the_field(kube: Kube, namespace: str) -> None:
    kube.apply(a_pool(namespace, roles=decode(replicas=1)))
    kube.rolled_out(namespace)
    kube.kubectl("scale", "kvscale/chat-decode", "--replicas=2", "-n", namespace)
    found = eventually(lambda: is_true(contested(kube, namespace)))
    assert (found["reason"], "kubectl owns spec.replicas" in found["message"]) == ("OtherManager", True)
    eventually(lambda: ready(kube, namespace, 2))
    stays(lambda: (scaler(kube, namespace)["metadata"]["generation"], deployment(kube, namespace)["spec"]), 5)
    give_back(kube, namespace, 1)
    eventually(lambda: contested(kube, namespace)["status"] == "False")
    eventually(lambda: ready(kube, namespace, 1))
    kube.change(namespace, roles=decode(replicas=3))
    eventually(lambda: ready(kube, namespace, 3))


def test_a_manager_that_scales_a_deployment_is_named_until_it_releases_the_field(kube: Kube, namespace: str) -> None:
    kube.apply(a_pool(namespace, roles=decode(replicas=1)))
    kube.rolled_out(namespace)
    name = deployment(kube, namespace)["metadata"]["name"]
    kube.kubectl("scale", f"deployment/{name}", "--replicas=3", "-n", namespace)
    found = eventually(lambda: is_true(contested(kube, namespace)))
    assert found["message"].startswith(f"Deployment {name}: kubectl owns spec.replicas too")
    stays(lambda: deployment(kube, namespace)["metadata"]["generation"], 5)
    assert deployment(kube, namespace)["spec"]["replicas"] == 3
    give_back(kube, namespace, 1)
    eventually(lambda: contested(kube, namespace)["status"] == "False")
    eventually(lambda: ready(kube, namespace, 1))


def is_true(condition: dict[str, Any]) -> dict[str, Any] | None:
    return condition if condition.get("status") == "True" else None


def test_the_example_for_keda_is_valid(kube: Kube, namespace: str) -> None:
    kube.define(definition("keda"))
    kube.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", EXAMPLES / "keda.yaml")
