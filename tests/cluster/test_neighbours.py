"""Custom resources of other projects: created if their definition is installed, and accepted by its schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.neighbours import definition
from cluster.operators import Kube, a_cluster, a_pool, an_operator, eventually, rendered

pytestmark = pytest.mark.cluster

QUICK = ("--discovery-seconds", "2")
EXTENSION = "inferencepools.inference.networking.k8s.io"


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with kube.namespace() as name:
        yield name


def integration(kube: Kube, namespace: str) -> str:
    return str(kube.condition(namespace, "GatewayIntegration").get("reason"))


def emitted(kube: Kube, namespace: str, plural: str) -> dict[str, Any]:
    return dict(json.loads(kube.kubectl("get", plural, "chat", "-n", namespace, "-o", "json")))


def remove(kube: Kube, *names: str) -> None:
    kube.kubectl("delete", *(f"crd/{name}" for name in names), "--ignore-not-found", "--wait=true")


@pytest.mark.parametrize("release", ["inference-extension", "inference-extension-oldest"])
def test_the_pool_of_the_inference_extension_is_valid_by_its_definition(
    release: str, kube: Kube, namespace: str
) -> None:
    kube.define(definition(release))
    try:
        with an_operator(kube.kubeconfig, namespace):
            kube.apply(a_pool(namespace, gateway={"inferenceExtension": "Auto"}))
            eventually(
                lambda: integration(kube, namespace) == "Emitted", kube.condition(namespace, "GatewayIntegration")
            )
            made = emitted(kube, namespace, EXTENSION)
            assert made["spec"]["selector"]["matchLabels"] == {
                "kvferry.dev/pool": "chat",
                "kvferry.dev/role": "gateway",
            }
            assert made["spec"]["targetPorts"] == [{"number": 8000}]
            assert made["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
            assert "FailOpen" in kube.condition(namespace, "GatewayIntegration")["message"]
            # Two kinds have the same name; the full names, and our short name, distinguish them.
            for ours in ("kvpool", "inferencepools.kvferry.dev"):
                assert emitted(kube, namespace, ours)["apiVersion"].startswith("kvferry.dev/")
            assert made["apiVersion"].startswith("inference.networking.k8s.io/")
    finally:
        remove(kube, EXTENSION)


def test_kinds_may_be_installed_and_removed_while_the_operator_runs(kube: Kube, namespace: str) -> None:
    pod_monitors = definition("pod-monitor")
    with an_operator(kube.kubeconfig, namespace, *QUICK) as operator:
        kube.apply(a_pool(namespace, gateway={"inferenceExtension": "Auto"}))
        eventually(lambda: integration(kube, namespace) == "KindNotInstalled")
        for _ in range(2):
            kube.define(definition("inference-extension"), pod_monitors)
            eventually(lambda: integration(kube, namespace) == "Emitted", "emitted")
            eventually(lambda: kube.api.get("monitoring.coreos.com/v1", "PodMonitor", namespace, "chat"))
            monitor = emitted(kube, namespace, "podmonitors.monitoring.coreos.com")
            assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics", "admin"]
            remove(kube, EXTENSION, "podmonitors.monitoring.coreos.com")
            eventually(lambda: integration(kube, namespace) == "KindNotInstalled", "gone again")
        assert operator.process.process.poll() is None
        assert operator.get("/healthz")[0] == 200
        assert kube.condition(namespace, "ChildrenApplied")["status"] == "True"


def test_the_charts_pod_monitor_is_valid(kube: Kube, namespace: str, tmp_path: Path) -> None:
    kube.define(definition("pod-monitor"))
    made = [
        one for one in rendered(namespace, "--set", "metrics.podMonitor.enabled=true") if one["kind"] == "PodMonitor"
    ]
    assert len(made) == 1
    text = yaml.safe_dump_all(made)
    kube.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-", input=text)
    remove(kube, "podmonitors.monitoring.coreos.com")
