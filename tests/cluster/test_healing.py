"""A child of a pool is restored within seconds after it is deleted or loses labels, its owner reference or a field."""

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster.operators import (
    CLOCK,
    Kube,
    a_cluster,
    a_pool,
    an_operator,
    eventually,
    fake_pods,
    minimal_definition,
)

from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR

pytestmark = pytest.mark.cluster

KINDS = (
    "deployments",
    "services",
    "poolrolescalers",
    "controllerrevisions",
    "poddisruptionbudgets",
    "networkpolicies",
    "secrets",
    "configmaps",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "podmonitors",
    "inferencepools.inference.networking.k8s.io",
)
HEALED_SECONDS = 5.0
"""Bound in seconds that the documentation gives."""
SLOW_SECONDS = 20.0
"""Bound in seconds on a machine that runs other tests at the same time."""


class Pool:
    """A pool with children of every kind."""

    def __init__(self, kube: Kube, namespace: str, say: Callable[[str], None]) -> None:
        self.kube, self.namespace, self.say = kube, namespace, say

    def kubectl(self, *words: object) -> str:
        return self.kube.kubectl(*words, "-n", self.namespace)

    def children(self) -> dict[str, dict[str, Any]]:
        """Return the metadata of all children by kind and name."""
        found = {}
        for kind in KINDS:
            for item in json.loads(self.kubectl("get", kind, "-l", "kvferry.dev/pool=chat", "-o", "json"))["items"]:
                found[f"{kind}/{item['metadata']['name']}"] = item["metadata"]
        return found

    def is_rolled_over(self) -> bool:
        """Return whether the Secret was generated again and only pods with its keys are left."""
        status = self.kube.pool(self.namespace)["status"]
        deployed = [child for child in self.children() if child.startswith("deployments/")]
        wanted = {"chat-gateway", *(f"chat-{role}-{status['revision']}" for role in ("prefill", "decode"))}
        is_ready = self.kube.condition(self.namespace, "RolesReady").get("status") == "True"
        return bool(status.get("keys")) and is_ready and {child.partition("/")[2] for child in deployed} == wanted

    def meta(self, child: str) -> dict[str, Any]:
        raw = self.kubectl("get", child, "--ignore-not-found", "-o", "json")
        return json.loads(raw)["metadata"] if raw.strip() else {}

    def managers(self, child: str) -> set[str]:
        """Return the field managers of an object."""
        raw = self.kubectl("get", child, "-o", "json", "--show-managed-fields")
        return {entry["manager"] for entry in json.loads(raw)["metadata"].get("managedFields") or ()}

    def healed(self, child: str, what: str, is_healed: Callable[[dict[str, Any]], Any]) -> float:
        begun = CLOCK.monotonic()
        eventually(lambda: is_healed(self.meta(child)), f"{child} {what}: {self.meta(child)}", SLOW_SECONDS)
        seconds = CLOCK.monotonic() - begun
        self.say(f"{child} {what}: restored after {seconds:.1f} s")
        return seconds


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube")) as made:
        made.define(
            minimal_definition(*POD_MONITOR, "PodMonitor"), minimal_definition(*EXTENSION_POOL, "InferencePool")
        )
        yield made


@pytest.fixture(scope="module")
def pool(kube: Kube, say: Callable[[str], None]) -> Iterator[Pool]:
    with kube.namespace() as name, an_operator(kube.kubeconfig, name), fake_pods(kube, name):
        kube.apply(a_pool(name, gateway={"inferenceExtension": "Auto"}))
        kube.rolled_out(name)
        made = Pool(kube, name, say)
        eventually(lambda: {child.partition("/")[0] for child in made.children()} == set(KINDS), "children")
        yield made


def test_a_child_of_any_kind_that_is_deleted_is_restored(pool: Pool) -> None:
    took = []
    for child, meta in pool.children().items():
        pool.kubectl("delete", child, "--wait=false")
        took.append(pool.healed(child, "deleted", lambda now, was=meta["uid"]: now and now["uid"] != was))
    pool.say(f"{len(took)} children deleted, restored after at most {max(took):.1f} s")
    eventually(pool.is_rolled_over, "the pods with the lost keys are replaced", 60)


def test_a_lost_field_of_a_child_of_any_kind_is_restored(pool: Pool) -> None:
    """Secrets are not read, so only their existence is watched."""
    took = []
    for child in pool.children():
        if child.startswith("secrets/"):
            continue
        pool.kubectl("label", child, "kvferry.dev/pool-")
        took.append(pool.healed(child, "without label", lambda now: "kvferry.dev/pool" in now["labels"]))
        gone = '[{"op":"remove","path":"/metadata/ownerReferences"}]'
        pool.kubectl("patch", child, "--type=json", "-p", gone)
        took.append(pool.healed(child, "without owner", lambda now: now.get("ownerReferences")))
    pool.say(f"{len(took)} fields removed, restored after at most {max(took):.1f} s")
    pool.kube.rolled_out(pool.namespace)


@pytest.mark.parametrize(
    ("child", "path"),
    [
        ("services/chat", "/spec/ports/1"),
        ("services/chat-decode", "/spec/selector"),
        ("rolebindings/chat-gateway", "/subjects"),
        ("networkpolicies/chat-workers", "/spec/ingress"),
        ("poddisruptionbudgets/chat-decode", "/spec/maxUnavailable"),
        ("deployments/chat-gateway", "/spec/template/spec/containers/0/readinessProbe"),
        ("podmonitors/chat", "/spec/podMetricsEndpoints"),
    ],
)
def test_a_removed_part_of_a_spec_is_restored(pool: Pool, child: str, path: str) -> None:
    def part() -> Any:
        found = json.loads(pool.kubectl("get", child, "-o", "json"))
        for step in path.split("/")[1:]:
            found = found[int(step)] if isinstance(found, list) and int(step) < len(found) else dict(found).get(step)
            if found is None:
                return None
        return found

    before = part()
    pool.kubectl("patch", child, "--type=json", "-p", json.dumps([{"op": "remove", "path": path}]))
    pool.healed(child, f"without {path}", lambda _: part() == before)


def test_a_field_of_another_manager_is_reported_and_the_printed_command_returns_it(pool: Pool) -> None:
    for child in pool.children():
        if child.startswith(("secrets/", "controllerrevisions/", "inferencepools.")):
            continue
        pool.kubectl("label", "--overwrite", child, "app.kubernetes.io/managed-by=x", "--field-manager=somebody")
        begun = CLOCK.monotonic()
        message = eventually(
            lambda: (c := pool.kube.condition(pool.namespace, "ChildrenApplied"))["status"] == "False" and c["message"],
            f"{child}: reported",
            SLOW_SECONDS,
        )
        pool.say(f"{child}: reported after {CLOCK.monotonic() - begun:.1f} s")
        assert "somebody owns .metadata.labels.app.kubernetes.io/managed-by" in message
        command = shlex.split(message[message.index("kubectl ") :])
        pool.kube.kubectl(*command[1:])
        pool.healed(child, "returned", lambda now: now["labels"]["app.kubernetes.io/managed-by"] == "kvferry-operator")
        eventually(lambda: pool.kube.condition(pool.namespace, "ChildrenApplied")["status"] == "True", child)
        assert not {"somebody", "before-first-apply"} & pool.managers(child)


def test_a_field_that_the_pool_drops_is_removed_also_after_the_managed_fields_were_cleared(pool: Pool) -> None:
    """The API server then assigns all fields to a manager of its own, besides the operator."""

    def env() -> list[dict[str, Any]]:
        made = json.loads(pool.kubectl("get", "deployment", "chat-gateway", "-o", "json"))
        return [one for one in made["spec"]["template"]["spec"]["containers"][0]["env"] if one["name"] == "EXTRA"]

    extra = {"spec": {"containers": [{"name": "gateway", "env": [{"name": "EXTRA", "value": "1"}]}]}}
    pool.kube.change(pool.namespace, gateway={"inferenceExtension": "Auto", "template": extra})
    eventually(env, "the variable of the template")
    cleared = '[{"op":"replace","path":"/metadata/managedFields","value":[{}]}]'
    for child in pool.children():
        if not child.startswith(("secrets/", "controllerrevisions/", "inferencepools.")):
            pool.kubectl("patch", child, "--type=json", "-p", cleared)
            pool.healed(child, "cleared", lambda _, child=child: "kvferry-operator" in pool.managers(child))
            eventually(lambda child=child: "before-first-apply" not in pool.managers(child), child)
    pool.kube.change(pool.namespace, gateway={"inferenceExtension": "Auto", "template": None})
    eventually(lambda: not env(), "no variable is left", SLOW_SECONDS)
    pool.kube.rolled_out(pool.namespace)
    assert pool.kube.condition(pool.namespace, "ChildrenApplied")["status"] == "True"
