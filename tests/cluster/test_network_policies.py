"""The NetworkPolicies of a pool on a node that enforces them: who connects to which port."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.kube import host_image, policies
from harness.pools.on_node import PoolOnNode
from openai import OpenAI

from kvferry.operator.pool import names

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.long, pytest.mark.policies, pytest.mark.timeout(900)]

CONNECT_SECONDS = 2
LAG_SECONDS = 30
"""Time limit for the enforcement of a new pod's labels, which lags behind its start."""
CONNECT = f"""
import json, socket, sys, time
expected, end_of_test = json.loads(sys.argv[1]), time.monotonic() + {LAG_SECONDS}
found = {{}}
while found != expected and time.monotonic() < end_of_test:
    for end in expected:
        host, _, port = end.rpartition(":")
        try:
            socket.create_connection((host, int(port)), {CONNECT_SECONDS}).close()
            found[end] = "open"
        except TimeoutError:
            found[end] = "closed"
        except OSError as error:
            found[end] = "closed" if error.errno in (111, 113) else str(error)
    time.sleep(0.5)
print(json.dumps(found))
"""
STRANGER: dict[str, str] = {}
MONITORING = {"app.kubernetes.io/name": "prometheus"}
ADMINISTRATOR = {names.LABEL_ADMIN_ACCESS: "true"}


@pytest.fixture(scope="module")
def pool(operated: Any, tmp_path_factory: pytest.TempPathFactory, say: Callable[[str], None]) -> Iterator[PoolOnNode]:
    """A pool whose policies are enforced."""
    if reason := policies.why_not():
        pytest.skip(reason)
    operated.kubectl("create", "namespace", "policies")
    made = PoolOnNode(operated.cluster, "policies")
    with policies.enforced(operated.cluster, tmp_path_factory.mktemp("kube-router")):
        made.apply({"spec": {"connector": {"type": "tcp"}}})
        made.wait_ready()
        say("the pool is ready with enforced policies")
        yield made
        made.kubectl("delete", "kvpool", made.name, "--ignore-not-found")
    operated.kubectl("delete", "namespace", "policies", "--wait=false")


def test_policies_admit_clients_monitoring_and_the_pool_and_nobody_else(
    operated: Any, pool: PoolOnNode, namespace: str, say: Callable[[str], None]
) -> None:
    gateway, decode = address_of(pool, "gateway"), address_of(pool, "decode")
    http, admin = f"{gateway}:{names.GATEWAY_HTTP}", f"{gateway}:{names.GATEWAY_ADMIN}"
    worker, metrics = (f"{decode}:{port}" for port in worker_ports(pool))
    closed = {http: "open", admin: "closed", worker: "closed", metrics: "open"}

    reach(operated, namespace, STRANGER, closed)
    say("a stranger reaches the clients' port and the worker's metrics only")
    for labels in (MONITORING, ADMINISTRATOR):
        reach(operated, namespace, labels, closed | {admin: "open"})
    say("monitoring and administrators reach the admin port too")
    # Labels of the pool count in its own namespace only.
    reach(operated, namespace, {names.LABEL_POOL: pool.name}, closed)
    reach(operated, pool.namespace, {names.LABEL_POOL: pool.name}, {worker: "open", admin: "closed"})
    with OpenAI(base_url=pool.http, api_key="none", timeout=60) as openai:
        answer = openai.completions.create(model="smollm2-135m-instruct", prompt="The ferry " * 40, max_tokens=8)
    assert (answer.model_extra or {})["kvferry"]["handoff_outcome"] == "fetched"
    say("a client's request passes the gateway, the prefill worker and the decode worker")
    pool.patch({"op": "add", "path": "/spec/networkPolicy", "value": "Off"})
    reach(operated, namespace, STRANGER, dict.fromkeys(closed, "open"))
    say("without the policies, a stranger reaches all ports")


def address_of(pool: PoolOnNode, role: str) -> str:
    (name, *_) = pool.pods(role)
    return pool.kubectl("get", "pod", name, "-o", "jsonpath={.status.podIP}")


def worker_ports(pool: PoolOnNode) -> tuple[int, int]:
    """Return the ports of a worker's gRPC server and metrics."""
    (name, *_) = pool.pods("decode")
    found = json.loads(pool.kubectl("get", "pod", name, "-o", "json"))["spec"]["containers"][0]["ports"]
    ports = {port["name"]: port["containerPort"] for port in found}
    return ports["grpc"], ports["metrics"]


def reach(operated: Any, namespace: str, labels: dict[str, str], expected: dict[str, str]) -> None:
    """Check to which of the addresses a new pod with these labels can connect."""
    name = f"reach-{secrets.token_hex(4)}"
    secure = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": host_image.NAME,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", CONNECT, json.dumps(expected)],
        "securityContext": secure,
    }
    spec = {
        "runtimeClassName": "host",
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    operated.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(made))
    ended = "--for=jsonpath={.status.phase}=Succeeded"
    operated.kubectl("wait", "-n", namespace, f"pod/{name}", ended, f"--timeout={2 * LAG_SECONDS + 30}s")
    found = json.loads(operated.kubectl("logs", "-n", namespace, name))
    operated.kubectl("delete", "-n", namespace, f"pod/{name}", "--now", "--ignore-not-found")
    assert found == expected, labels
