"""A gateway that discovers workers through a real API server: slices change, watches break, pools scale to zero."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import urllib3
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_worker import ScriptedWorkers
from harness.servers.processes import a_worker, running

from kvferry.core.clock import SystemClock
from kvferry.gateway.decide.config import FleetConfig, GatewayConfig, HoldConfig, HttpConfig, PoolName
from kvferry.gateway.decide.routing.discovery import Update
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.fleet.endpoint_slices import EndpointSlices
from kvferry.gateway.fleet.pool_api import ApiError, PoolApi, Watch
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.gateway import Gateway

pytestmark = pytest.mark.cluster

SECONDS = 30.0
POOL = "chat"
CLOCK = SystemClock()
SCALERS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "poolrolescalers.kvferry.dev"},
    "spec": {
        "group": "kvferry.dev",
        "scope": "Namespaced",
        "names": {"plural": "poolrolescalers", "singular": "poolrolescaler", "kind": "PoolRoleScaler"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"},
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {"type": "object", "properties": {"replicas": {"type": "integer"}}},
                            "status": {"type": "object", "properties": {"replicas": {"type": "integer"}}},
                        },
                    }
                },
            }
        ],
    },
}


def own_address() -> str:
    """Return an address of this machine, because an API server refuses loopback addresses in slices. Sends no
    packet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))
        return str(sock.getsockname()[0])


@dataclass
class Slices:
    """EndpointSlices of one pool, created by the test."""

    kube: Any
    namespace: str

    def put(self, name: str, role: str, address: str, admin: str = "", **conditions: bool) -> None:
        host, _, port = address.rpartition(":")
        ports = [{"name": "grpc", "port": int(port), "protocol": "TCP"}]
        if admin:
            ports.append({"name": "admin", "port": int(admin.rpartition(":")[2]), "protocol": "TCP"})
        pod = {"kind": "Pod", "name": name, "namespace": self.namespace}
        made = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{POOL}-{name}",
                "namespace": self.namespace,
                "labels": {"kvferry.dev/pool": POOL, "kvferry.dev/role": role},
            },
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [host], "targetRef": pod, "conditions": conditions}],
        }
        self.kube.kubectl("apply", "-f", "-", input=json.dumps(made))

    def remove(self, name: str) -> None:
        self.kube.kubectl("delete", "endpointslice", f"{POOL}-{name}", "-n", self.namespace)


@pytest.fixture
def slices(kube: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Slices:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    return Slices(kube, namespace)


@pytest.fixture
async def workers() -> AsyncIterator[ScriptedWorkers]:
    made = ScriptedWorkers(prefill=1, decode=2)
    for worker in made.all:
        worker.address = f"{own_address()}:0"
    async with made:
        yield made
        await made.idle()


@asynccontextmanager
async def a_gateway(namespace: str, **settings: Any) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    config = GatewayConfig(
        fleet=FleetConfig(PoolName(namespace, POOL), status_interval_seconds=0.02, max_backoff_seconds=0.1),
        http=HttpConfig(address="127.0.0.1:0"),
        grpc_address="127.0.0.1:0",
        drain_seconds=10.0,
        **settings,
    )
    gateway = await Gateway.start(config, byte_model(), CLOCK)
    try:
        async with httpx.AsyncClient(base_url=f"http://{gateway.listening.http}", timeout=SECONDS) as client:
            yield gateway, client
    finally:
        await gateway.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        for _ in iter(holds, True):
            await asyncio.sleep(0.01)


def ready(gateway: Gateway) -> list[str]:
    return sorted(view.name for view in gateway.fleet.views() if view.takes_work)


ASKED = {"model": "bytes", "prompt": "hello", "max_tokens": 4}


async def test_requests_are_held_until_workers_join_and_are_routed_by_the_slices(slices, workers):
    p0, d0, d1 = workers.all
    async with a_gateway(slices.namespace) as (gateway, client):
        await until(lambda: gateway.parts.membership.state.detail == "")
        held = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await until(lambda: gateway.parts.status.holding.num_held == 1)
        assert (await client.get("/ready")).status_code == 200, (
            "a gateway of a sleeping pool is ready, because requests wake the pool"
        )
        assert (await client.get(f"http://{gateway.listening.admin}/fleet")).json()["held"] == 1
        await asyncio.to_thread(slices.put, "p-0", "prefill", p0.address)
        await asyncio.to_thread(slices.put, "d-0", "decode", d0.address)
        assert (await held).status_code == 200
        await until(lambda: ready(gateway) == ["d-0", "p-0"])

        await asyncio.to_thread(slices.put, "d-1", "decode", d1.address)
        await until(lambda: ready(gateway) == ["d-0", "d-1", "p-0"])
        await asyncio.to_thread(slices.put, "d-0", "decode", d0.address, terminating=True)
        await until(lambda: ready(gateway) == ["d-1", "p-0"])
        by_name = {
            worker["name"]: worker
            for worker in (await client.get(f"http://{gateway.listening.admin}/fleet")).json()["workers"]
        }
        assert by_name["d-0"]["why_not"] == "terminating"
        await asyncio.to_thread(slices.remove, "d-0")
        await until(lambda: sorted(view.name for view in gateway.fleet.views()) == ["d-1", "p-0"])
        before = len(d1.decodes)
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        assert len(d1.decodes) == before + 1


async def test_a_request_without_a_worker_gets_a_retry_time(slices):
    async with a_gateway(slices.namespace, hold=HoldConfig(max_held=1, seconds=1.0)) as (gateway, client):
        first = asyncio.create_task(client.post("/v1/completions", json=ASKED))
        await until(lambda: gateway.parts.status.holding.num_held == 1)
        second = await client.post("/v1/completions", json=ASKED)
        assert (second.status_code, second.headers["retry-after"]) == (429, "5")
        answer = await first
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "had no workers" in answer.text


NOWHERE = urllib3.ProxyManager("http://127.0.0.1:9")


class Forgotten:
    """A watch that a server without the requested version ends at once."""

    def __enter__(self) -> "Forgotten":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}

    def stop(self) -> None:
        pass


class Troubled(PoolApi):
    """An API client that fails on request, once or for a while."""

    answers: tuple[Any, ...] = ()
    """Results of the next watches; exceptions are raised."""
    lists = 0
    last: Watch | None = None

    def break_off(self) -> None:
        self.good, self._http = self._http, NOWHERE
        assert self.last is not None
        self.last.stop()

    def mend(self) -> None:
        self._http = self.good

    def list_slices(self) -> Any:
        self.lists += 1
        return super().list_slices()

    def watch_slices(self, version: str, seconds: float) -> Watch:
        if self.answers:
            answer, *rest = self.answers
            self.answers = tuple(rest)
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.last = super().watch_slices(version, seconds)
        return self.last


class Heard:
    """Records the reports of a source."""

    def __init__(self) -> None:
        self.news: list[Update] = []

    async def follow(self, source: EndpointSlices) -> None:
        async for news in source.updates():
            self.news.append(news)

    @property
    def names(self) -> list[str]:
        known = [news.listings for news in self.news if news.listings is not None]
        return [listing.name for listing in known[-1]] if known else []


@asynccontextmanager
async def following(api: PoolApi, **settings: Any) -> AsyncIterator[Heard]:
    follower = Heard()
    task = asyncio.create_task(follower.follow(EndpointSlices(api, CLOCK, **settings)))
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        api.close()


async def test_an_expired_version_is_answered_with_a_list(slices):
    api = Troubled.connect(PoolName(slices.namespace, POOL))
    assert isinstance(api, Troubled)
    api.answers = (Forgotten(), ApiError("too old resource version", 410))
    async with following(api) as follower:
        await until(lambda: api.lists == 3 and api.last is not None)
        await asyncio.to_thread(slices.put, "d-0", "decode", "10.9.9.9:9100")
        await until(lambda: follower.names == ["d-0"])
    assert not [news.failure for news in follower.news if news.failure], "expired versions are no failure"


async def test_everything_is_listed_again_at_intervals(slices):
    api = Troubled.connect(PoolName(slices.namespace, POOL))
    async with following(api, relist_seconds=1.0):
        await until(lambda: api.lists >= 3)


async def test_an_unavailable_server_removes_no_worker_and_is_found_again(slices):
    api = Troubled.connect(PoolName(slices.namespace, POOL))
    async with following(api) as follower:
        await asyncio.to_thread(slices.put, "d-0", "decode", "10.9.9.9:9100")
        await until(lambda: follower.names == ["d-0"] and api.last is not None)
        api.break_off()
        await until(lambda: follower.news[-1].failure.startswith("the API server cannot be reached"))
        assert follower.names == ["d-0"]
        await asyncio.to_thread(slices.put, "d-1", "decode", "10.9.9.8:9100")
        api.mend()
        await until(lambda: follower.names == ["d-0", "d-1"] and not follower.news[-1].failure)


async def test_no_thread_is_left_when_the_reader_stops(slices):
    api = PoolApi.connect(PoolName(slices.namespace, POOL))
    async with following(api) as follower:
        await until(lambda: bool(follower.news))
        assert [t for t in threading.enumerate() if t.name == "endpoint-slices"]
    assert not [t for t in threading.enumerate() if t.name == "endpoint-slices"]


def scaler(role: str, replicas: int, wake: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvferry.dev/v1alpha1",
        "kind": "PoolRoleScaler",
        "metadata": {"name": f"{POOL}-{role}", "annotations": {"kvferry.dev/wake": wake}},
        "spec": {"replicas": replicas},
    }


@pytest.fixture
def scalers(slices: Slices) -> Callable[[str], int]:
    """prefill and decode asleep, and role both asleep and not to be woken. Returns a function that gives the replicas
    of a role.
    """
    kube, namespace = slices.kube, slices.namespace
    kube.kubectl("apply", "-f", "-", input=json.dumps(SCALERS))
    kube.kubectl("wait", "--for=condition=Established", "crd/poolrolescalers.kvferry.dev", "--timeout=30s")
    for role, wake in (("prefill", "true"), ("decode", "true"), ("both", "false")):
        kube.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(scaler(role, 0, wake)))

    def replicas(role: str) -> int:
        path = "jsonpath={.spec.replicas}"
        return int(kube.kubectl("get", "poolrolescalers", f"{POOL}-{role}", "-n", namespace, "-o", path))

    return replicas


async def test_a_held_request_wakes_the_roles_that_may_be_woken(slices, scalers):
    async with a_gateway(slices.namespace, hold=HoldConfig(seconds=3.0)) as (gateway, client):
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 503
        assert gateway.parts.waker is not None
        assert gateway.parts.waker.num_wakes == 2
        assert (await client.get(f"http://{gateway.listening.admin}/fleet")).json()["waking"] == {"detail": ""}
    counts = [await asyncio.to_thread(scalers, role) for role in ("prefill", "decode", "both")]
    assert counts == [1, 1, 0]


async def test_replicas_set_by_another_manager_in_the_meantime_are_kept(slices, scalers):
    api = PoolApi.connect(PoolName(slices.namespace, POOL))
    found = api.scaler("decode")
    assert found is not None
    slices.kube.kubectl("scale", "poolrolescalers", f"{POOL}-decode", "-n", slices.namespace, "--replicas=3")
    with pytest.raises(ApiError) as conflict:
        api.wake("decode", found["metadata"]["resourceVersion"])
    assert conflict.value.status == 409
    assert scalers("decode") == 3
    assert api.scaler("router") is None
    api.close()


async def test_errors_of_waking_are_reported(slices):
    api = PoolApi.connect(PoolName(slices.namespace, POOL))
    holding = Holding(HoldConfig(), "x")
    waker = Waker(api, holding, CLOCK)
    with holding.held():
        await waker.check()
        assert waker.failure == ""
        api._http = NOWHERE
        await waker.check()
    assert "cannot be reached" in waker.failure
    api.close()


async def test_the_whole_gateway_serves_a_pool_of_real_workers(slices):
    ip = own_address()
    flags = ("--listen", "0.0.0.0:0", "--admin", "0.0.0.0:0", "--advertise-host", ip, "--worker-id", "c-0")
    pool = ("--pool", f"{slices.namespace}/{POOL}", "--model", "tiny", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    with a_worker("both", *flags) as worker, running("gateway", *pool, "--linger-seconds", "1") as gateway:
        follower = gateway.wait_for("listening")
        listening = worker.events["listening"]
        async with httpx.AsyncClient(base_url=f"http://{follower['http']}", timeout=SECONDS) as client:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            held = asyncio.create_task(client.post("/v1/completions", json=body))
            slices.put("c-0", "both", str(listening["grpc"]), str(listening["admin"]))
            assert (await held).status_code == 200
            (entry,) = (await client.get(f"http://{follower['admin']}/fleet")).json()["workers"]
            assert (entry["name"], entry["worker_id"], entry["role"], entry["takes_work"]) == (
                "c-0",
                "c-0",
                "both",
                True,
            )
            assert entry["model_digest"]
        assert gateway.stop() == 0
