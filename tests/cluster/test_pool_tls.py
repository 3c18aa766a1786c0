"""A pool with managed TLS on a real node: its first answer, and refusal of clients without a certificate."""

import base64
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.pools.load import Load, Outcome, questions
from harness.pools.on_node import MODEL, PoolOnNode, eventually

from kvferry.client import Client
from kvferry.core.sampling import SamplingParams
from kvferry.engine import LLM
from kvferry.operator.plan.tls_plan import RENEW_SECONDS
from kvferry.operator.pool.names import (
    GATEWAY_ADMIN,
    LABEL_POOL,
    LABEL_ROLE,
    PORT_ADMIN,
    PORT_GRPC,
    PORT_HEALTH,
    PORT_METRICS,
)
from kvferry.rpc.channel import open_blocking_channel
from kvferry.rpc.tls.certificate_files import CertificateFiles
from kvferry.rpc.tls.pool_tls import PoolTls

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SECONDS = 20.0
OPERATORS = "kvferry"
METRIC = "kvferry_tls_certificate_not_after_seconds{"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def pool(operated: Any, namespace: str) -> Iterator[PoolOnNode]:
    made = PoolOnNode(operated.cluster, namespace)
    yield made
    made.kubectl("delete", "kvpool", made.name, "--ignore-not-found")


def get(pool: PoolOnNode, *words: str) -> Any:
    return json.loads(pool.kubectl("get", *words, "-o", "json"))


def health(address: str, tls: PoolTls | None) -> Any:
    with open_blocking_channel(address, tls) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status


def test_a_pool_with_managed_tls_answers_and_refuses_other_clients(
    pool: PoolOnNode, say: Callable[[str], None], tmp_path: Path
) -> None:
    pool.apply({"spec": {"connector": {"type": "tcp"}, "tls": {"mode": "Managed"}}})
    status = pool.wait_ready()["status"]
    say(f"ready with TLS: {status['tls']}")
    with Client(pool.grpc, timeout=60) as client:

        def fetched() -> bool:
            (answer,) = client.complete(f"The ferry crosses the {len(outcomes)}th sea", GREEDY)
            outcomes.append(answer.timing.handoff_outcome)
            return bool(answer.token_ids) and outcomes[-1] == "fetched"

        outcomes: list[str] = []
        eventually(fetched, "KV is handed off between pods with TLS", 30.0, lambda: str(outcomes))
    say("answered, with KV handed off")
    files = gateway_files(pool, tmp_path)
    member = PoolTls(files, is_worker=False)
    found = get(pool, "pods", "-l", f"{LABEL_POOL}={pool.name},{LABEL_ROLE}!=gateway")["items"]
    assert len(found) == 2
    for pod in found:
        for port in (PORT_GRPC, PORT_ADMIN):
            address = f"{pod['status']['podIP']}:{port}"
            assert health(address, member) == SERVING
            with pytest.raises(grpc.RpcError) as refused:
                health(address, None)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert health(f"{pod['status']['podIP']}:{PORT_HEALTH}", None) == SERVING, "the port of kubelet's probes"
    say("a member is answered by every port, a plain stranger by none but that of the probes")
    condition = next(c for c in pool.get()["status"]["conditions"] if c["type"] == "CertificatesValid")
    assert (condition["status"], condition["reason"]) == ("True", "Valid")
    assert status["tls"]["mode"] == "Managed"
    gateways = get(pool, "pods", "-l", f"{LABEL_POOL}={pool.name},{LABEL_ROLE}=gateway")["items"]
    mounted = [volume for volume in gateways[0]["spec"]["volumes"] if volume["name"] == "pool-tls"]
    assert "worker.key" not in json.dumps(mounted), "a gateway has no private key of workers"


def gateway_files(pool: PoolOnNode, folder: Path) -> CertificateFiles:
    """Write the gateway's certificate files from the Secret and the ConfigMap of the pool."""
    secret, config = get(pool, "secret", "chat-tls")["data"], get(pool, "configmap", "chat-tls")["data"]
    assert set(secret) == {"worker.crt", "worker.key", "gateway.crt", "gateway.key"}
    assert "PRIVATE" not in json.dumps(config)
    files = CertificateFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    files.chain.write_bytes(base64.b64decode(secret["gateway.crt"]))
    files.key.write_bytes(base64.b64decode(secret["gateway.key"]))
    files.ca.write_text(config["ca.crt"])
    return files


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_certificates_are_renewed_under_load_without_a_restart(pool: PoolOnNode, say: Callable[[str], None]) -> None:
    """A whole renewal with kubelet's own delays: no request is lost, and no pod is replaced or restarted."""
    pool.apply({"spec": {"connector": {"type": "tcp"}, "tls": {"mode": "Managed"}}})
    pool.wait_ready()
    question_list = questions(LLM(MODEL, dtype="float32", kv_memory=128 << 20))
    before, shown = processes(pool), expiries(pool)
    operator = ("-n", OPERATORS, "deployment", "-l", "app.kubernetes.io/name=kvferry-operator")
    with Load(pool.http, MODEL, question_list) as load:
        load.flows(4)
        pool.cluster.kubectl("scale", *operator, "--replicas=0")
        pool.cluster.kubectl("wait", "-n", OPERATORS, "pod", "--all", "--for=delete", "--timeout=60s")
        expire_soon(pool)
        pool.cluster.kubectl("scale", *operator, "--replicas=1")
        for count, what, seconds in ((2, "a new CA is published", 120), (1, "the old CA is retired", 600)):
            eventually(lambda count=count: num_cas(pool) == count, what, seconds)  # type: ignore[misc]
            say(f"{what}: {len(load.ended)} requests so far")
        eventually(lambda: not expiries(pool) & shown, "all processes use the new certificates", 180)
        load.flows(10)
        ended = load.ended
    say(f"renewed under {len(ended)} requests")
    assert [end for end in ended if end.outcome is not Outcome.RIGHT or end.retries] == []
    assert processes(pool) == before
    assert len(expiries(pool)) == 1


def num_cas(pool: PoolOnNode) -> int:
    return str(get(pool, "configmap", "chat-tls")["data"]["ca.crt"]).count("BEGIN CERTIFICATE")


def expire_soon(pool: PoolOnNode) -> None:
    """Change the operator's record so that the certificates expire within the renewal time."""
    config = get(pool, "configmap", "chat-tls")
    state = json.loads(config["data"]["state.json"])
    config["data"]["state.json"] = json.dumps({**state, "notAfter": state["issuedAt"] + RENEW_SECONDS - 60})
    for name in ("managedFields", "resourceVersion", "creationTimestamp"):
        config["metadata"].pop(name, None)
    apply = ("apply", "--server-side", "--field-manager=kvferry-operator", "--force-conflicts", "-f", "-")
    pool.kubectl(*apply, stdin=json.dumps(config))


def processes(pool: PoolOnNode) -> set[tuple[str, str, int]]:
    """Return pod, container id and restarts of every container of the pool's pods."""
    return {
        (pod["metadata"]["name"], one["containerID"], one["restartCount"])
        for pod in get(pool, "pods", "-l", f"{LABEL_POOL}={pool.name}")["items"]
        for one in pod["status"]["containerStatuses"]
    }


def expiries(pool: PoolOnNode) -> set[float]:
    """Return the ends of validity of the certificates in use, from the metrics of all processes."""
    found = set()
    for pod in get(pool, "pods", "-l", f"{LABEL_POOL}={pool.name}")["items"]:
        is_gateway = pod["metadata"]["labels"][LABEL_ROLE] == "gateway"
        port = GATEWAY_ADMIN if is_gateway else PORT_METRICS
        with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{port}/metrics", timeout=SECONDS) as answer:
            (line,) = (line for line in answer.read().decode().splitlines() if line.startswith(METRIC))
        found.add(float(line.split()[-1]))
    return found
