"""Deletion of pools and of namespaces."""

import json

import pytest
from cluster.world import COLLECTED, spec
from harness.kube.fake_kubelet import ready

pytestmark = pytest.mark.cluster


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
    world.apply(model={"name": "m", "maxModelLen": 95})
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
