"""Replica counts set by others: an HPA, kubectl, KEDA. The operator follows them, or reports the other manager."""

import base64
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.neighbours import definition
from cluster.operators import API, Kube, a_cluster, a_pool, an_operator, eventually, fake_pods, stays
from harness.kube.certificates import Authority
from harness.prometheus.metrics_adapter import running_adapter
from harness.prometheus.server import Target, running_prometheus
from prometheus_client import CollectorRegistry, Gauge, start_http_server

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


@contextmanager
def exported_by_workers(namespace: str) -> Iterator[tuple[Gauge, list[Target]]]:
    """Serve a page with the metric of the example; yield it and its targets, one of them in another namespace."""
    with ExitStack() as servers:
        targets = []
        gauges = []
        for place in (namespace, "elsewhere"):
            registry = CollectorRegistry()
            gauges.append(Gauge("kvferry_worker_running", "Sequences.", ["worker"], registry=registry))
            server, thread = start_http_server(0, "127.0.0.1", registry)
            servers.callback(thread.join, 10)
            servers.callback(server.server_close)
            servers.callback(server.shutdown)
            labels = {"namespace": place, "kvferry_dev_pool": "chat", "kvferry_dev_role": "decode", "pod": place}
            targets.append(Target(f"127.0.0.1:{server.server_port}", labels))
        gauges[1].labels("a").set(1000)
        yield gauges[0], targets


@contextmanager
def external_metric(kube: Kube, namespace: str, folder: Path) -> Iterator[Gauge]:
    """Serve the running sequences of workers as an external metric, by Prometheus and prometheus-adapter with the rule
    of the example."""
    authority = Authority.make("metrics")
    authority.server([f"metrics.{namespace}.svc"], [], folder / "metrics")
    for name in ("prometheus", "adapter"):
        (folder / name).mkdir()
    with ExitStack() as stack:
        running_sequences, targets = stack.enter_context(exported_by_workers(namespace))
        prometheus = stack.enter_context(running_prometheus(folder / "prometheus", targets))
        prometheus.wait_for(f"count(up == 1) == {len(targets)}")
        rules = EXAMPLES / "prometheus-adapter.yaml"
        port = stack.enter_context(
            running_adapter(folder / "adapter", kube.kubeconfig, prometheus.url, rules, folder / "metrics")
        )
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
        stack.callback(kube.kubectl, "delete", f"apiservice/v1beta1.{METRICS}")
        kube.kubectl("wait", f"apiservice/v1beta1.{METRICS}", "--for=condition=Available", "--timeout=60s")
        yield running_sequences


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
        metric.labels("a").set(2 * 16)
        metric.labels("b").set(2 * 16)
        kube.apply(hpa)
        eventually(lambda: ready(kube, namespace, 4), "four decode pods", 60)
        assert owners(kube, namespace) == {"kube-controller-manager"}
        metric.labels("b").set(0)
        metric.labels("a").set(16)
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
