"""Creation of a pool: its objects, and its status while its pods cannot run."""

import json
import subprocess
import sys

import pytest
from cluster.world import spec
from harness.kube.fake_kubelet import waiting

pytestmark = pytest.mark.cluster


def test_a_new_pool_gets_its_objects_and_conditions(world):
    world.apply()
    status = world.settled()
    revision = status["revision"]
    assert world.deployments() == {f"chat-prefill-{revision}": 1, f"chat-decode-{revision}": 2}
    assert set(world.all("service")) == {"chat", "chat-gateway", "chat-prefill", "chat-decode"}
    assert set(world.all("poolrolescaler")) == {"chat-prefill", "chat-decode"}
    assert set(world.all("pdb")) == {"chat-prefill", "chat-decode", "chat-gateway"}
    assert set(world.all("networkpolicy")) == {"chat-workers", "chat-gateways"}
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
    assert world.condition("ReplicasContested")[:2] == ("False", "SingleWriter")
    # Without a node, no gateway reports its workers.
    assert world.condition("ModelAvailable")[:2] == ("Unknown", "GatewayReportMissing")
    assert world.condition("Ready")[0] == "Unknown"


def test_nothing_is_reported_ready_before_its_pods_are_ready(world):
    world.kubelet.verdict = lambda pod: None
    world.apply()
    world.until(lambda: world.condition("RolesReady")[0] == "False")
    assert world.condition("Ready")[:2] == ("False", "NoGatewayPodReady")
    assert world.condition("Progressing")[:2] == ("True", "RollingOut")
    assert [role["summary"] for role in world.status()["roles"]] == ["0/1", "0/2"]


def test_pods_that_cannot_be_scheduled_are_reported_with_the_reason(world):
    world.kubelet.verdict = lambda pod: None
    world.apply(scheduler="default-scheduler")
    expected_message = world.until(
        lambda: "cannot be scheduled: no nodes" in (m := world.condition("RolesReady")[2]) and m
    )
    assert "and 3 more" in expected_message


def test_an_image_that_cannot_be_pulled_is_named_and_the_deadline_applies(world):
    world.kubelet.verdict = lambda pod: waiting("ImagePullBackOff", 'Back-off pulling image "x"')
    world.apply(rollout={"progressDeadlineSeconds": 12})
    world.until(lambda: world.condition("Progressing")[1] == "DeadlineExceeded", 40)
    status, _, message = world.condition("Progressing")
    assert status == "False"
    assert "ImagePullBackOff" in message
    events = [e for e in world.all("events").values() if e["reason"] == "DeadlineExceeded"]
    assert [e["type"] for e in events] == ["Warning"]


@pytest.mark.parametrize(
    ("verdict", "expected_message"),
    [
        (waiting("CrashLoopBackOff", exit_code=2, last="Error"), "exits with 2"),
        (waiting("CrashLoopBackOff", exit_code=137, last="OOMKilled"), "raise resources.limits.memory"),
        (waiting("CreateContainerConfigError", 'secret "keys" not found'), 'secret "keys" not found'),
    ],
    ids=["crash", "memory", "secret"],
)
def test_obstacles_to_running_pods_are_reported_with_the_remedy(world, verdict, expected_message):
    world.kubelet.verdict = lambda pod: verdict
    world.apply()
    world.until(lambda: expected_message in world.condition("RolesReady")[2])


def test_a_quota_that_is_used_up_is_named(world):
    world.kubectl("create", "quota", "few", "--hard=pods=1")
    world.apply()
    world.until(lambda: "exceeded quota: few" in world.condition("RolesReady")[2])


def test_a_pool_without_gateway_pods_is_not_ready(world):
    world.apply(gateway={"replicas": 0})
    world.until(lambda: world.condition("GatewayReady")[1] == "NoGateway")
    assert world.condition("Ready")[0] == "False"


@pytest.mark.parametrize(
    "template",
    [{"spec": {"containers": [{"name": {}}]}}, {"spec": {"containers": [{"name": ["a"]}]}}],
    ids=["a name that is a map", "a name that is a list"],
)
def test_a_template_without_a_valid_pod_is_reported(world, template):
    body = {"apiVersion": "kvferry.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "odd"}}
    world.kubectl("apply", "-f", "-", input=json.dumps({**body, "spec": spec(gateway={"template": template})}))
    expected_message = world.until(lambda: (c := world.condition("Ready", "odd"))[0] == "False" and c)
    assert expected_message[1] in {"InvalidSpec", "Refused"}
    assert "odd" in world.all("kvpool")


def test_the_doctor_of_clusters_reports_the_obstacles(world):
    world.apply()
    world.settled()
    command = ["doctor", "--cluster", "--json", "--kubeconfig", str(world.kube.kubeconfig)]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *command], capture_output=True, text=True, timeout=60
    )
    found = {finding["about"]: finding for finding in json.loads(done.stdout)["cluster"]}
    assert (
        found["operator"]["detail"]
        == "at-work leads and reconciles pools in all namespaces (lease in namespace default)"
    )
    assert found["definitions"]["verdict"] == "ok"
    assert (found["nodes"]["verdict"], done.returncode) == ("bad", 1)
    assert "GatewayReportMissing" in found[f"pool {world.namespace}/chat"]["detail"]
