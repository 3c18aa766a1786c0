"""The chart under helm: golden renderings, installation, upgrade and removal."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.operators import CHART, Kube, a_cluster, a_pool, eventually, helm

from kvferry.core.errors import Unavailable

pytestmark = pytest.mark.cluster

GOLDEN = Path(__file__).parents[1] / "golden/chart"
WRITE = "KVFERRY_WRITE_GOLDEN"
EVERYTHING = {
    "operator": {
        "env": [{"name": "A", "value": "b"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "host",
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "imagePullSecrets": ["registry"],
    "image": {"digest": f"sha256:{'0' * 64}"},
    "serviceAccount": {"annotations": {"e": "f"}},
    "metrics": {
        "podMonitor": {"enabled": True, "labels": {"g": "h"}},
        "alerts": {"enabled": True, "labels": {"i": "j"}},
    },
    "picker": {
        "enabled": True,
        "inferencePool": "llama",
        "metricsPort": 9100,
        "objectives": {"batch": -1},
        "args": ["--fallbacks=2"],
        "networkPolicy": True,
    },
    "valkey": {"enabled": True},
    "examplePool": {"enabled": True},
    "crds": {"install": False},
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}],
}
RENDERS = {
    "default": {"crds": {"install": False}},
    "namespaced": {"crds": {"install": False}, "operator": {"namespaces": ["team-a", "team-b"]}},
    "everything": EVERYTHING,
}
"""Values by the name of the golden file; the definitions are files of their own."""


def test_helm_lint_passes(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    for made in RENDERS.values():
        values.write_text(yaml.safe_dump(made))
        helm("lint", "--strict", CHART, "--values", values)


@pytest.mark.parametrize("name", list(RENDERS))
def test_the_rendered_chart_equals_the_golden_files(name: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(RENDERS[name]))
    made = helm("template", "kvferry", CHART, "--namespace", "kvferry", "--values", values)
    kept = GOLDEN / f"{name}.yaml"
    if os.environ.get(WRITE):
        kept.write_text(made)
    assert made == kept.read_text(), f"check the difference; {WRITE}=1 writes the new file"


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube"), defined=False) as made:
        yield made


def older_chart(folder: Path) -> Path:
    """Return a copy of the chart whose definition lacks `spec.disruption`."""
    chart = folder / "older"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.9"}))
    path = chart / "files/crds/inferencepools.kvferry.dev.yaml"
    definition = yaml.safe_load(path.read_text())
    del definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["disruption"]
    path.write_text(yaml.safe_dump(definition))
    return chart


def is_known(kube: Kube, field: str) -> bool:
    try:
        kube.kubectl("explain", f"inferencepools.kvferry.dev.spec.{field}")
    except Unavailable:
        return False
    return True


def uid(kube: Kube) -> str:
    return str(kube.pool("default")["metadata"]["uid"])


def definitions(kube: Kube) -> list[str]:
    return [name for name in kube.kubectl("get", "crd", "-o", "name").split() if "kvferry.dev" in name]


def test_an_upgrade_adds_new_fields_and_an_uninstall_removes_what_the_values_select(kube: Kube, tmp_path: Path) -> None:
    flags = ("kv", "--namespace", "default", "--set", "operator.replicas=0")
    helm("install", flags[0], older_chart(tmp_path), *flags[1:], kubeconfig=kube.kubeconfig)
    kube.kubectl("wait", "--for=condition=Established", "crd/inferencepools.kvferry.dev", "--timeout=30s")
    assert not is_known(kube, "disruption")
    kube.apply(a_pool("default"))
    before = uid(kube)
    helm("upgrade", flags[0], CHART, *flags[1:], kubeconfig=kube.kubeconfig)
    eventually(lambda: is_known(kube, "disruption"), "the field is known")
    assert uid(kube) == before
    assert kube.pool("default")["spec"]["disruption"] == {"maxUnavailable": "1"}
    helm("uninstall", "kv", "--namespace", "default", kubeconfig=kube.kubeconfig)
    assert uid(kube) == before
    assert len(definitions(kube)) == 2
    gone = ("--set", "crds.keep=false")
    helm("install", flags[0], CHART, *flags[1:], *gone, kubeconfig=kube.kubeconfig)
    assert uid(kube) == before, "a new release takes over the definitions that were kept"
    helm("uninstall", "kv", "--namespace", "default", "--wait", kubeconfig=kube.kubeconfig)
    eventually(lambda: not definitions(kube), "the definitions, and with them the pools, are gone")
