"""Children of a pool: restored when deleted, owned by one pool only, created and removed with its fields."""

import json

import pytest
from cluster.world import COLLECTED, spec

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("kind", ["service/chat-decode", "poolrolescaler/chat-prefill", "service/chat"])
def test_a_deleted_child_is_restored(world, kind):
    world.apply()
    world.settled()
    world.kubectl("delete", kind)
    what, name = kind.split("/")
    world.until(lambda: name in world.all(what))


def test_a_deleted_deployment_is_restored(world):
    world.apply()
    name = f"chat-decode-{world.settled()['revision']}"
    uid = world.get("deployment", name)["metadata"]["uid"]
    world.kubectl("delete", "deployment", name)
    world.until(lambda: world.all("deployment").get(name, {}).get("metadata", {}).get("uid", uid) != uid)
    world.settled()


def test_a_field_that_another_manager_takes_is_reported_and_left_to_it(world):
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


def test_an_object_of_another_owner_is_not_taken_over(world):
    world.kubectl("create", "service", "clusterip", "chat", "--tcp=80:80")
    world.apply()
    message = world.until(lambda: (c := world.condition("ChildrenApplied"))[1] == "Refused" and c[2])
    assert "Service chat exists and does not belong to this pool" in message
    assert "ownerReferences" not in world.get("service", "chat")["metadata"]
    world.kubectl("delete", "service", "chat")
    world.until(lambda: world.condition("ChildrenApplied")[0] == "True")


def test_the_keys_are_drawn_once(world):
    world.apply()
    world.settled()
    drawn = world.get("secret", "chat-keys")["data"]
    assert len(set(drawn.values())) == 4
    world.apply(drain={"seconds": 31})
    world.settled()
    assert world.get("secret", "chat-keys")["data"] == drawn


def test_a_pool_with_keys_of_its_own_gets_none(world):
    world.apply(internalKeys={"secretName": "mine"})
    world.settled()
    assert "chat-keys" not in world.all("secret")


def test_the_network_policy_follows_its_field(world):
    world.apply()
    world.settled()
    world.apply(networkPolicy="Off")
    world.until(lambda: not world.all("networkpolicy"))
    world.apply(networkPolicy="Restricted")
    world.until(lambda: {"chat-workers", "chat-gateways"} <= set(world.all("networkpolicy")))


def test_an_optional_kind_that_is_not_installed_is_a_condition(world):
    world.apply(gateway={"inferenceExtension": "Auto"})
    world.settled()
    assert world.condition("GatewayIntegration")[:2] == ("False", "KindNotInstalled")
    world.apply()
    world.until(lambda: world.condition("GatewayIntegration") == ("", "", ""))


def test_a_deployment_with_a_similar_name_is_neither_counted_nor_deleted(world):
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


def test_keys_of_an_earlier_pool_are_replaced_after_their_deletion(world):
    """The Secret of an earlier pool of this name is garbage-collected later."""
    world.kubectl("create", "secret", "generic", "chat-keys", "--from-literal=ticket-key=x")
    world.apply()
    world.settled()
    world.kubectl("delete", "secret", "chat-keys")
    drawn = world.until(lambda: "chat-keys" in world.all("secret") and world.get("secret", "chat-keys")["data"])
    assert set(drawn) == {"ticket-key", "tenant-key", "gateway-key", "admin-token"}


def test_a_restored_pool_uses_the_restored_keys(world):
    world.apply()
    world.settled()
    kept = world.get("secret", "chat-keys")
    world.kubectl("delete", "kvpool", "chat")
    world.until(lambda: "chat-keys" not in world.all("secret"), COLLECTED)
    for field in ("ownerReferences", "uid", "resourceVersion"):
        del kept["metadata"][field]
    world.kubectl("create", "-f", "-", input=json.dumps(kept))
    generated = [e for e in world.all("events").values() if e["reason"] == "KeysGenerated"]
    world.apply()
    world.settled()
    assert world.get("secret", "chat-keys")["data"] == kept["data"]
    assert [e for e in world.all("events").values() if e["reason"] == "KeysGenerated"] == generated
    assert len(generated) == 1


@pytest.mark.parametrize(("how", "is_removed"), [("--server-side", True), ("--server-side=false", False)])
def test_a_null_in_a_template_removes_a_field_by_server_side_apply_only(world, how, is_removed):
    body = {"apiVersion": "kvferry.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "chat"}}
    container = {"name": "gateway", "livenessProbe": None}
    template = {"spec": {"schedulerName": "nobody", "containers": [container]}}
    body["spec"] = spec(gateway={"template": template})
    world.kubectl("apply", how, "-f", "-", input=json.dumps(body))
    found = world.until(lambda: world.all("deployment").get("chat-gateway"))["spec"]["template"]["spec"]
    assert ("livenessProbe" not in found["containers"][0]) == is_removed
