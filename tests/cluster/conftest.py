"""A cluster for the session and a namespace for each test; a failed test prints the cluster's logs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.world import DEFINITIONS, World, operator
from harness.kube import assets, box, cluster, host_image
from harness.kube.cluster import Cluster, NodeOptions
from harness.kube.fake_kubelet import kubelet
from harness.pools import on_node
from kubernetes import client, config

from kvferry.core.clock import SystemClock
from kvferry.operator.api import KubeApi

RELEASE = "kvferry"


class Kube:
    """A running cluster and a client with an administrator's rights."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self.kubeconfig: Path = running.kubeconfig
        self.client: client.ApiClient = config.new_client_from_config(config_file=str(running.kubeconfig))

    def kubectl(self, *words: object, input: str | None = None, seconds: float = 120.0) -> str:  # noqa: A002
        """Run kubectl and return its output; a failure raises with its error text."""
        return self.cluster.kubectl(*words, stdin=input, seconds=seconds)


_PHASES = pytest.StashKey[bool]()
_USED: list[Kube] = []


@contextmanager
def _seen_by_tests(folder: Path, node_options: NodeOptions | None) -> Iterator[Kube]:
    found = assets.find(["control", "node"] if node_options is not None else ["control"])
    with cluster.running(folder, found, node_options=node_options) as running:
        made = Kube(running)
        _USED.append(made)
        try:
            yield made
        finally:
            _USED.remove(made)
            made.client.close()


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A control plane without nodes, so that pods stay pending."""
    with _seen_by_tests(tmp_path_factory.mktemp("kube"), None) as made:
        yield made


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder mounted at the same path in containers of the runtime `host`, for files that tests write."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)  # pytest creates folders with mode 0700, and containers run as another user
    return folder


@pytest.fixture(scope="session")
def kube_node(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Kube]:
    """A cluster with a node, and the image of the runtime `host` loaded."""
    if reason := box.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("node")
    node_options = NodeOptions(host_image.folders([models]))
    with _seen_by_tests(folder, node_options) as made:
        made.cluster.load(host_image.write(folder / "host.tar", node_options.host_folders))
        yield made


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that prints a line with the elapsed time to the terminal."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    clock = SystemClock()
    start = clock.monotonic()

    def tell(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(f"[{clock.monotonic() - start:6.1f} s] {text}")

    return tell


@pytest.fixture(scope="module")
def operated(kube_node: Kube, say: Callable[[str], None]) -> Iterator[Kube]:
    """A cluster with a node that has the catalog's model, and kvferry installed by its chart in namespace `kvferry`."""
    assets.find(["tools"])  # helm
    kube_node.cluster.keep_model(on_node.MODEL)
    install = ("install", RELEASE, on_node.CHART, "-n", RELEASE, "--create-namespace", "--wait", "--timeout=120s")
    kube_node.cluster.helm(*install, "-f", on_node.VALUES)
    say("helm install: the operator leads")
    yield kube_node
    kube_node.cluster.helm("uninstall", RELEASE, "-n", RELEASE, "--ignore-not-found", "--wait")
    kube_node.kubectl("delete", "namespace", RELEASE, "--ignore-not-found")


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A new namespace in the cluster of the test, deleted without waiting."""
    used: Kube = request.getfixturevalue("kube_node" if "kube_node" in request.fixturenames else "kube")
    name = f"test-{secrets.token_hex(4)}"
    used.kubectl("create", "namespace", name)
    yield name
    if request.node.stash.get(_PHASES, False):
        print(f"--- events in {name}\n{used.kubectl('get', 'events', '-n', name, '--sort-by=.lastTimestamp')}")
    used.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def api(kube) -> KubeApi:
    kube.kubectl("apply", "--server-side", "-f", DEFINITIONS)
    kube.kubectl("wait", "--for=condition=Established", "-f", DEFINITIONS, "--timeout=30s")
    return KubeApi.connect(str(kube.kubeconfig))


@pytest.fixture(scope="module")
def at_work(kube, api) -> Iterator[Any]:
    with ExitStack() as stack:
        process = operator(stack, kube, "--identity", "at-work")
        yield process
        assert process.stop() == 0


@pytest.fixture
def world(kube, api, at_work, namespace) -> Iterator[World]:
    with kubelet(api, namespace) as acting:
        yield World(kube, api, namespace, acting)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and report.when in ("setup", "call"):
        item.stash[_PHASES] = True
        for used in _USED:
            for name, tail in used.cluster.logs():
                report.sections.append((f"log of {name}", tail))
    return report
