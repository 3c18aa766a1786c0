"""RBAC rules of the chart: none of the operator's is missing or unused, and a gateway has only the rights that
it uses.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.operators import (
    API,
    FakePods,
    Kube,
    a_cluster,
    a_pool,
    account_kubeconfig,
    an_operator,
    eventually,
    fake_gateway,
    fake_pods,
    minimal_definition,
    rendered,
)
from harness.kube.control_plane import PlaneOptions

from kvferry.core.errors import Unavailable
from kvferry.gateway.decide.config import PoolName
from kvferry.gateway.fleet.pool_api import ApiError, PoolApi
from kvferry.operator.api import ApiRefusal, KubeApi
from kvferry.operator.objects.support_objects import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.pool.names import GATEWAY_ADMIN

pytestmark = pytest.mark.cluster

ACCOUNT = "kvferry-operator"
RIGHTS = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
Right = tuple[str, str, str]
"""API group, resource, verb."""
ONLY_GIVEN_ON: frozenset[Right] = frozenset(
    {
        ("discovery.k8s.io", "endpointslices", "get"),
        ("discovery.k8s.io", "endpointslices", "list"),
        ("discovery.k8s.io", "endpointslices", "watch"),
        ("kvferry.dev", "poolrolescalers/scale", "get"),
        ("kvferry.dev", "poolrolescalers/scale", "patch"),
    }
)
"""Rights that the operator has only because it must have a right to grant it to a gateway."""
RENEWS: Right = ("", "secrets", "update")
"""Used at renewals of certificates, months after a pool was created."""


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    # Services get addresses of this machine, so that a test can serve as a pool's gateway.
    with a_cluster(tmp_path_factory.mktemp("kube"), PlaneOptions("127.96.0.0/16", audit=True)) as made:
        yield made


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with kube.namespace() as name:
        yield name


def granted(objects: Sequence[Mapping[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb)
        for one in objects
        for rule in one.get("rules") or ()
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def audited(kube: Kube, namespace: str) -> list[dict[str, Any]]:
    """Return the operator's requests for objects in the audit log."""
    user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
    lines = (kube.cluster.folder / "audit.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if user in line]
    return [one for one in found if one["user"]["username"] == user and "objectRef" in one]


def used(events: Sequence[Mapping[str, Any]]) -> set[Right]:
    found = set()
    for event in events:
        what = event["objectRef"]
        resource = what["resource"] + (f"/{what['subresource']}" if "subresource" in what else "")
        found.add((what.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            # an apply that creates the object also needs the RBAC verb `create`
            found.add((what.get("apiGroup", ""), resource, "create"))
    return found


def worker(name: str, role: str, load: int) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "takes_work": True,
        "fingerprint": "f",
        "in_flight": load,
        "blocks_total": 100,
        "blocks_free": 100 - load,
    }


def failed_mount(pod: Mapping[str, Any], message: str) -> dict[str, Any]:
    """Return an event like that of a kubelet."""
    meta = pod["metadata"]
    place = {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **place},
        "type": "Warning",
        "reason": "FailedMount",
        "message": message,
        "source": {"component": "kubelet"},
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }


class Life:
    """Operations on a pool that use every feature, one after the other."""

    def __init__(self, kube: Kube, namespace: str, pods: FakePods) -> None:
        self.kube = kube
        self.pods = pods
        self.namespace = namespace
        self.load = 1

    def fleet(self) -> dict[str, Any]:
        pods = self.kube.api.list("v1", "Pod", self.namespace, {"kvferry.dev/pool": "chat"})
        found = [(pod["metadata"]["name"], pod["metadata"]["labels"]["kvferry.dev/role"]) for pod in pods]
        workers = [worker(name, role, self.load + i) for i, (name, role) in enumerate(found) if role != "gateway"]
        return {"workers": workers, "held": 0, "handoffs": {}}

    def roll(self, **spec: Any) -> None:
        self.kube.change(self.namespace, **spec)
        self.kube.rolled_out(self.namespace)

    def there(self, kind: str, name: str = "") -> bool:
        words = ("get", kind, *([name] if name else []), "-n", self.namespace, "--ignore-not-found", "-o", "name")
        return bool(self.kube.kubectl(*words).strip())

    def run(self) -> None:
        kube, namespace = self.kube, self.namespace
        kube.apply(
            a_pool(
                namespace,
                rollout={"historyLimit": 1, "maxSurge": "100%"},
                gateway={"inferenceExtension": "Auto"},
            )
        )
        service = eventually(lambda: kube.api.get("v1", "Service", namespace, "chat-gateway"))
        with fake_gateway(service["spec"]["clusterIP"], GATEWAY_ADMIN, self.fleet):
            kube.rolled_out(namespace)
            eventually(lambda: kube.condition(namespace, "Ready").get("status") == "True")
            self._scaling()
            self._revisions()
            self._missing_secret()
            self._removals()
        kube.kubectl("delete", "kvpool", "chat", "-n", namespace, "--wait=true")
        # The garbage collector discovers new kinds, such as ours in a new cluster, every 30 s.
        eventually(lambda: not self.there("deployments,services,kvscale"), "all gone with the pool", 90)

    def _scaling(self) -> None:
        self.roll(roles=[{"name": "prefill"}, {"name": "decode", "replicas": 3}])
        self.roll(roles=[{"name": "prefill"}, {"name": "decode", "replicas": 1}])  # marks the pods to be removed first
        auto = {"mode": "Auto", "minReplicas": 0, "maxReplicas": 3, "targetRequests": 1}
        self.load = 9
        self.kube.change(self.namespace, roles=[{"name": "prefill"}, {"name": "decode", "scaling": auto}])
        eventually(lambda: (self.kube.pool(self.namespace)["status"].get("scaling") or [{}])[0].get("role") == "decode")
        self.kube.rolled_out(self.namespace)

    def _revisions(self) -> None:
        first = self.kube.pool(self.namespace)["status"]["revision"]
        self.roll(image="kvferry:two")
        self.roll(rollout={"rollbackTo": first})
        self.roll(rollout={"rollbackTo": ""}, image="kvferry:three")
        self.roll(image="kvferry:four")  # records beyond the limit are deleted
        record = f"controllerrevision/chat-{first}"
        eventually(lambda: not self.there(record))

    def _missing_secret(self) -> None:
        """Check that a volume that cannot be mounted becomes the reason of Ready, from the kubelet's event."""
        self.pods.are_stuck = True
        self.kube.change(self.namespace, image="kvferry:five")

        def stuck() -> list[dict[str, Any]]:
            pods = self.kube.api.list("v1", "Pod", self.namespace, {"kvferry.dev/pool": "chat"})
            return [pod for pod in pods if "containerStatuses" in pod["status"]]

        pod = eventually(stuck)[0]
        message = 'MountVolume.SetUp failed for volume "keys" : secret "gone" not found'
        self.kube.api.create(failed_mount(pod, message))
        eventually(lambda: message in self.kube.condition(self.namespace, "Ready").get("message", ""))
        self.pods.are_stuck = False
        self.kube.rolled_out(self.namespace)

    def _removals(self) -> None:
        assert self.there("podmonitors", "chat")
        assert self.there("inferencepools.inference.networking.k8s.io", "chat")
        off = {"inferenceExtension": "Off"}
        self.kube.change(self.namespace, networkPolicy="Off", observability={"podMonitor": "Off"}, gateway=off)
        eventually(
            lambda: not self.there("networkpolicies,podmonitors,inferencepools.inference.networking.k8s.io"), "removed"
        )
        self.roll(roles=[{"name": "both"}])
        eventually(lambda: not self.there("kvscale", "chat-prefill"))


@pytest.mark.parametrize("scope", ["cluster", "namespace"])
def test_granted_rights_are_those_that_are_used(scope: str, kube: Kube, namespace: str, tmp_path: Path) -> None:
    kube.define(minimal_definition(*POD_MONITOR, "PodMonitor"), minimal_definition(*EXTENSION_POOL, "InferencePool"))
    flags = ["--set", f"operator.namespaces={{{namespace}}}"] if scope == "namespace" else []
    rights = [one for one in rendered(namespace, *flags) if one["kind"] in RIGHTS]
    assert any(one["kind"] == "ClusterRole" for one in rights) == (scope == "cluster")
    for one in rights:
        one["metadata"].setdefault("namespace", namespace)
    kube.apply(*rights)
    account = account_kubeconfig(kube, namespace, ACCOUNT, tmp_path / "kubeconfig")
    everywhere = ["--everywhere"] if scope == "cluster" else []
    with ExitStack() as stack:
        pods = stack.enter_context(fake_pods(kube, namespace))
        operator = stack.enter_context(an_operator(account, namespace, "--watch-probe-seconds", "1", *everywhere))
        Life(kube, namespace, pods).run()
        assert operator.get("/healthz")[0] == 200
        assert operator.process.stop() == 0
    events = audited(kube, namespace)
    assert [event for event in events if event["responseStatus"]["code"] in (401, 403)] == []
    assert granted(rights) - used(events) == ONLY_GIVEN_ON | {RENEWS}


def test_a_secret_is_replaced_by_its_uid_without_permission_to_read_it(
    kube: Kube, namespace: str, tmp_path: Path
) -> None:
    rights = [one for one in rendered(namespace) if one["kind"] in RIGHTS]
    for one in rights:
        one["metadata"].setdefault("namespace", namespace)
    kube.apply(*rights)
    api = KubeApi.connect(kubeconfig=str(account_kubeconfig(kube, namespace, ACCOUNT, tmp_path / "kubeconfig")))
    meta = {"name": "certificates", "namespace": namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"}
    created = api.create({**secret, "metadata": meta, "data": {"a": "eA==", "b": "eA=="}})
    assert created is not None
    uid = created["metadata"]["uid"]
    with pytest.raises(ApiRefusal) as unread:
        api.get("v1", "Secret", namespace, "certificates")
    assert unread.value.status == 403
    replaced = api.replace({**secret, "metadata": {**meta, "uid": uid}, "data": {"a": "eQ=="}})
    assert (replaced["metadata"]["uid"], replaced["data"]) == (uid, {"a": "eQ=="})
    with pytest.raises(ApiRefusal) as foreign:
        api.replace({**secret, "metadata": {**meta, "uid": "0" * 8}, "data": {"a": "eg=="}})
    assert foreign.value.status == 409
    kept = kube.kubectl("get", "secret", "certificates", "-n", namespace, "-o", "jsonpath={.data}")
    assert json.loads(kept) == {"a": "eQ=="}


def test_a_gateway_may_read_slices_and_wake_roles(
    kube: Kube, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = {"mode": "External", "minReplicas": 0}
    roles = [{"name": "prefill", "scaling": sleeps}, {"name": "decode", "scaling": sleeps}]
    with an_operator(kube.kubeconfig, namespace), fake_pods(kube, namespace):
        kube.apply(a_pool(namespace, roles=roles), a_pool(namespace, "awake"))
        kube.rolled_out(namespace)
        kube.rolled_out(namespace, "awake")
    kube.kubectl("scale", "kvscale/chat-decode", "--replicas=0", "-n", namespace)
    monkeypatch.setenv("KUBECONFIG", str(account_kubeconfig(kube, namespace, "chat-gateway", tmp_path / "kubeconfig")))
    gateway = PoolApi.connect(PoolName(namespace, "chat"))
    listed = gateway.list_slices()
    assert {slice_["metadata"]["labels"]["kvferry.dev/pool"] for slice_ in listed["items"]} == {"chat"}
    with gateway.watch_slices(listed["metadata"]["resourceVersion"], 1):
        pass
    scaler = gateway.scaler("decode")
    assert scaler is not None
    gateway.wake("decode", scaler["metadata"]["resourceVersion"])
    assert kube.api.get(API, "PoolRoleScaler", namespace, "chat-decode")["spec"]["replicas"] == 1
    gateway.pool = PoolName(namespace, "awake")
    with pytest.raises(ApiError) as refusal:
        gateway.scaler("decode")
    assert refusal.value.status == 403
    gateway.close()

    def rules(account: str) -> set[str]:
        """Return the rights of an account beyond those of every account."""
        prefix = f"--as=system:serviceaccount:{namespace}:"
        anyone = kube.kubectl("auth", "can-i", "--list", "-n", namespace, f"{prefix}stranger").splitlines()
        his = kube.kubectl("auth", "can-i", "--list", "-n", namespace, f"{prefix}{account}").splitlines()
        return {" ".join(line.split()) for line in set(his) - set(anyone)}

    slices = "endpointslices.discovery.k8s.io [] [] [get list watch]"
    assert rules("awake-gateway") == {slices}
    assert rules("chat-gateway") == {
        slices,
        *(f"poolrolescalers.kvferry.dev [] [chat-{role}] [get]" for role in ("prefill", "decode", "both")),
        *(f"poolrolescalers.kvferry.dev/scale [] [chat-{role}] [get patch]" for role in ("prefill", "decode")),
    }
    for denied in ("list secrets", "list pods", "patch inferencepools.kvferry.dev", "create rolebindings"):
        assert not may(kube, namespace, "chat-gateway", *denied.split())


def may(kube: Kube, namespace: str, account: str, *words: str) -> bool:
    prefix = f"--as=system:serviceaccount:{namespace}:{account}"
    try:
        kube.kubectl("auth", "can-i", *words, "-n", namespace, prefix)
    except Unavailable:
        return False
    return True


def test_the_rules_are_in_order_so_that_a_change_is_easy_to_read() -> None:
    (role,) = [one for one in rendered("any") if one["kind"] == "ClusterRole"]
    assert role["rules"] == sorted(role["rules"], key=lambda rule: (rule["apiGroups"], rule["resources"]))
    assert all(rule["verbs"] == sorted(rule["verbs"]) for rule in role["rules"]), yaml.safe_dump(role["rules"])
