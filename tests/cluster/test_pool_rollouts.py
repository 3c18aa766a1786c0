"""Rollouts of a pool: both roles change together within their bounds, pause, roll back, and lose no capacity."""

import pytest
from harness.kube.fake_kubelet import ready, waiting

pytestmark = pytest.mark.cluster


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
        world.apply(roles=roles, model={"name": "m", "maxModelLen": tokens})
        for _ in range(5):
            found = world.all("deployment")
            for role, wanted in (("prefill", 2), ("decode", 4)):
                of_role = [d for n, d in found.items() if n.startswith(f"chat-{role}-")]
                assert sum(d["spec"]["replicas"] for d in of_role) <= wanted + 1
                assert sum(d.get("status", {}).get("readyReplicas", 0) for d in of_role) >= wanted
    final = world.settled()
    assert [(r["summary"], r["updated"]) for r in final["roles"]] == [("2/2", 2), ("4/4", 4)]


def test_a_change_and_its_reversal_keep_the_serving_pods(world):
    world.apply()
    old = world.settled()["revision"]
    uid = world.get("deployment", f"chat-decode-{old}")["metadata"]["uid"]
    world.kubelet.verdict = lambda pod: ready(pod) if old in pod["metadata"]["name"] else None
    world.apply(model={"name": "m", "maxModelLen": 99})
    world.until(lambda: len(world.deployments()) == 4)
    world.apply()
    assert world.settled()["revision"] == old
    world.until(lambda: len(world.deployments()) == 2)
    assert world.get("deployment", f"chat-decode-{old}")["metadata"]["uid"] == uid
    assert world.get("deployment", f"chat-decode-{old}")["status"]["readyReplicas"] == 2


def test_a_broken_revision_removes_no_serving_pod(world):
    world.apply()
    old = world.settled()["revision"]
    world.kubelet.verdict = lambda pod: (
        ready(pod) if old in pod["metadata"]["name"] else waiting("CrashLoopBackOff", exit_code=1)
    )
    world.apply(model={"name": "m", "maxModelLen": 98}, rollout={"progressDeadlineSeconds": 11})
    world.until(lambda: world.condition("Progressing")[1] == "DeadlineExceeded", 40)
    assert world.get("deployment", f"chat-decode-{old}")["status"]["readyReplicas"] == 2
    assert world.condition("Ready")[0] == "False"


def test_a_rollout_can_be_paused_and_resumed(world):
    world.apply()
    old = world.settled()["revision"]
    changed = {"model": {"name": "m", "maxModelLen": 97}}
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
    changed = {"model": {"name": "m", "maxModelLen": 96}}
    world.apply(**changed)
    second = world.settled()["revision"]
    world.until(lambda: len(world.deployments()) == 2)
    world.apply(**changed, rollout={"rollbackTo": first})
    assert world.settled()["revision"] == first
    args = world.get("deployment", f"chat-decode-{first}")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--max-model-len=0" in args
    world.apply(**changed)
    assert world.settled()["revision"] == second


def test_a_rollback_to_an_unrecorded_revision_is_refused_and_changes_nothing(world):
    world.apply()
    revision = world.settled()["revision"]
    world.apply(rollout={"rollbackTo": "00000000"})
    message = world.until(lambda: (c := world.condition("Progressing"))[1] == "RevisionNotFound" and c[2])
    assert "kubectl get controllerrevisions" in message
    assert world.deployments() == {f"chat-prefill-{revision}": 1, f"chat-decode-{revision}": 2}


def test_the_number_of_records_is_limited(world):
    for tokens in (11, 12, 13, 14):
        world.apply(model={"name": "m", "maxModelLen": tokens}, rollout={"historyLimit": 1})
        revision = world.settled()["revision"]
        world.until(lambda: len(world.deployments()) == 2)
    records = world.until(lambda: len(found := set(world.all("controllerrevision.apps"))) == 2 and found)
    assert f"chat-{revision}" in records


def test_a_role_that_leaves_the_spec_leaves_the_cluster(world):
    world.apply()
    world.settled()
    world.apply(roles=[{"name": "both"}])
    revision = world.settled()["revision"]
    world.until(lambda: world.deployments() == {f"chat-both-{revision}": 1})
    world.until(lambda: set(world.all("service")) == {"chat", "chat-gateway", "chat-both"})
    world.until(lambda: set(world.all("poolrolescaler")) == {"chat-both"})
    assert [role["name"] for role in world.status()["roles"]] == ["both"]


def test_a_change_of_the_gateway_does_not_restart_workers(world):
    world.apply()
    before = world.settled()["revision"]
    uids = {n: d["metadata"]["uid"] for n, d in world.all("pod").items() if "gateway" not in n}
    world.apply(flowControl={"maxStreams": 7})
    assert world.settled()["revision"] == before
    assert {n: d["metadata"]["uid"] for n, d in world.all("pod").items() if "gateway" not in n} == uids


def test_removed_roles_serve_until_the_new_ones_are_ready(world):
    world.apply()
    old = world.settled()["revision"]
    world.kubelet.verdict = lambda pod: ready(pod) if "both" not in pod["metadata"]["name"] else None
    world.apply(roles=[{"name": "both", "replicas": 2}])
    world.until(lambda: any(name.startswith("chat-both") for name in world.deployments()))
    world.until(lambda: "removed from the spec" in world.condition("Progressing")[2])
    assert world.get("deployment", f"chat-decode-{old}")["status"]["readyReplicas"] == 2
    assert {"chat-prefill", "chat-decode"} <= set(world.all("service"))
    world.kubelet.verdict = ready
    world.settled()
    world.until(lambda: set(world.all("service")) == {"chat", "chat-gateway", "chat-both"})


def test_back_to_a_revision_of_other_roles_is_refused(world):
    world.apply()
    old = world.settled()["revision"]
    world.apply(roles=[{"name": "both"}])
    now = world.settled()["revision"]
    world.apply(roles=[{"name": "both"}], rollout={"rollbackTo": old})
    message = world.until(lambda: (c := world.condition("Progressing"))[1] == "RevisionHasOtherRoles" and c[2])
    assert "Change spec.roles together with rollbackTo" in message
    assert world.deployments()[f"chat-both-{now}"] == 1
    world.apply(rollout={"rollbackTo": old})
    assert world.settled()["revision"] == old
