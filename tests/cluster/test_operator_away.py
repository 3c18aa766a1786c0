"""Pools while no operator runs, and one operator for each namespace."""

import copy
from contextlib import ExitStack

import pytest
from cluster.world import World, operator, spec
from harness.kube.fake_kubelet import kubelet
from harness.servers.processes import running

pytestmark = pytest.mark.cluster


def test_while_no_operator_runs_pools_can_be_deleted_and_a_new_one_restarts_nothing(kube, api, namespace):
    """The test stops and starts an operator of its own."""
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


def test_a_second_operator_over_the_same_namespace_refuses_to_start(kube, api, namespace, capfd):
    with kubelet(api, namespace) as acting, ExitStack() as stack:
        operator(stack, kube, "--namespace", namespace, "--lease-namespace", namespace, "--identity", "first")
        world = World(kube, api, namespace, acting)
        world.apply()
        world.settled()
        words = ("--kubeconfig", str(kube.kubeconfig), "--health", "127.0.0.1:0", "--lease-namespace", "default")
        second = stack.enter_context(running("operator", "run", *words, "--namespace", namespace))
        second.wait_for("listening")
        world.apply(drain={"lingerSeconds": 7})  # The first operator writes the status, which shows that it works.
        assert second.process.wait(60) == 1
    log = capfd.readouterr().err
    assert f"pool {namespace}/chat is reconciled by the operator with the lease {namespace}/kvferry-operator" in log
    assert "Uninstall one of them, or assign each its own namespaces" in log
    assert "Traceback" not in log


def test_the_log_of_a_start_has_lines_of_the_operator_only(kube, api, namespace, capfd):
    with kubelet(api, namespace) as acting, ExitStack() as stack:
        own = ("--namespace", namespace, "--lease-namespace", namespace, "--log-level", "info")
        process = operator(stack, kube, *own)
        world = World(kube, api, namespace, acting)
        world.apply()
        world.settled()
        assert process.stop() == 0
    lines = [line.split()[2] for line in capfd.readouterr().err.splitlines() if " INFO " in line or "WARN" in line]
    assert lines
    assert {line.rstrip(":") for line in lines if not line.startswith("kvferry.operator.")} == set()
