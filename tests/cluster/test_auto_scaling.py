"""Mode Auto on a real API server: the operator reads the page of a real gateway, whose requests wait for a worker."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from cluster.operators import API, Kube, a_cluster, a_pool, an_operator, eventually, fake_pods
from harness.kube.control_plane import PlaneOptions
from harness.servers.processes import a_worker, running

from kvferry.operator.pool.names import GATEWAY_ADMIN

pytestmark = pytest.mark.cluster

FLOWS = 24
SEQUENCES = 2
"""Maximum number of running sequences of the worker, so that most requests wait in the gateway."""
AUTO = {
    "mode": "Auto",
    "minReplicas": 1,
    "maxReplicas": 2,  # as many as there are real workers
    "targetRequests": 1000,  # only the gateway's queue asks for more pods
    "scaleUp": {"stabilizationWindowSeconds": 2},
    "scaleDown": {"stabilizationWindowSeconds": 2},
}


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    # Services get addresses of this machine, so that a test can serve as a pool's gateway.
    with a_cluster(tmp_path_factory.mktemp("kube"), PlaneOptions("127.97.0.0/16")) as made:
        yield made


@contextmanager
def load(http: str) -> Iterator[None]:
    """Keep `FLOWS` requests in the gateway for the `with` block."""
    ends = threading.Event()

    def flow(number: int) -> None:
        while not ends.is_set():
            body = {"prompt": f"request {number}", "max_tokens": 400, "ignore_eos": True}
            try:
                httpx.post(f"http://{http}/v1/completions", json=body, timeout=60)
            except httpx.HTTPError:
                assert ends.is_set(), "a request failed"

    threads = [threading.Thread(target=flow, args=(number,)) for number in range(FLOWS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(90)


def decisions(kube: Kube, namespace: str) -> list[dict[str, Any]]:
    return list((kube.pool(namespace).get("status") or {}).get("scaling") or ())


def test_requests_that_wait_in_a_real_gateway_add_a_pod_and_an_idle_gateway_removes_it(kube: Kube) -> None:
    with ExitStack() as stack:
        namespace = stack.enter_context(kube.namespace())
        stack.enter_context(an_operator(kube.kubeconfig, namespace))
        stack.enter_context(fake_pods(kube, namespace))
        kube.apply(a_pool(namespace, roles=[{"name": "both", "scaling": AUTO}], gateway={"replicas": 1}))
        service = eventually(lambda: kube.api.get("v1", "Service", namespace, "chat-gateway"))
        address = f"{service['spec']['clusterIP']}:{GATEWAY_ADMIN}"
        workers = [stack.enter_context(a_worker("both", "--max-num-seqs", str(SEQUENCES))) for _ in range(2)]
        places = []
        for worker in workers:
            listening = worker.events["listening"]
            places += ["--both", f"{listening['grpc']}/{str(listening['admin']).rpartition(':')[2]}"]
        ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", address)
        gateway = stack.enter_context(running("gateway", "--model", "tiny", *places, *ports))
        http = str(gateway.wait_for("listening")["http"])
        eventually(lambda: kube.condition(namespace, "Ready").get("status") == "True", "the pool is ready")
        assert decisions(kube, namespace) == []
        with load(http):
            (first, *_) = eventually(lambda: decisions(kube, namespace), "a decision")
            assert (first["role"], first["from"], first["to"]) == ("both", 1, 2), first
            assert "requests wait in the gateways for this role" in first["reason"]
            kube.rolled_out(namespace)
        (last, *_) = eventually(
            lambda: (found := decisions(kube, namespace))[0]["to"] < found[0]["from"] and found, "it shrinks", 60
        )
        assert last["to"] == 1
        scaler = kube.api.get(API, "PoolRoleScaler", namespace, "chat-both")
        assert scaler is not None
        assert scaler["spec"]["replicas"] == 1
        managers = {e["manager"] for e in scaler["metadata"]["managedFields"] if "f:replicas" in str(e["fieldsV1"])}
        assert "kvferry-autoscaler" in managers
