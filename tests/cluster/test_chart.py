"""The chart as helm sees it: strict, rendered as recorded, upgraded with its definitions, removed without a trace."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.core.errors import Unavailable
from kvferry.testing.kube import assets
from kvferry.testing.machine import ROOT

CHART = ROOT / "charts/kvferry"
GOLDEN = ROOT / "tests/golden/chart"
RENDERS: dict[str, dict[str, Any]] = {
    "default": {},
    "namespaced": {"operator": {"namespaces": ["a", "b"], "replicas": 1}, "serviceAccount": {"name": "mine"}},
    "everything": {
        "image": {"repository": "registry.example/kvferry", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": ["pull"],
        "operator": {
            "priorityClassName": "high",
            "runtimeClassName": "host",
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "podAnnotations": {"n": "1"},
            "podLabels": {"team": "x"},
            "env": [{"name": "A", "value": "1"}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
        "serviceAccount": {"annotations": {"role": "r"}},
        "metrics": {"podMonitor": {"enabled": True, "labels": {"release": "p"}}, "dashboards": {"enabled": True}},
        "valkey": {"enabled": True},
        "examplePool": {"enabled": True},
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}],
    },
}

pytestmark = pytest.mark.cluster

Helm = Callable[..., str]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Run helm; what it said."""
    binary = assets.find(["tools"]).path("helm")
    home = tmp_path_factory.mktemp("helm")

    def run(*words: object, values: Any = None, kubeconfig: Path | None = None) -> str:
        command = [str(binary), *map(str, words)]
        env = {"HOME": str(home), "PATH": os.defpath} | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})
        if values is not None:
            command += ["--values", "-"]
        done = subprocess.run(
            command, input=yaml.safe_dump(values or {}), env=env, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise Unavailable(done.stderr)
        return done.stdout

    return run


def test_lint_is_strict(helm):
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


@pytest.mark.parametrize("name", RENDERS)
def test_it_renders_as_recorded(helm, name):
    """Written anew with KVFERRY_GOLDEN=write; definitions are the files themselves and left out."""
    text = helm("template", "x", CHART, "--namespace", "kv", "--set", "crds.install=false", values=RENDERS[name])
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("KVFERRY_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nonsense": 1}, "additional properties 'nonsense' not allowed"),
        ({"operator": {"replica": 1}}, "additional properties 'replica' not allowed"),
        ({"operator": {"replicas": 99}}, "maximum"),
        ({"image": {"digest": "latest"}}, "does not match pattern"),
        ({"operator": {"namespaces": ["Not A Name"]}}, "does not match pattern"),
        ({"examplePool": {"name": "a.b"}}, "does not match pattern"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm, values, said):
    with pytest.raises(Unavailable, match=said):
        helm("template", "x", CHART, values=values)


@pytest.fixture
def installed(kube, namespace, helm, tmp_path) -> Iterator[tuple[Helm, Path, str]]:
    """A release of an older chart, whose definition lacks a field."""
    old = tmp_path / "old"
    shutil.copytree(CHART, old)
    chart = yaml.safe_load((old / "Chart.yaml").read_text()) | {"version": "0.0.9", "appVersion": "0.0.9"}
    (old / "Chart.yaml").write_text(yaml.safe_dump(chart))
    path = old / "files/crds/inferencepools.kvferry.dev.yaml"
    definition = yaml.safe_load(path.read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["disruption"]
    path.write_text(yaml.safe_dump(definition))

    def run(*words: object, values: Any = None) -> str:
        return helm(*words, "--namespace", namespace, values=values, kubeconfig=kube.kubeconfig)

    for name in ("inferencepools.kvferry.dev", "poolrolescalers.kvferry.dev"):
        kube.kubectl("delete", "crd", name, "--ignore-not-found")
    run("install", "kvferry", old, values={"operator": {"replicas": 0}})
    kube.kubectl("wait", "--for=condition=Established", "crd/inferencepools.kvferry.dev", "--timeout=30s")
    yield run, old, namespace
    # The cluster is shared: others expect the definitions of now.
    kube.kubectl("apply", "--server-side", "--force-conflicts", "-f", CHART / "files/crds")
    kube.kubectl("wait", "--for=condition=Established", "-f", CHART / "files/crds", "--timeout=30s")


POOL = """
apiVersion: kvferry.dev/v1alpha1
kind: InferencePool
metadata: {name: chat}
spec: {model: {name: m}, roles: [{name: combined}]}
"""


def has_field(kube: Any) -> bool:
    path = "jsonpath={.spec.versions[0].schema.openAPIV3Schema.properties.spec.properties.disruption.type}"
    return kube.kubectl("get", "crd", "inferencepools.kvferry.dev", "-o", path) == "object"


def test_an_upgrade_upgrades_the_definitions_and_pools_survive_it_and_the_removal(kube, installed):
    run, _, namespace = installed
    assert not has_field(kube)
    kube.kubectl("create", "-n", namespace, "-f", "-", input=POOL)
    uid = kube.kubectl("get", "kvpool", "chat", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
    run("upgrade", "kvferry", CHART, values={"operator": {"replicas": 0}})
    assert has_field(kube)
    assert kube.kubectl("get", "kvpool", "chat", "-n", namespace, "-o", "jsonpath={.metadata.uid}") == uid
    run("uninstall", "kvferry")
    assert kube.kubectl("get", "kvpool", "chat", "-n", namespace, "-o", "jsonpath={.metadata.uid}") == uid
    assert "kvferry" not in kube.kubectl("get", "clusterrole,clusterrolebinding", "-o", "name")


def test_without_keep_the_definitions_go_with_the_release(kube, installed):
    run, _, _ = installed
    run("upgrade", "kvferry", CHART, values={"operator": {"replicas": 0}, "crds": {"keep": False}})
    run("uninstall", "kvferry")
    kube.kubectl("wait", "--for=delete", "crd/inferencepools.kvferry.dev", "--timeout=30s")
