"""Flow control, quotas and tenants, tested by clients over HTTP and gRPC."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.waiting import eventually

from kvferry.client import AsyncClient
from kvferry.core.errors import DeadlinePassed, Forbidden, KvferryError, Overloaded, UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.decide.config import RetryConfig
from kvferry.gateway.observe.instruments import MAX_TENANT_LABELS, FlowMetrics, GatewayInstruments

_CHAT = "/v1/chat/completions"
_SHORT = SamplingParams(max_tokens=3)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **more}


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@dataclass
class Edge:
    """A gateway whose workers have room for one sequence, and which can be stopped between tokens."""

    scripted: ScriptedGateway
    http: httpx.AsyncClient
    grpc: AsyncClient
    go: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def controller(self) -> Any:
        return self.scripted.gateway.gate.controller

    async def post(self, path: str = _CHAT, key: str = "", **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=fields or body(), headers=headers)

    async def occupied(self, key: str = "") -> "asyncio.Task[httpx.Response]":
        """Send a request that takes the fleet's room until `go` is set; return its task."""
        task = asyncio.create_task(self.post(key=key))
        await eventually(lambda: self.controller.num_dispatched == 1)
        return task

    async def queued(self, count: int) -> None:
        await eventually(lambda: self.controller.num_queued == count)

    async def metrics(self) -> str:
        return (await self.http.get(f"{self.scripted.admin_url}/metrics")).text

    async def flow(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"{self.scripted.admin_url}/fleet")).json()["flow"]
        return found


@asynccontextmanager
async def an_edge(*, room: int = 1, api_key: str | None = None, **settings: Any) -> AsyncIterator[Edge]:
    async with scripted_gateway(**settings) as scripted:
        worker = scripted.workers.decode[0]
        worker.max_sequences = room
        await eventually(lambda: scripted.gateway.gate.report()["sequences"]["bound"] == room)  # type: ignore[index]
        address = scripted.gateway.listening.grpc
        async with (
            httpx.AsyncClient(base_url=scripted.url, timeout=30) as http,
            AsyncClient(address, api_key=api_key) as grpc,
        ):
            edge = Edge(scripted, http, grpc)
            worker.step = edge.go.wait
            yield edge
            edge.go.set()
            await scripted.idle()
            gate = scripted.gateway.gate
            counts = (gate.controller.num_queued, gate.controller.num_dispatched, gate.controller.num_sequences)
            assert (*counts, gate.controller.prefill_tokens) == (0, 0, 0, 0)
            assert all(account.num_open == 0 for account in gate.quotas.accounts.values())


async def test_a_request_waits_for_room_and_reports_how_long():
    async with an_edge() as edge:
        first = await edge.occupied()
        second = asyncio.create_task(edge.post())
        await edge.queued(1)
        flow = await edge.flow()
        assert (flow["queued"], flow["dispatched"], flow["sequences"]) == (1, 1, {"in_use": 1, "bound": 1})
        assert 0 < flow["queued_prompt_tokens"] < 100
        assert [(band["priority"], band["queued"]) for band in flow["bands"]] == [(0, 1)]
        assert [(t["tenant"], t["queued"], t["dispatched"]) for t in flow["tenants"]] == [("", 1, 1)]
        text = await edge.metrics()
        assert 'kvferry_gateway_queued_requests{band="normal"} 1.0' in text
        assert "kvferry_gateway_dispatched_requests 1.0" in text
        edge.go.set()
        waits = [(await one).json()["kvferry"]["queue_seconds"] for one in (first, second)]
        assert waits[0] == pytest.approx(0.25, abs=0.02), "the worker reports 0.25 s"
        assert waits[1] > waits[0]
        text = await edge.metrics()
        assert 'kvferry_gateway_queue_seconds_count{band="normal"} 2.0' in text
        assert 'kvferry_gateway_tenant_requests_total{outcome="admitted",tenant="default"} 2.0' in text
        assert 'kvferry_gateway_tenant_tokens_total{kind="output",tenant="default"} 6.0' in text


async def test_a_full_queue_is_429_with_a_time_to_retry_on_both_protocols():
    async with an_edge(max_queued=1) as edge:
        first = await edge.occupied()
        second = asyncio.create_task(edge.post())
        await edge.queued(1)
        refused = await edge.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with pytest.raises(Overloaded, match="at most 1 may") as full:
            await edge.grpc.complete("hi", _SHORT)
        assert full.value.retry_after_seconds is not None
        assert 1 <= full.value.retry_after_seconds <= 60
        with pytest.raises(Overloaded):
            await edge.grpc.embed(["hi"])
        edge.go.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert 'kvferry_gateway_refusals_total{reason="queue_full"} 3.0' in await edge.metrics()


async def test_the_message_of_a_grpc_call_counts_as_memory_of_the_queue():
    """gRPC keeps the message in memory until the call ends, unlike the body of an HTTP request."""
    async with an_edge(max_queued_bytes=10_000) as edge:
        first = await edge.occupied()
        stop = tuple("x" * 200 + str(number) for number in range(16))
        with pytest.raises(Overloaded, match="exceed the limit of 10000"):
            await edge.grpc.complete("y" * 100, SamplingParams(max_tokens=3, stop=stop))
        small = asyncio.create_task(edge.grpc.complete("y" * 100, _SHORT))
        await edge.queued(1)
        edge.go.set()
        assert (await first).status_code == 200
        await small


async def test_a_higher_class_displaces_a_lower_one():
    async with an_edge(max_queued=1) as edge:
        first = await edge.occupied()
        low = asyncio.create_task(edge.post(**body(priority=5)))
        await edge.queued(1)
        high = asyncio.create_task(edge.post(**body(priority=-5)))
        displaced = await low
        assert (displaced.status_code, displaced.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "higher priority" in displaced.json()["error"]["message"]
        assert displaced.headers["retry-after"]
        edge.go.set()
        assert [(await one).status_code for one in (first, high)] == [200, 200]
        assert 'kvferry_gateway_refusals_total{reason="displaced"} 1.0' in await edge.metrics()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place_at_once(stream):
    async with an_edge() as edge:
        first = await edge.occupied()
        second = asyncio.create_task(edge.post(**body(stream=stream)))
        await edge.queued(1)
        second.cancel()
        await edge.queued(0)
        call = asyncio.create_task(edge.grpc.complete("hi", _SHORT))
        await edge.queued(1)
        call.cancel()
        await edge.queued(0)
        edge.go.set()
        assert (await first).status_code == 200
        assert 'kvferry_gateway_refusals_total{reason="cancelled"} 2.0' in await edge.metrics()


async def test_a_deadline_that_passes_in_the_queue_is_504():
    async with an_edge(retry=RetryConfig(request_timeout_seconds=0.3)) as edge:
        edge.scripted.workers.decode[0].running = 1
        await eventually(lambda: edge.scripted.gateway.gate.report()["sequences"]["bound"] == 0)  # type: ignore[index]
        late = await edge.post()
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_in_queue")
        assert late.json()["error"]["type"] == "timeout_error"
        assert 'kvferry_gateway_refusals_total{reason="deadline"} 1.0' in await edge.metrics()


async def test_room_that_other_gateways_free_is_used():
    async with an_edge() as edge:
        worker = edge.scripted.workers.decode[0]
        worker.running = 1
        await eventually(lambda: edge.scripted.gateway.gate.report()["sequences"]["bound"] == 0)  # type: ignore[index]
        edge.go.set()
        waiting = asyncio.create_task(edge.post())
        await edge.queued(1)
        worker.running = 0
        assert (await waiting).status_code == 200


async def test_a_deadline_of_a_grpc_client_passes_in_the_queue():
    async with an_edge() as edge:
        first = await edge.occupied()
        with pytest.raises(DeadlinePassed):
            await edge.grpc.complete("hi", _SHORT, timeout=0.1)
        await edge.queued(0)
        edge.go.set()
        assert (await first).status_code == 200


async def test_streams_beyond_their_maximum_wait():
    async with an_edge(room=1000, max_streams=1) as edge:
        first = await edge.occupied()
        second = asyncio.create_task(edge.post())
        await edge.queued(1)
        edge.go.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]


async def test_samples_count_with_their_request():
    async with an_edge(room=4) as edge:
        first = asyncio.create_task(edge.post(**body(n=4)))
        await eventually(lambda: edge.controller.num_sequences == 4)
        second = asyncio.create_task(edge.post())
        await edge.queued(1)
        edge.go.set()
        assert len((await first).json()["choices"]) == 4
        assert (await second).status_code == 200


async def test_an_idle_fleet_is_passed_without_a_wait():
    async with an_edge(room=100) as edge:
        edge.go.set()
        assert (await edge.post()).json()["kvferry"]["queue_seconds"] == pytest.approx(0.25, abs=0.01)
        assert edge.scripted.gateway.gate._follower is None


# -- tenants -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tenants(tmp_path: Path) -> Callable[[str], Path]:
    path, times = tmp_path / "tenants.toml", iter(range(1_000, 9_999))

    def write(text: str) -> Path:
        path.write_text(text)
        time = next(times)
        os.utime(path, ns=(time, time))
        return path

    return write


def tenant(name: str, more: str = "") -> str:
    return f'[tenants.{name}]\nkeys = ["{hashed(f"key-of-{name}")}"]\n{more}\n'


Call = Callable[[AsyncClient], Awaitable[Any]]
_CALLS: list[Call] = [
    lambda client: client.complete("hi", _SHORT),
    lambda client: client.embed(["hi"]),
    lambda client: client.tokenize("hi"),
    lambda client: client.detokenize([104]),
]
_POSTS: list[tuple[str, dict[str, Any]]] = [
    (_CHAT, body()),
    ("/v1/completions", {"model": "bytes", "prompt": "hi", "max_tokens": 3}),
    ("/v1/embeddings", {"model": "bytes", "input": "hi"}),
    ("/v1/score", {"model": "bytes", "text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"model": "bytes", "query": "a", "documents": ["b"]}),
    ("/tokenize", {"model": "bytes", "prompt": "hi"}),
    ("/detokenize", {"model": "bytes", "tokens": [104]}),
]


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        ("requests_per_minute = 1", "requests_per_minute = 1"),
        ("tokens_per_minute = 1\ntoken_burst = 1", "tokens_per_minute = 1"),
    ],
)
async def test_a_used_up_quota_is_named_on_both_protocols(tenants, quota, words):
    path = tenants(tenant("a", quota) + tenant("b"))
    async with an_edge(room=100, tenants_file=path, api_key="key-of-a") as edge:
        edge.go.set()
        assert (await edge.post(key="key-of-a")).status_code == 200
        refused = await edge.post(key="key-of-a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert words in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(Overloaded, match=words) as over:
            await edge.grpc.complete("hi", _SHORT)
        assert over.value.retry_after_seconds
        assert (await edge.post(key="key-of-b")).status_code == 200, "each tenant has its own quota"
        name = words.split()[0]
        assert f'kvferry_gateway_refusals_total{{reason="{name}"}} 2.0' in await edge.metrics()


async def test_every_method_that_costs_is_counted(tenants):
    path = tenants(tenant("a", "requests_per_minute = 1"))
    async with an_edge(room=100, tenants_file=path, api_key="key-of-a") as edge:
        edge.go.set()
        assert (await edge.post("/tokenize", "key-of-a", model="bytes", prompt="x")).status_code == 200
        for call in _CALLS:
            with pytest.raises(Overloaded, match="requests_per_minute"):
                await call(edge.grpc)
        for route, fields in _POSTS:
            assert (await edge.post(route, "key-of-a", **fields)).status_code == 429, route
        await edge.grpc.model_info()


_LARGE = "x" * (1 << 20)
_WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": "unsupported"}}}


@pytest.mark.parametrize(
    "wrong", [body(messages=[{"role": "user", "content": _LARGE}]), body(response_format=_WRONG_SCHEMA)]
)
async def test_costly_requests_that_are_refused_are_counted(tenants, wrong):
    path = tenants(tenant("a", "requests_per_minute = 2") + tenant("b"))
    async with an_edge(room=100, tenants_file=path) as edge:
        edge.go.set()
        for _ in range(2):
            assert (await edge.post(key="key-of-a", **wrong)).status_code == 400
        for fields in (wrong, body()):
            refused = await edge.post(key="key-of-a", **fields)
            assert refused.status_code == 429
            assert "requests_per_minute = 2" in refused.json()["error"]["message"]
        assert (await edge.post(key="key-of-b", **wrong)).status_code == 400
        assert (await edge.post(key="key-of-b")).status_code == 200


async def test_a_small_request_that_is_refused_is_not_counted(tenants):
    path = tenants(tenant("a", "requests_per_minute = 1"))
    async with an_edge(room=100, tenants_file=path) as edge:
        edge.go.set()
        for _ in range(3):
            assert (await edge.post(key="key-of-a", **body(temperature=-1))).status_code == 400
        assert (await edge.post(key="key-of-a")).status_code == 200


async def test_concurrent_requests_are_limited(tenants):
    path = tenants(tenant("a", "concurrent_requests = 1"))
    async with an_edge(tenants_file=path) as edge:
        first = await edge.occupied("key-of-a")
        refused = await edge.post(key="key-of-a")
        assert refused.status_code == 429
        assert "concurrent_requests = 1" in refused.json()["error"]["message"]
        edge.go.set()
        assert (await first).status_code == 200
        assert (await edge.post(key="key-of-a")).status_code == 200


async def test_a_model_that_a_tenant_may_not_use_does_not_exist_for_it(tenants):
    path = tenants(tenant("a", 'models = ["other"]') + tenant("b", 'models = ["bytes"]'))
    async with an_edge(room=100, tenants_file=path, api_key="key-of-a") as edge:
        edge.go.set()
        for route, fields in _POSTS:
            refused = await edge.post(route, "key-of-a", **fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), route
        for call in [*_CALLS, lambda client: client.model_info()]:
            with pytest.raises(UnknownModel, match="no access"):
                await call(edge.grpc)
        for key, count in (("key-of-a", 0), ("key-of-b", 1)):
            headers = {"authorization": f"Bearer {key}"}
            assert len((await edge.http.get("/v1/models", headers=headers)).json()["data"]) == count
            status = (await edge.http.get("/v1/models/bytes", headers=headers)).status_code
            assert status == (200 if count else 404)
        assert (await edge.post(key="key-of-b")).status_code == 200


async def test_an_adapter_is_a_model_of_its_own_for_the_access_of_tenants(tenants):
    path = tenants(tenant("a", 'models = ["poems"]') + tenant("b", 'models = ["bytes"]'))
    async with an_edge(room=100, tenants_file=path, api_key="key-of-a") as edge:
        edge.go.set()
        for worker in edge.scripted.workers.all:
            worker.adapters["poems"] = b"d" * 32
        listed = {"authorization": "Bearer key-of-a"}

        async def names() -> list[str]:
            return [model["id"] for model in (await edge.http.get("/v1/models", headers=listed)).json()["data"]]

        while await names() != ["poems"]:  # the gateway learns of the adapter from the next status of the workers
            await edge.scripted.gateway.fleet.next_change()
        for key, model, status in (
            ("key-of-a", "poems", 200), ("key-of-a", "bytes", 404),
            ("key-of-b", "poems", 404), ("key-of-b", "bytes", 200),
        ):  # fmt: skip
            assert (await edge.post(key=key, **body(model=model))).status_code == status, (key, model)
        assert (await edge.grpc.complete("hi", _SHORT, model="poems"))[0].token_ids
        with pytest.raises(UnknownModel, match="no access"):
            await edge.grpc.complete("hi", _SHORT, model="bytes")


async def test_a_priority_outside_of_the_range_is_403_and_the_default_is_moved_into_it(tenants):
    path = tenants(tenant("a", "priority = [2, 10]"))
    async with an_edge(room=100, tenants_file=path, api_key="key-of-a") as edge:
        edge.go.set()
        refused = await edge.post(key="key-of-a", **body(priority=-1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
        assert refused.json()["error"]["type"] == "permission_error"
        with pytest.raises(Forbidden, match="range 2 to 10"):
            await edge.grpc.complete("hi", _SHORT, priority=11)
        assert (await edge.post(key="key-of-a")).status_code == 200
        assert [call.priority for call in edge.scripted.workers.prefill[0].prefills] == [2], (
            "the priority is clamped to the range"
        )


async def test_two_tenants_share_the_capacity_by_weight(tenants):
    """Both tenants have eight requests in the queue; those of the tenant with three times the weight leave three times
    as fast.
    """
    path = tenants(tenant("a", "weight = 3") + tenant("b"))
    async with an_edge(tenants_file=path) as edge:
        first = await edge.occupied("key-of-a")
        order: list[str] = []

        async def ask(name: str) -> None:
            assert (await edge.post(key=f"key-of-{name}")).status_code == 200
            order.append(name)

        tasks = [asyncio.create_task(ask(name)) for name in "b" * 8 + "a" * 8]
        await edge.queued(16)
        edge.go.set()
        await asyncio.gather(first, *tasks)
        assert 5 <= order[:8].count("a") <= 7
        assert edge.controller.num_flows == 0


async def test_a_changed_file_counts_without_a_restart(tenants):
    path = tenants(tenant("a"))
    async with an_edge(room=100, tenants_file=path) as edge:
        edge.go.set()
        assert (await edge.post(key="key-of-b")).status_code == 401
        tenants(tenant("b"))
        gateway = edge.scripted.gateway
        await eventually(lambda: "b" in gateway.parts.tenants.table.policies)
        assert (await edge.post(key="key-of-b")).status_code == 200
        assert (await edge.post(key="key-of-a")).status_code == 401


async def test_an_abandoned_stream_is_charged_for_its_used_tokens(tenants):
    path = tenants(tenant("a", "tokens_per_minute = 100000"))
    async with an_edge(room=100, tenants_file=path, api_key="key-of-a") as edge:
        edge.go.set()
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        async with aclosing(edge.grpc.generate("hello", long)) as chunks:
            async for _ in chunks:
                break
        await eventually(lambda: edge.controller.num_dispatched == 0)
        account = edge.scripted.gateway.gate.quotas.accounts["a"]
        assert account.tokens is not None
        used = 100_000 - account.tokens.level
        assert 0 < used < 5 + 400, "charged for the tokens generated, not for 256 expected ones"


async def test_failed_requests_are_not_charged(tenants):
    path = tenants(tenant("a", "tokens_per_minute = 100000"))
    async with an_edge(room=100, tenants_file=path, prefill=0, api_key="key-of-a") as edge:
        edge.go.set()
        with pytest.raises(KvferryError):
            await edge.grpc.embed(["hello"])
        account = edge.scripted.gateway.gate.quotas.accounts["a"]
        assert account.tokens is not None
        assert account.tokens.level == pytest.approx(100_000)


def test_the_number_of_tenant_labels_is_bounded():
    metrics = FlowMetrics(GatewayInstruments())
    labels = {metrics.tenant_label(f"t{number}") for number in range(3 * MAX_TENANT_LABELS)}
    assert len(labels) == MAX_TENANT_LABELS + 1
    assert metrics.tenant_label("t0") == "t0"
    assert metrics.tenant_label("new") == "other"
