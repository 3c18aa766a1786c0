"""Replica counts of a role, and which manager sets them."""

import json

import pytest

from kvferry.core.errors import Unavailable
from kvferry.operator.pool.names import WORKER_ROLES

pytestmark = pytest.mark.cluster

SCALERS = "poolrolescalers.kvferry.dev"


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


def test_gateways_may_read_the_scalers_of_all_roles_and_scale_those_of_the_pool(world):
    """A gateway looks for the scaler of each role; for a role that the pool does not have, there must be none (404),
    not a refusal (403)."""
    world.apply(roles=[{"name": "both", "scaling": {"mode": "External", "minReplicas": 0}}])
    world.settled()

    def may(verb: str, name: str, *flags: str) -> bool:
        account = f"--as=system:serviceaccount:{world.namespace}:chat-gateway"
        try:
            return world.kubectl("auth", "can-i", verb, f"{SCALERS}/{name}", account, *flags).strip() == "yes"
        except Unavailable:  # the exit status of "no"
            return False

    assert all(may("get", f"chat-{role}") for role in WORKER_ROLES)
    assert not may("get", "other-both")
    assert may("patch", "chat-both", "--subresource=scale")
    assert not may("patch", "chat-decode", "--subresource=scale")


def test_changing_the_scaling_mode_changes_no_number(world):
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
    assert "kubectl owns spec.replicas too" in message
    assert "scaling.mode to External" in message
    assert world.deployments()[f"chat-decode-{revision}"] == 3


def test_a_role_that_may_sleep_sleeps(world):
    roles = [{"name": "both", "scaling": {"mode": "External", "minReplicas": 0}}]
    world.apply(roles=roles)
    world.settled()
    world.until(lambda: world.get("kvscale", "chat-both")["metadata"]["annotations"]["kvferry.dev/wake"] == "true")
    world.kubectl("scale", "kvscale/chat-both", "--replicas=0")
    world.until(lambda: world.condition("Ready")[:2] == ("True", "ScaledToZero"))
    assert [role["summary"] for role in world.status()["roles"]] == ["0/0"]


def test_a_number_is_released_with_the_command_of_the_manual(world):
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


def test_a_return_to_static_names_only_the_manager_that_scaled(world):
    external = [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External"}}]
    world.apply(roles=external)
    world.settled()
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=3")
    world.until(lambda: world.get("kvscale", "chat-decode")["spec"]["replicas"] == 3)
    world.settled()
    world.apply()
    message = world.until(lambda: (c := world.condition("ReplicasContested"))[0] == "True" and c[2])
    assert "kubectl owns spec.replicas too" in message
    assert world.condition("ChildrenApplied")[0] == "True"
