"""Status texts of a pool: conditions of the current generation, few events, and the commands of the manual."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.world import COLLECTED, World
from harness.house.documents import fences
from harness.kube.fake_kubelet import ready, waiting

from kvferry.bench.commit import ROOT
from kvferry.core.process.config import child_environment

pytestmark = pytest.mark.cluster


def test_every_condition_has_the_current_generation(world):
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
    moved = {"Progressing", "RolesReady", "Ready"}  # these conditions change to False and back
    assert {k: v for k, v in after.items() if k not in moved} == {k: v for k, v in before.items() if k not in moved}


def test_a_settled_pool_is_not_written(world):
    world.apply()
    world.settled()
    world.until(lambda: world.get("kvscale", "chat-decode").get("status", {}).get("replicas") == 2)

    def contents() -> dict[str, dict[str, Any]]:
        """Return the objects without the fields that the heartbeat changes."""
        kinds = ("service", "pdb", "networkpolicy", "role", "rolebinding", "serviceaccount", "secret")
        found = {f"{kind}/{name}": made for kind in kinds for name, made in world.all(kind).items()}
        for made in found.values():
            made["metadata"].pop("resourceVersion")
            made["metadata"].get("labels", {}).pop("kvferry.dev/seen-at", None)
        return found

    before, events = contents(), len(world.all("events"))
    world.kubectl("annotate", "kvpool", "chat", "note=nothing")
    world.kubelet._stop.wait(3)
    assert contents() == before
    assert len(world.all("events")) == events


def test_events_are_few(world):
    world.apply()
    world.settled()
    events = [e for e in world.all("events").values() if e["involvedObject"]["kind"] == "InferencePool"]
    assert len(events) <= 8
    assert {e["source"]["component"] for e in events} == {"kvferry-operator"}


def events(world: World, reason: str) -> list[dict[str, Any]]:
    return [event for event in world.all("events").values() if event["reason"] == reason]


def test_a_restored_child_has_an_event(world):
    world.apply()
    world.settled()
    world.kubectl("delete", "service", "chat-decode")
    (event,) = world.until(lambda: events(world, "Restored"))
    assert event["message"] == "created again, since it was deleted: Service chat-decode"
    assert event["type"] == "Normal"


def test_a_write_of_0_to_a_static_role_is_undone_with_an_event(world):
    """After a write of 0 to the subresource /scale, no field manager owns the number."""
    world.apply()
    world.settled()
    world.kubectl("scale", "kvscale/chat-decode", "--replicas=0")
    (event,) = world.until(lambda: events(world, "ReplicasReset"))
    assert "PoolRoleScaler chat-decode: spec.replicas was set to 0" in event["message"]
    assert world.get("kvscale", "chat-decode")["spec"]["replicas"] == 2


def test_every_child_that_is_not_applied_is_named(world):
    for name in ("chat", "chat-decode"):
        world.kubectl("create", "service", "clusterip", name, "--tcp=80:80")
    world.apply()
    message = world.until(lambda: (c := world.condition("ChildrenApplied"))[1] == "Refused" and c[2])
    assert "Service chat exists and does not belong to this pool" in message
    assert "Also affected: Service chat-decode" in message
    (event,) = world.until(lambda: events(world, "Refused"))
    assert event["message"] == f"ChildrenApplied is False: {message}"


def test_an_updated_gateway_pod_that_cannot_start_is_not_counted(world):
    world.apply(gateway={"replicas": 2})
    world.settled()
    world.kubelet.verdict = lambda pod: (
        waiting("ImagePullBackOff", "no such image")
        if pod["spec"]["containers"][0]["image"] == "no/such:image"
        else ready(pod)
    )
    missing = {"spec": {"containers": [{"name": "gateway", "image": "no/such:image"}]}}
    world.apply(gateway={"replicas": 2, "template": {"spec": {"schedulerName": "nobody", **missing["spec"]}}})
    message = world.until(lambda: (m := world.condition("Progressing")[2]).startswith("gateway: 0 of 2") and m)
    assert "gateway: 0 of 2 pods updated and ready, 2 old pods left" in message
    assert world.status()["gateway"] == {"desired": 2, "ready": 2}


def test_deleting_a_pool_keeps_another_pool_of_the_namespace(world):
    world.apply("one")
    world.apply("two", roles=[{"name": "both"}])
    world.settled("one")
    world.settled("two")
    world.kubectl("delete", "kvpool", "two")
    world.until(lambda: not [n for n in world.all("deployment") if n.startswith("two")], COLLECTED)
    assert len([n for n in world.all("deployment") if n.startswith("one")]) == 3


def test_the_commands_of_the_manual_work(world, tmp_path):
    """Commands of docs/kubernetes.md, in a namespace with a pool of the name and the model of that page."""
    world.apply(model={"name": "smollm2-135m-instruct"})
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
