"""Leader election: one operator writes at a time, another one takes over, and a silent watch is reported."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster.operators import (
    API,
    CLOCK,
    Kube,
    a_cluster,
    a_pool,
    account_kubeconfig,
    an_operator,
    eventually,
    fake_pods,
)
from cluster.watch_relay import a_watch_relay
from harness.kube.children import wait_gone
from harness.kube.control_plane import PlaneOptions

from kvferry.core.errors import KvferryError
from kvferry.operator.process.watches import WATCHED

pytestmark = pytest.mark.cluster

LEASE_SECONDS = 4
WORKERS = 4
QUICK = ("--lease-seconds", str(LEASE_SECONDS), "--workers", str(WORKERS))


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with a_cluster(tmp_path_factory.mktemp("kube"), PlaneOptions(audit=True)) as made:
        yield made


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with kube.namespace() as name:
        yield name


def is_seen(kube: Kube, namespace: str, name: str = "chat") -> bool:
    return kube.condition(namespace, "RolesReady", name) != {}


def test_a_killed_leader_is_replaced_once_its_lease_is_over(kube: Kube, namespace: str) -> None:
    with (
        an_operator(kube.kubeconfig, namespace, *QUICK, "--identity", "one") as first,
        an_operator(kube.kubeconfig, namespace, *QUICK, "--identity", "two", leads=False) as second,
    ):
        assert first.process.stop(signal.SIGKILL) == -signal.SIGKILL
        begun = CLOCK.monotonic()
        kube.apply(a_pool(namespace))
        eventually(lambda: is_seen(kube, namespace), seconds=LEASE_SECONDS + 6)
        took = CLOCK.monotonic() - begun
        print(f"reconciled {took:.1f} s after the leader was killed, with a lease of {LEASE_SECONDS} s")
        assert second.process.wait_for("leading", 1)["identity"] == "two"
        assert second.numbers()["kvferry_operator_is_leader"] == 1


def test_a_leader_that_is_stopped_hands_over_at_once(kube: Kube, namespace: str) -> None:
    kube.apply(*(a_pool(namespace, f"chat-{i}") for i in range(5)))
    slow = ("--lease-seconds", "60")  # a wait for the lease to expire would take this long
    with (
        an_operator(kube.kubeconfig, namespace, "--identity", "one", *slow) as first,
        an_operator(kube.kubeconfig, namespace, "--identity", "two", *slow, leads=False) as second,
    ):
        eventually(lambda: is_seen(kube, namespace, "chat-0"))
        first.get("/healthz")
        begun = CLOCK.monotonic()
        first.process.process.send_signal(signal.SIGTERM)
        second.process.wait_for("leading", 40)
        took = CLOCK.monotonic() - begun
        assert first.process.process.wait(30) == 0  # after a single signal
        print(f"handed over in {took:.1f} s, ended after {CLOCK.monotonic() - begun:.1f} s")
        assert took < 40


def writes(kube: Kube, account: str) -> list[dict[str, Any]]:
    lines = (kube.cluster.folder / "audit.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if f":{account}" in line]
    return [
        event
        for event in found
        if event["user"]["username"].endswith(f":{account}")
        and event["verb"] in ("create", "update", "patch", "delete")
        and event["responseStatus"]["code"] < 300
    ]


def test_a_leader_stopped_for_longer_than_its_lease_begins_no_pass(kube: Kube, namespace: str, tmp_path: Path) -> None:
    files = []
    for account in ("one", "two"):
        kube.kubectl("create", "serviceaccount", account, "-n", namespace)
        name = f"{namespace}-{account}"
        whom = f"--serviceaccount={namespace}:{account}"
        kube.kubectl("create", "clusterrolebinding", name, "--clusterrole=cluster-admin", whom)
        files.append(account_kubeconfig(kube, namespace, account, tmp_path / account))
    with (
        an_operator(files[0], namespace, *QUICK, "--identity", "one") as first,
        an_operator(files[1], namespace, *QUICK, "--identity", "two", leads=False) as second,
    ):
        kube.apply(*(a_pool(namespace, f"chat-{i}") for i in range(20)))
        eventually(lambda: is_seen(kube, namespace, "chat-0"))  # passes of other pools are running
        os.kill(first.pid, signal.SIGSTOP)
        try:
            second.process.wait_for("leading", LEASE_SECONDS + 6)
            for i in range(20):
                eventually(lambda i=i: is_seen(kube, namespace, f"chat-{i}"))
        finally:
            os.kill(first.pid, signal.SIGCONT)
        assert first.process.process.wait(10) == 1
        assert second.process.process.poll() is None
        assert second.get("/healthz")[0] == 200
    taken = min(e["requestReceivedTimestamp"] for e in writes(kube, "two") if e["objectRef"]["resource"] == "leases")
    before = [event for event in writes(kube, "one") if event["requestReceivedTimestamp"] < taken]
    assert len(before) > 20
    assert len(writes(kube, "two")) > 20
    # When the process continues, it sends the writes that had passed the check of the lease before the stop, at most
    # one per worker.
    late = [event["objectRef"] for event in writes(kube, "one") if event["requestReceivedTimestamp"] >= taken]
    assert len(late) <= WORKERS, late


def test_an_operator_continues_after_an_outage_of_the_api_server(kube: Kube, namespace: str) -> None:
    """An operator that ends is started again, as by kubelet."""
    with ExitStack() as stack:
        stack.enter_context(fake_pods(kube, namespace))
        operator = stack.enter_context(an_operator(kube.kubeconfig, namespace))
        kube.apply(a_pool(namespace))
        kube.rolled_out(namespace)
        children = kube.cluster.children
        server = children.state.processes["kube-apiserver"]
        words = Path(f"/proc/{server.pid}/cmdline").read_text().rstrip("\0").split("\0")
        os.kill(server.pid, signal.SIGKILL)
        children._ours["kube-apiserver"].wait(10)
        wait_gone(server, "kube-apiserver", CLOCK)
        threading.Event().wait(20)
        children.spawn("kube-apiserver", words)
        eventually(lambda: answers(kube))
        if operator.process.process.poll() is not None:
            assert operator.process.process.returncode == 1
            operator = stack.enter_context(an_operator(kube.kubeconfig, namespace))
        begun = CLOCK.monotonic()
        kube.change(namespace, roles=[{"name": "prefill"}, {"name": "decode", "replicas": 2}])
        eventually(lambda: scaler_number(kube, namespace) == 2)
        print(f"reconciled {CLOCK.monotonic() - begun:.1f} s after the API server was back")
        kube.rolled_out(namespace, seconds=90)  # Kubernetes' own controllers reconnect later
        assert kube.pool(namespace)["status"]["roles"][1]["summary"] == "2/2"
        assert operator.get("/healthz")[0] == 200


def test_the_doctor_names_a_pool_outside_of_the_namespaces_of_the_operators(kube: Kube, namespace: str) -> None:
    with kube.namespace() as other, an_operator(kube.kubeconfig, namespace, "--identity", "one"):
        kube.apply(a_pool(namespace), a_pool(other))
        eventually(lambda: is_seen(kube, namespace))
        command = ["doctor", "--cluster", "--json", "--kubeconfig", str(kube.kubeconfig)]
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.cli.main", *command], capture_output=True, text=True, timeout=60
        )
        found = {one["about"]: one["detail"] for one in json.loads(done.stdout)["cluster"]}
    assert f"one leads and reconciles pools in namespaces {namespace} (lease in" in found["operator"]
    assert found[f"pool {other}/chat"].startswith(f"no operator reconciles pools in namespace {other}, only in")
    assert "no operator reconciles" not in found[f"pool {namespace}/chat"]


def scaler_number(kube: Kube, namespace: str) -> int:
    found = kube.api.get(API, "PoolRoleScaler", namespace, "chat-decode")
    return found["spec"]["replicas"] if found else 0


def answers(kube: Kube) -> bool:
    try:
        return kube.kubectl("get", "--raw", "/readyz") == "ok"
    except KvferryError:
        return False


@pytest.mark.parametrize("kind", list(WATCHED))
def test_a_silent_watch_makes_the_operator_unhealthy(kind: str, kube: Kube, namespace: str, tmp_path: Path) -> None:
    probe_seconds = 2.0
    with ExitStack() as stack:
        relay = stack.enter_context(a_watch_relay(kube.kubeconfig))
        file = relay.write_kubeconfig(tmp_path / "kubeconfig")
        stack.enter_context(fake_pods(kube, namespace))
        operator = stack.enter_context(an_operator(file, namespace, "--watch-probe-seconds", str(probe_seconds)))
        kube.apply(a_pool(namespace))
        kube.rolled_out(namespace)
        assert operator.get("/healthz") == (200, "ok\n")
        relay.stalled = WATCHED[kind][2]
        begun = CLOCK.monotonic()
        status, why = eventually(lambda: ill(operator.get("/healthz")), seconds=2 * probe_seconds + 3)
        print(f"unhealthy {CLOCK.monotonic() - begun:.1f} s after the watch had stalled: {why}")
        assert status == 503
        assert why.startswith(f"the watch of {kind} is ")
        assert ";" not in why, "the other watches are healthy"


def ill(answer: tuple[int, str]) -> tuple[int, str] | None:
    return answer if answer[0] != 200 else None
