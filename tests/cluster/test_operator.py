"""What the operator does and says, scenario by scenario, on a real API server; pods are made ready by the test."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.clock import SystemClock
from kvferry.core.config import child_environment
from kvferry.operator.api import KubeApi
from kvferry.testing.documents import fences
from kvferry.testing.kube.fake_kubelet import FakeKubelet, kubelet, ready, waiting
from kvferry.testing.machine import ROOT
from kvferry.testing.processes import running

DEFINITIONS: Path = ROOT / "charts/kvferry/files/crds"
PATIENCE = 60.0
COLLECTED = 90.0
"""The garbage collector learns of new kinds every half a minute."""
LOOK = 0.1

pytestmark = pytest.mark.cluster

Json = dict[str, Any]


def spec(**fields: Any) -> Json:
    return {
        "model": {"name": "m"},
        "roles": [{"name": "prefill", "replicas": 1}, {"name": "decode", "replicas": 2}],
        **fields,
    }


@dataclass
class World:
    """One namespace with an operator at work."""

    kube: Any
    api: KubeApi
    namespace: str
    kubelet: FakeKubelet
    _clock: SystemClock = field(default_factory=SystemClock)

    def apply(self, name: str = "chat", *, scheduler: str = "nobody", **fields: Any) -> None:
        """Apply a pool; its pods are left alone by the scheduler, so that only the test says what becomes of them."""
        wanted = spec(**fields)
        of_nobody = {"template": {"spec": {"schedulerName": scheduler}}}
        wanted["roles"] = [{**role, **of_nobody} for role in wanted["roles"]]
        wanted["gateway"] = {**wanted.get("gateway", {}), **of_nobody}
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
        """The first true answer; fails after so long with the last one."""
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
        """The status once the pool is as its spec of now wants it."""

        def done() -> Json | None:
            pool = self.get("kvpool", name)
            status = pool.get("status") or {}
            told = {c["type"]: c for c in status.get("conditions") or ()}
            same = status.get("observedGeneration") == pool["metadata"]["generation"]
            return status if same and told.get("Progressing", {}).get("reason") == "Complete" else None

        return self.until(done)

    def deployments(self) -> dict[str, int]:
        """Worker pods wanted, by Deployment."""
        found = self.all("deployment")
        return {n: d["spec"]["replicas"] for n, d in found.items() if not n.endswith("-gateway")}

    def kubectl(self, *words: object, **more: Any) -> str:
        return self.kube.kubectl(*words, "-n", self.namespace, **more)


@pytest.fixture(scope="module")
def api(kube) -> KubeApi:
    kube.kubectl("apply", "--server-side", "-f", DEFINITIONS)
    kube.kubectl("wait", "--for=condition=Established", "-f", DEFINITIONS, "--timeout=30s")
    return KubeApi.connect(str(kube.kubeconfig))


def operator(stack: ExitStack, kube: Any, *arguments: str) -> Any:
    process = stack.enter_context(
        running("operator", "run", "--kubeconfig", str(kube.kubeconfig), "--health", "127.0.0.1:0", *arguments)
    )
    process.wait_for("leading", 30)
    return process


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


# -- a pool's beginning ------------------------------------------------------------------------------------------------


def test_a_new_pool_gets_all_that_it_needs_and_says_so(world):
    world.apply()
    status = world.settled()
    revision = status["revision"]
    assert world.deployments() == {f"chat-prefill-{revision}": 1, f"chat-decode-{revision}": 2}
    assert set(world.all("service")) == {"chat", "chat-prefill", "chat-decode"}
    assert set(world.all("poolrolescaler")) == {"chat-prefill", "chat-decode"}
    assert set(world.all("pdb")) == {"chat-prefill", "chat-decode", "chat-gateway"}
    assert set(world.all("networkpolicy")) == {"chat-workers"}
    assert set(world.all("serviceaccount")) - {"default"} == {"chat-worker", "chat-gateway"}
    assert set(world.all("role")) == set(world.all("rolebinding")) == {"chat-gateway"}
    assert set(world.all("secret")) == {"chat-keys"}
    assert set(world.all("controllerrevision.apps")) >= {f"chat-{revision}"}
    assert [(r["name"], r["summary"], r["updated"]) for r in status["roles"]] == [
        ("prefill", "1/1", 1),
        ("decode", "2/2", 2),
    ]
    assert status["gateway"] == {"desired": 1, "ready": 1}
    assert status["url"] == f"http://chat.{world.namespace}.svc:80/v1"
    assert world.condition("RolesReady")[:2] == ("True", "AllReady")
    assert world.condition("GatewayReady")[:2] == ("True", "GatewayPodsReady")
    assert world.condition("ChildrenApplied")[:2] == ("True", "Applied")
    assert world.condition("ReplicasContested")[:2] == ("False", "OneWriter")
    # No node, so no gateway that could tell of its workers.
    assert world.condition("ModelAvailable")[:2] == ("Unknown", "NoGatewayWord")
    assert world.condition("Ready")[0] == "Unknown"


def test_before_anything_is_ready_nothing_is_called_ready(world):
    world.kubelet.verdict = lambda pod: None
    world.apply()
    world.until(lambda: world.condition("RolesReady")[0] == "False")
    assert world.condition("Ready")[:2] == ("False", "NoGatewayPodReady")
    assert world.condition("Progressing")[:2] == ("True", "RollingOut")
    assert [role["summary"] for role in world.status()["roles"]] == ["0/1", "0/2"]


def test_pods_that_cannot_be_scheduled_say_why(world):
    world.kubelet.verdict = lambda pod: None
    world.apply(scheduler="default-scheduler")
    said = world.until(lambda: "cannot be scheduled: no nodes" in (m := world.condition("RolesReady")[2]) and m)
    assert "and 3 more" in said


def test_an_image_that_cannot_be_had_is_named_and_the_deadline_counts(world):
    world.kubelet.verdict = lambda pod: waiting("ImagePullBackOff", 'Back-off pulling image "x"')
    world.apply(rollout={"progressDeadlineSeconds": 12})
    world.until(lambda: world.condition("Progressing")[1] == "DeadlineExceeded", 40)
    status, _, message = world.condition("Progressing")
    assert status == "False"
    assert "ImagePullBackOff" in message
    events = [e for e in world.all("events").values() if e["reason"] == "DeadlineExceeded"]
    assert [e["type"] for e in events] == ["Warning"]


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (waiting("CrashLoopBackOff", exit_code=2, last="Error"), "exits with 2"),
        (waiting("CrashLoopBackOff", exit_code=137, last="OOMKilled"), "raise resources.limits.memory"),
        (waiting("CreateContainerConfigError", 'secret "keys" not found'), 'secret "keys" not found'),
    ],
    ids=["crash", "memory", "secret"],
)
def test_what_keeps_pods_from_running_is_said_with_the_remedy(world, verdict, said):
    world.kubelet.verdict = lambda pod: verdict
    world.apply()
    world.until(lambda: said in world.condition("RolesReady")[2])


def test_a_quota_that_is_used_up_is_named(world):
    world.kubectl("create", "quota", "few", "--hard=pods=1")
    world.apply()
    world.until(lambda: "exceeded quota: few" in world.condition("RolesReady")[2])


def test_no_gateway_pods_is_not_ready(world):
    world.apply(gateway={"replicas": 0})
    world.until(lambda: world.condition("GatewayReady")[1] == "NoGateway")
    assert world.condition("Ready")[0] == "False"


# -- what stands is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["service/chat-decode", "poolrolescaler/chat-prefill", "service/chat"])
def test_a_child_that_somebody_deletes_comes_back(world, kind):
    world.apply()
    world.settled()
    world.kubectl("delete", kind)
    what, name = kind.split("/")
    world.until(lambda: name in world.all(what))


def test_a_deployment_that_somebody_deletes_comes_back(world):
    world.apply()
    name = f"chat-decode-{world.settled()['revision']}"
    uid = world.get("deployment", name)["metadata"]["uid"]
    world.kubectl("delete", "deployment", name)
    world.until(lambda: world.all("deployment").get(name, {}).get("metadata", {}).get("uid", uid) != uid)
    world.settled()


def test_a_field_that_somebody_else_takes_is_reported_not_fought_over(world):
    world.apply()
    name = f"chat-decode-{world.settled()['revision']}"
    world.kubectl("set", "image", f"deployment/{name}", "worker=other:1", "--field-manager=somebody")
    status, _, message = world.until(
        lambda: (c := world.condition("ChildrenApplied"))[1] == "FieldsOwnedByOthers" and c
    )
    assert status == "False"
    assert "somebody owns" in message
    assert "image" in message
    assert world.condition("Ready")[:2] == ("False", "FieldsOwnedByOthers")
    assert world.get("deployment", name)["spec"]["template"]["spec"]["containers"][0]["image"] == "other:1"


def test_an_object_of_somebody_elses_is_not_taken_over(world):
    world.kubectl("create", "service", "clusterip", "chat", "--tcp=80:80")
    world.apply()
    message = world.until(lambda: (c := world.condition("ChildrenApplied"))[1] == "Refused" and c[2])
    assert "a Service called chat exists and is not this pool's" in message
    assert "ownerReferences" not in world.get("service", "chat")["metadata"]
    world.kubectl("delete", "service", "chat")
    world.until(lambda: world.condition("ChildrenApplied")[0] == "True")


def test_the_keys_are_drawn_once(world):
    world.apply()
    world.settled()
    drawn = world.get("secret", "chat-keys")["data"]
    assert len(set(drawn.values())) == 2
    world.apply(drain={"seconds": 31})
    world.settled()
    assert world.get("secret", "chat-keys")["data"] == drawn


def test_a_pool_with_keys_of_its_own_gets_none(world):
    world.apply(tenancy={"keysSecret": "mine"})
    world.settled()
    assert "chat-keys" not in world.all("secret")


def test_the_network_policy_goes_and_comes_with_the_field(world):
    world.apply()
    world.settled()
    world.apply(networkPolicy="Off")
    world.until(lambda: not world.all("networkpolicy"))
    world.apply(networkPolicy="Restricted")
    world.until(lambda: "chat-workers" in world.all("networkpolicy"))


def test_an_optional_kind_that_is_not_installed_is_a_condition(world):
    world.apply(gateway={"inferenceExtension": "Auto"})
    world.settled()
    assert world.condition("GatewayIntegration")[:2] == ("False", "KindNotInstalled")
    world.apply()
    world.until(lambda: world.condition("GatewayIntegration") == ("", "", ""))


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_a_role_scales_out_and_in_without_a_new_revision(world):
    world.apply()
    before = world.settled()["revision"]
    for replicas in (4, 1):
        world.apply(roles=[{"name": "prefill"}, {"name": "decode", "replicas": replicas}])
        after = world.settled()
        assert after["revision"] == before
        assert world.deployments()[f"chat-decode-{before}"] == replicas


def test_the_scaler_shows_what_an_autoscaler_needs(world):
    world.apply()
    world.settled()
    path = f"/apis/kvferry.dev/v1alpha1/namespaces/{world.namespace}/poolrolescalers/chat-decode/scale"
    scale = json.loads(world.kube.kubectl("get", "--raw", path))
    assert scale["spec"]["replicas"] == 2
    world.until(lambda: world.get("kvscale", "chat-decode")["status"].get("replicas") == 2)
    selector = world.get("kvscale", "chat-decode")["status"]["selector"]
    assert len(json.loads(world.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]) == 2


def test_mode_external_follows_the_scaler_within_bounds(world):
    roles = [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External", "maxReplicas": 3}}]
    world.apply(roles=roles)
    revision = world.settled()["revision"]
    assert world.deployments()[f"chat-decode-{revision}"] == 1
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=2")
    world.until(lambda: world.deployments()[f"chat-decode-{revision}"] == 2)
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=9")
    world.until(lambda: world.deployments()[f"chat-decode-{revision}"] == 3)
    assert world.condition("ReplicasContested")[0] == "False"
    assert world.get("kvscale", "chat-decode")["spec"]["replicas"] == 9


def test_changing_who_scales_changes_no_number(world):
    world.apply()
    revision = world.settled()["revision"]
    external = [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External"}}]
    world.apply(roles=external)
    world.settled()
    assert world.get("kvscale", "chat-decode")["spec"]["replicas"] == 2
    assert world.deployments()[f"chat-decode-{revision}"] == 2
    world.apply()
    world.settled()
    assert world.deployments()[f"chat-decode-{revision}"] == 2


def test_a_second_writer_of_a_static_number_is_named(world):
    world.apply()
    revision = world.settled()["revision"]
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=3")
    message = world.until(lambda: (c := world.condition("ReplicasContested"))[0] == "True" and c[2])
    assert "kubectl writes spec.replicas too" in message
    assert "scaling.mode to External" in message
    assert world.deployments()[f"chat-decode-{revision}"] == 3


def test_a_role_that_may_sleep_sleeps(world):
    roles = [{"name": "combined", "scaling": {"mode": "External", "minReplicas": 0}}]
    world.apply(roles=roles)
    world.settled()
    world.until(lambda: world.get("kvscale", "chat-combined")["metadata"]["annotations"]["kvferry.dev/wake"] == "true")
    world.kubectl("scale", "kvscale/chat-combined", "--replicas=0")
    world.until(lambda: world.condition("Ready")[:2] == ("True", "Asleep"))
    assert [role["summary"] for role in world.status()["roles"]] == ["0/0"]


# -- change ----------------------------------------------------------------------------------------------------------


def test_a_change_rolls_both_roles_and_keeps_the_record(world):
    world.apply()
    old = world.settled()["revision"]
    world.apply(model={"name": "m", "dtype": "float32"})
    new = world.settled()["revision"]
    assert new != old
    world.until(lambda: world.deployments() == {f"chat-prefill-{new}": 1, f"chat-decode-{new}": 2})
    assert set(world.all("controllerrevision.apps")) >= {f"chat-{old}", f"chat-{new}"}


def test_three_edits_in_a_row_never_pass_the_bounds(world):
    roles = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 4}]
    world.apply(roles=roles)
    world.settled()
    for tokens in (128, 256, 512):
        world.apply(roles=roles, model={"name": "m", "maxTokens": tokens})
        for _ in range(5):
            found = world.all("deployment")
            for role, wanted in (("prefill", 2), ("decode", 4)):
                of_role = [d for n, d in found.items() if n.startswith(f"chat-{role}-")]
                assert sum(d["spec"]["replicas"] for d in of_role) <= wanted + 1
                assert sum(d.get("status", {}).get("readyReplicas", 0) for d in of_role) >= wanted
    final = world.settled()
    assert [(r["summary"], r["updated"]) for r in final["roles"]] == [("2/2", 2), ("4/4", 4)]


def test_there_and_back_keeps_the_pods_that_serve(world):
    world.apply()
    old = world.settled()["revision"]
    uid = world.get("deployment", f"chat-decode-{old}")["metadata"]["uid"]
    world.kubelet.verdict = lambda pod: ready(pod) if old in pod["metadata"]["name"] else None
    world.apply(model={"name": "m", "maxTokens": 99})
    world.until(lambda: len(world.deployments()) == 4)
    world.apply()
    assert world.settled()["revision"] == old
    world.until(lambda: len(world.deployments()) == 2)
    assert world.get("deployment", f"chat-decode-{old}")["metadata"]["uid"] == uid
    assert world.get("deployment", f"chat-decode-{old}")["status"]["readyReplicas"] == 2


def test_a_broken_revision_takes_nothing_away(world):
    world.apply()
    old = world.settled()["revision"]
    world.kubelet.verdict = lambda pod: (
        ready(pod) if old in pod["metadata"]["name"] else waiting("CrashLoopBackOff", exit_code=1)
    )
    world.apply(model={"name": "m", "maxTokens": 98}, rollout={"progressDeadlineSeconds": 11})
    world.until(lambda: world.condition("Progressing")[1] == "DeadlineExceeded", 40)
    assert world.get("deployment", f"chat-decode-{old}")["status"]["readyReplicas"] == 2
    assert world.condition("Ready")[0] == "False"


def test_a_rollout_pauses_and_goes_on(world):
    world.apply()
    old = world.settled()["revision"]
    changed = {"model": {"name": "m", "maxTokens": 97}}
    world.apply(**changed, rollout={"paused": True})
    world.until(lambda: world.condition("Progressing")[1] == "Paused")
    assert set(world.deployments()) == {f"chat-prefill-{old}", f"chat-decode-{old}"}
    world.apply(**changed, rollout={"paused": True}, roles=[{"name": "prefill"}, {"name": "decode", "replicas": 3}])
    world.until(lambda: world.deployments()[f"chat-decode-{old}"] == 3)
    world.apply(**changed)
    assert world.settled()["revision"] != old


def test_back_to_an_earlier_revision_and_forward_again(world):
    world.apply()
    first = world.settled()["revision"]
    changed = {"model": {"name": "m", "maxTokens": 96}}
    world.apply(**changed)
    second = world.settled()["revision"]
    world.until(lambda: len(world.deployments()) == 2)
    world.apply(**changed, rollout={"rollbackTo": first})
    assert world.settled()["revision"] == first
    args = world.get("deployment", f"chat-decode-{first}")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--max-model-tokens=0" in args
    world.apply(**changed)
    assert world.settled()["revision"] == second


def test_back_to_what_nobody_recorded_is_refused_and_changes_nothing(world):
    world.apply()
    revision = world.settled()["revision"]
    world.apply(rollout={"rollbackTo": "00000000"})
    message = world.until(lambda: (c := world.condition("Progressing"))[1] == "RevisionNotFound" and c[2])
    assert "kubectl get controllerrevisions" in message
    assert world.deployments() == {f"chat-prefill-{revision}": 1, f"chat-decode-{revision}": 2}


def test_no_more_records_than_asked_for(world):
    for tokens in (11, 12, 13, 14):
        world.apply(model={"name": "m", "maxTokens": tokens}, rollout={"historyLimit": 1})
        revision = world.settled()["revision"]
        world.until(lambda: len(world.deployments()) == 2)
    records = world.until(lambda: len(found := set(world.all("controllerrevision.apps"))) == 2 and found)
    assert f"chat-{revision}" in records


def test_a_role_that_leaves_the_spec_leaves_the_cluster(world):
    world.apply()
    world.settled()
    world.apply(roles=[{"name": "combined"}])
    revision = world.settled()["revision"]
    world.until(lambda: world.deployments() == {f"chat-combined-{revision}": 1})
    world.until(lambda: set(world.all("service")) == {"chat", "chat-combined"})
    world.until(lambda: set(world.all("poolrolescaler")) == {"chat-combined"})
    assert [role["name"] for role in world.status()["roles"]] == ["combined"]


def test_a_change_of_the_gateway_alone_leaves_workers_alone(world):
    world.apply()
    before = world.settled()["revision"]
    uids = {n: d["metadata"]["uid"] for n, d in world.all("pod").items() if "gateway" not in n}
    world.apply(flowControl={"maxStreams": 7})
    assert world.settled()["revision"] == before
    assert {n: d["metadata"]["uid"] for n, d in world.all("pod").items() if "gateway" not in n} == uids


# -- honesty ---------------------------------------------------------------------------------------------------------


def test_every_condition_speaks_of_the_spec_of_now(world):
    world.apply()
    world.settled()
    world.apply(drain={"lingerSeconds": 6})
    status = world.settled()
    generation = world.get("kvpool", "chat")["metadata"]["generation"]
    assert {c["observedGeneration"] for c in status["conditions"]} == {generation}


def test_a_time_of_transition_moves_only_with_the_status(world):
    world.apply()
    before = {c["type"]: (c["status"], c["lastTransitionTime"]) for c in world.settled()["conditions"]}
    world.apply(flowControl={"maxHeld": 9})
    after = {c["type"]: (c["status"], c["lastTransitionTime"]) for c in world.settled()["conditions"]}
    moved = {"Progressing", "RolesReady", "Ready"}  # these went there and back
    assert {k: v for k, v in after.items() if k not in moved} == {k: v for k, v in before.items() if k not in moved}


def test_a_settled_pool_is_left_in_peace(world):
    world.apply()
    world.settled()
    world.until(lambda: world.get("kvscale", "chat-decode").get("status", {}).get("replicas") == 2)

    def versions() -> dict[str, str]:
        kinds = ("service", "pdb", "networkpolicy", "role", "rolebinding", "serviceaccount", "secret")
        return {f"{k}/{n}": o["metadata"]["resourceVersion"] for k in kinds for n, o in world.all(k).items()}

    before, events = versions(), len(world.all("events"))
    world.kubectl("annotate", "kvpool", "chat", "note=nothing")
    world.kubelet._stop.wait(3)
    # The heartbeat may have touched a Service's label meanwhile; nothing else writes.
    changed = {name for name, version in versions().items() if before[name] != version}
    assert {name.split("/")[0] for name in changed} <= {"service"}
    assert len(world.all("events")) == events


def test_events_are_few(world):
    world.apply()
    world.settled()
    told = [e for e in world.all("events").values() if e["involvedObject"]["kind"] == "InferencePool"]
    assert len(told) <= 8
    assert {e["source"]["component"] for e in told} == {"kvferry-operator"}


def test_two_pools_in_a_namespace_do_not_meet(world):
    world.apply("one")
    world.apply("two", roles=[{"name": "combined"}])
    world.settled("one")
    world.settled("two")
    world.kubectl("delete", "kvpool", "two")
    world.until(lambda: not [n for n in world.all("deployment") if n.startswith("two")], COLLECTED)
    assert len([n for n in world.all("deployment") if n.startswith("one")]) == 3


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["background", "foreground", "orphan"])
def test_a_pool_that_is_deleted_takes_its_objects_with_it(world, how):
    world.apply()
    world.settled()
    world.kubectl("delete", "kvpool", "chat", f"--cascade={how}", "--timeout=60s")
    if how == "orphan":
        world.kubelet._stop.wait(1)
        assert len(world.deployments()) == 2
        return
    world.until(lambda: not world.all("deployment") and not world.all("pod"), COLLECTED)
    world.until(lambda: not world.all("service") and not world.all("poolrolescaler"))
    assert "chat-keys" not in world.all("secret")


def test_a_pool_deleted_in_mid_rollout_is_gone(world):
    world.apply()
    old = world.settled()["revision"]
    world.kubelet.verdict = lambda pod: ready(pod) if old in pod["metadata"]["name"] else None
    world.apply(model={"name": "m", "maxTokens": 95})
    world.until(lambda: len(world.deployments()) == 4)
    world.kubectl("delete", "kvpool", "chat", "--timeout=20s")
    world.until(lambda: not world.all("deployment"), COLLECTED)


def test_another_pool_of_the_same_name_begins_anew(world):
    world.apply()
    world.settled()
    keys = world.get("secret", "chat-keys")["data"]
    world.kubectl("delete", "kvpool", "chat", "--timeout=20s")
    world.apply()
    world.settled()
    assert world.get("secret", "chat-keys")["data"] != keys


def test_a_namespace_goes_with_its_pools(kube, world):
    world.apply()
    world.settled()
    kube.kubectl("create", "namespace", f"{world.namespace}-x")
    body = {"apiVersion": "kvferry.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "p"}, "spec": spec()}
    kube.kubectl("create", "-n", f"{world.namespace}-x", "-f", "-", input=json.dumps(body))
    kube.kubectl("delete", "namespace", f"{world.namespace}-x", "--timeout=60s")


def test_while_no_operator_runs_pools_can_be_deleted_and_a_new_one_restarts_nothing(kube, api, namespace):
    """An operator of its own, since this one is stopped and started."""
    with kubelet(api, namespace) as acting, ExitStack() as stack:
        own = ("--namespace", namespace, "--lease-namespace", namespace)
        first = operator(stack, kube, *own, "--identity", "first")
        world = World(kube, api, namespace, acting)
        world.apply()
        world.apply("other")
        world.settled()
        world.settled("other")
        assert first.stop() == 0
        kube.kubectl("delete", "kvpool", "other", "-n", namespace, "--timeout=10s")
        pods = {n: p["metadata"]["uid"] for n, p in world.all("pod").items() if n.startswith("chat")}
        operator(stack, kube, *own, "--identity", "second")
        changed = copy.deepcopy(spec())
        changed["roles"][1]["replicas"] = 3
        world.apply(roles=changed["roles"])
        world.settled()
        after = {n: p["metadata"]["uid"] for n, p in world.all("pod").items() if n.startswith("chat")}
        assert pods.items() <= after.items()
        assert len(after) == len(pods) + 1


def test_the_commands_of_the_manual_work(world, tmp_path):
    """docs/kubernetes.md, in a namespace with the pool that it speaks of."""
    world.apply()
    world.settled()
    mine = tmp_path / "kubeconfig"
    mine.write_bytes(world.kube.kubeconfig.read_bytes())
    world.kube.cluster.kubectl(
        "config", "set-context", "--current", f"--namespace={world.namespace}", f"--kubeconfig={mine}"
    )
    path = f"{world.kube.cluster.assets.folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    env = child_environment({"KUBECONFIG": str(mine), "PATH": path})
    wanted = [fence for fence in fences() if fence.mark == "cluster"]
    assert len(wanted) == 3
    for fence in wanted:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", fence.code],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"line {fence.line}: {done.stderr}"
        assert done.stdout


def test_a_number_is_given_back_as_the_manual_says(world):
    world.apply()
    revision = world.settled()["revision"]
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=3")
    world.until(lambda: world.condition("ReplicasContested")[0] == "True")
    world.kubectl(
        "patch",
        "kvscale",
        "chat-decode",
        "--type=merge",
        "--field-manager=kvferry-operator",
        "-p",
        '{"spec":{"replicas":2}}',
    )
    world.until(lambda: world.condition("ReplicasContested")[0] == "False")
    world.until(lambda: world.deployments()[f"chat-decode-{revision}"] == 2)


def test_the_doctor_of_clusters_says_what_is_in_the_way(world):
    world.apply()
    world.settled()
    command = ["doctor", "--cluster", "--json", "--kubeconfig", str(world.kube.kubeconfig)]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *command], capture_output=True, text=True, timeout=60
    )
    found = {finding["about"]: finding for finding in json.loads(done.stdout)["cluster"]}
    assert found["operator"]["told"] == "at-work leads"
    assert found["definitions"]["verdict"] == "ok"
    assert (found["nodes"]["verdict"], done.returncode) == ("bad", 1)
    assert "NoGatewayWord" in found[f"pool {world.namespace}/chat"]["told"]


def test_roles_that_leave_serve_until_those_that_come_are_ready(world):
    world.apply()
    old = world.settled()["revision"]
    world.kubelet.verdict = lambda pod: ready(pod) if "combined" not in pod["metadata"]["name"] else None
    world.apply(roles=[{"name": "combined", "replicas": 2}])
    world.until(lambda: any(name.startswith("chat-combined") for name in world.deployments()))
    world.until(lambda: "leaves" in world.condition("Progressing")[2])
    assert world.get("deployment", f"chat-decode-{old}")["status"]["readyReplicas"] == 2
    assert {"chat-prefill", "chat-decode"} <= set(world.all("service"))
    world.kubelet.verdict = ready
    world.settled()
    world.until(lambda: set(world.all("service")) == {"chat", "chat-combined"})


def test_back_to_a_revision_of_other_roles_is_refused(world):
    world.apply()
    old = world.settled()["revision"]
    world.apply(roles=[{"name": "combined"}])
    now = world.settled()["revision"]
    world.apply(roles=[{"name": "combined"}], rollout={"rollbackTo": old})
    message = world.until(lambda: (c := world.condition("Progressing"))[1] == "RevisionHasOtherRoles" and c[2])
    assert "Change spec.roles together with rollbackTo" in message
    assert world.deployments()[f"chat-combined-{now}"] == 1
    world.apply(rollout={"rollbackTo": old})
    assert world.settled()["revision"] == old


def test_a_deployment_that_only_looks_like_ours_is_neither_counted_nor_deleted(world):
    world.apply()
    name = f"chat-decode-{world.settled()['revision']}"
    copy_ = world.get("deployment", name)
    copy_["metadata"] = {
        "name": "chat-decode-cafebabe",
        "labels": copy_["metadata"]["labels"] | {"kvferry.dev/revision": "cafebabe"},
    }
    for place in (copy_["spec"]["selector"]["matchLabels"], copy_["spec"]["template"]["metadata"]["labels"]):
        place["kvferry.dev/revision"] = "cafebabe"
    copy_["spec"]["replicas"] = 0
    world.kubectl("create", "-f", "-", input=json.dumps(copy_))
    world.apply(drain={"lingerSeconds": 7})
    status = world.settled()
    assert [r["revision"] for role in status["roles"] for r in role["revisions"]] == [status["revision"]] * 2
    assert "chat-decode-cafebabe" in world.deployments()


def test_keys_of_an_earlier_pool_do_not_stay_away(world):
    """A Secret of the name that is there at first and then collected, as an earlier pool's is."""
    world.kubectl("create", "secret", "generic", "chat-keys", "--from-literal=ticket-key=x")
    world.apply()
    world.settled()
    world.kubectl("delete", "secret", "chat-keys")
    drawn = world.until(lambda: "chat-keys" in world.all("secret") and world.get("secret", "chat-keys")["data"])
    assert set(drawn) == {"ticket-key", "tenant-key"}


@pytest.mark.parametrize(
    "template",
    [{"spec": {"containers": [{"name": {}}]}}, {"spec": {"containers": [{"name": ["a"]}]}}],
    ids=["a name that is a map", "a name that is a list"],
)
def test_a_template_of_which_no_pod_can_be_made_is_said_to_be_so(world, template):
    body = {"apiVersion": "kvferry.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "odd"}}
    world.kubectl("apply", "-f", "-", input=json.dumps({**body, "spec": spec(gateway={"template": template})}))
    said = world.until(lambda: (c := world.condition("Ready", "odd"))[0] == "False" and c)
    assert said[1] in {"SpecNotUnderstood", "Refused"}
    assert "odd" in world.all("kvpool")


def test_back_to_static_after_somebody_scaled_names_who_and_only_that(world):
    external = [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External"}}]
    world.apply(roles=external)
    world.settled()
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=3")
    world.until(lambda: world.get("kvscale", "chat-decode")["spec"]["replicas"] == 3)
    world.settled()
    world.apply()
    message = world.until(lambda: (c := world.condition("ReplicasContested"))[0] == "True" and c[2])
    assert "kubectl writes spec.replicas too" in message
    assert world.condition("ChildrenApplied")[0] == "True"
