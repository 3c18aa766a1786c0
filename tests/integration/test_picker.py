"""The endpoint picker behind a real Envoy, in front of stand-ins of model servers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from harness.servers.envoy import EnvoyMode, envoy, envoy_path
from harness.servers.model_server import ModelServer, model_servers
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.picker.config import PickerConfig, ScrapeConfig
from kvferry.picker.decide.choice import ChoiceConfig
from kvferry.picker.decide.endpoints import PoolEndpoint
from kvferry.picker.decide.saturation import SaturationConfig
from kvferry.picker.picker_process import Picker

SECONDS = 20.0
pytestmark = [
    pytest.mark.skipif(envoy_path() is None, reason="Envoy is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:aiohttp"),
]
DUPLEX = EnvoyMode()
BUFFERED = EnvoyMode(body="BUFFERED", response_body="NONE")
HEADERS_ONLY = EnvoyMode(body="NONE", response_body="NONE")
STREAMED = EnvoyMode(body="STREAMED", response_body="STREAMED")
MODES = {"duplex": DUPLEX, "buffered": BUFFERED, "headers": HEADERS_ONLY, "streamed": STREAMED}


@dataclass(slots=True)
class PickerRig:
    """A picker, Envoy and a client."""

    picker: Picker
    http: httpx.AsyncClient
    servers: Sequence[ModelServer]

    def counts(self) -> Counter[str]:
        """Return the number of requests by the address of the server."""
        return Counter({server.address: len(server.requests) for server in self.servers})

    async def idle(self) -> None:
        """Wait until no request is counted."""
        await eventually(lambda: not (self.picker.pool.states.num_open or self.picker.service.num_streams), SECONDS)


def config_of(servers: Sequence[ModelServer], **changes: object) -> PickerConfig:
    """Return the settings of a picker for these servers."""
    endpoints = [PoolEndpoint(one.address, one.address, one.address) for one in servers]
    config = PickerConfig(endpoints=endpoints, is_plaintext=True, scrape=ScrapeConfig(seconds=0.05), drain_seconds=2.0)
    return replace(config, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def rig(
    servers: Sequence[ModelServer], folder: Path, mode: EnvoyMode = DUPLEX, **changes: object
) -> AsyncIterator[PickerRig]:
    """Run servers, a picker that has scraped them, and Envoy."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model_servers(*servers))
        picker = await Picker.start(config_of(servers, **changes), SystemClock())
        stack.push_async_callback(picker.stop)
        await eventually(lambda: picker.scraper.num_rounds > 0, SECONDS)
        mode = replace(mode, endpoints=tuple(server.address for server in servers))
        url = await stack.enter_async_context(envoy(picker.listening.grpc, folder, mode))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=SECONDS))
        yield PickerRig(picker, http, servers)


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_a_request_reaches_the_chosen_server_unchanged(mode, tmp_path):
    servers = [ModelServer(), ModelServer(running=50, waiting=20), ModelServer(running=50, waiting=20)]
    async with rig(servers, tmp_path, mode) as running:
        body = chat("hello " * 2000)
        answer = await running.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["served_by"]) == (200, servers[0].address)
        assert servers[0].json_bodies() == [body]
        await running.idle()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_events_arrive_while_the_answer_is_generated(mode, tmp_path):
    servers = [ModelServer(), ModelServer()]
    gate = asyncio.Event()
    for server in servers:
        server.gate = gate
    async with rig(servers, tmp_path, mode) as running:
        async with (
            asyncio.timeout(SECONDS),
            running.http.stream("POST", "/v1/chat/completions", json=chat("hi", stream=True)) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(line async for line in lines if line) == 'data: {"token": 1}'
            gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await running.idle()


async def test_equal_prefixes_meet_and_others_spread(tmp_path):
    servers = [ModelServer(flavor="vllm" if number % 2 else "sglang") for number in range(4)]
    async with rig(servers, tmp_path) as running:

        async def served(text: str) -> str:
            answer = await running.http.post("/v1/chat/completions", json=chat(text))
            return str(answer.json()["served_by"])

        long = "a system prompt that many requests share. " * 100
        assert len({await served(f"{long} question {number}") for number in range(8)}) == 1
        assert len({await served(f"prompt {number}. " * 100) for number in range(16)}) > 1
        await running.idle()


async def test_a_client_that_leaves_frees_its_place_and_the_server(tmp_path):
    server = ModelServer(gate=asyncio.Event())
    async with rig([server], tmp_path) as running:
        async with running.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.aiter_lines()  # kept: the end of the iterator closes the answer
            assert await anext(lines)
            assert running.picker.pool.states.num_open == 1
        await running.idle()
        await eventually(lambda: server.cancelled > 0, SECONDS)


async def test_requests_without_a_body_are_routed_by_load(tmp_path):
    servers = [ModelServer(running=40), ModelServer()]
    async with rig(servers, tmp_path) as running:
        answer = await running.http.get("/v1/models")
        assert answer.json()["served_by"] == servers[1].address
        await running.idle()


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 700_000, 3_000_000])
async def test_bodies_of_any_size_pass(size, tmp_path):
    server = ModelServer()
    async with rig([server], tmp_path) as running:
        body = b"x" * size
        answer = await running.http.post("/v1/completions", content=body)
        assert (answer.status_code, answer.json()["bytes"]) == (200, size)
        assert server.bodies == [body]
        await running.idle()


async def test_a_refusal_is_an_error_of_the_api(tmp_path):
    async with rig([ModelServer()], tmp_path) as running:
        running.picker.pool.states.follow([])
        answer = await running.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_endpoints"


async def test_tls_with_a_certificate_of_its_own(tmp_path):
    server = ModelServer()
    async with rig([server], tmp_path, replace(DUPLEX, is_tls=True), is_plaintext=False) as running:
        answer = await running.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.json()["served_by"] == server.address


async def test_a_pair_reaches_the_decode_server_with_the_header_of_the_prefill_server(tmp_path):
    prefill, decode = ModelServer(), ModelServer()
    async with rig([prefill, decode], tmp_path) as running:
        states = running.picker.pool.states
        states.follow(
            PoolEndpoint(one.address, one.address, one.address, is_prefill=one is prefill) for one in (prefill, decode)
        )
        answer = await running.http.post(
            "/v1/completions", json={"prompt": "x" * 4000}, headers={"x-prefiller-host-port": "evil:80"}
        )
        assert answer.json()["served_by"] == decode.address
        assert decode.requests[0].headers["x-prefiller-host-port"] == prefill.address
        states.follow([PoolEndpoint(decode.address, decode.address, decode.address)])
        await running.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-prefiller-host-port": "evil:80"})
        assert "x-prefiller-host-port" not in decode.requests[1].headers
        await running.idle()


async def test_headers_of_the_protocol_do_not_reach_the_server(tmp_path):
    server = ModelServer()
    async with rig([server], tmp_path) as running:
        headers = {"x-gateway-inference-objective": "batch", "x-gateway-inference-fairness-id": "team"}
        await running.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert not {*headers} & {*server.requests[0].headers}


async def test_a_full_pool_sheds_by_objective(tmp_path):
    server = ModelServer(running=9, waiting=9)
    bounds = SaturationConfig(objectives={"batch": -1}, queue_seconds=0.1)
    async with rig([server], tmp_path, saturation=bounds) as running:
        shed = await running.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-gateway-inference-objective": "batch"}
        )
        assert (shed.status_code, shed.headers["retry-after"]) == (429, "1")
        assert shed.json()["error"] == {
            "message": "all endpoints are full; retry later",
            "type": "rate_limit_error",
            "param": None,
            "code": "shed",
        }
        assert (await running.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        server.running = server.waiting = 0
        await eventually(lambda: not running.picker.pool.is_saturated(), SECONDS)
        passed = await running.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-gateway-inference-objective": "batch"}
        )
        assert passed.status_code == 200
        await running.idle()


OVERRIDE = replace(DUPLEX, by_override=True)


async def test_a_server_that_is_gone_is_replaced_by_a_fallback(tmp_path):
    servers = [ModelServer() for _ in range(3)]
    choice = ChoiceConfig(fallbacks=2)
    async with rig(servers, tmp_path, replace(OVERRIDE, retries=2), choice=choice) as running:
        first = await running.http.post("/v1/completions", json={"prompt": "x"})
        picked = next(server for server in servers if server.address == first.json()["served_by"])
        picked.status = 503
        second = await running.http.post("/v1/completions", json={"prompt": "x"})
        assert second.status_code == 200
        assert second.json()["served_by"] != picked.address
        assert len(picked.requests) == 2, "the first endpoint of the list was tried first"
        await running.idle()


@pytest.mark.parametrize(
    "page", ["", "vllm:num_requests_running NaN\n", "x" * (5 << 20), "vllm:num_requests_running 1e300\n"]
)
async def test_a_server_whose_metrics_lie_is_not_preferred(page, tmp_path):
    servers = [ModelServer(), ModelServer(page=page)]
    async with rig(servers, tmp_path) as running:
        for number in range(6):
            await running.http.post("/v1/completions", json={"prompt": str(number)})
        assert running.counts()[servers[0].address] == 6
        await running.idle()


async def test_a_server_that_claims_to_be_idle_gets_its_share_only(tmp_path):
    gate = asyncio.Event()
    servers = [ModelServer(gate=gate) for _ in range(2)]
    servers[0].page = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    async with rig(servers, tmp_path) as running, asyncio.TaskGroup() as tasks:
        for number in range(20):
            body = {"prompt": str(number), "stream": True}
            tasks.create_task(running.http.post("/v1/completions", json=body))
        await eventually(lambda: sum(running.counts().values()) == 20, SECONDS)
        assert max(running.counts().values()) <= 14
        gate.set()


async def test_servers_whose_metrics_are_gone_are_used_when_all_are(tmp_path):
    servers = [ModelServer(flavor="none"), ModelServer(flavor="none")]
    async with rig(servers, tmp_path) as running:
        for number in range(12):
            assert (await running.http.post("/v1/completions", json={"prompt": str(number)})).status_code == 200
        await running.idle()


@pytest.mark.parametrize("fails_open", [True, False])
@pytest.mark.parametrize(
    "mode", [OVERRIDE, replace(OVERRIDE, body="BUFFERED", response_body="NONE")], ids=["duplex", "buffered"]
)
async def test_without_the_picker_the_gateway_fails_open_or_closed(fails_open, mode, tmp_path):
    server = ModelServer()
    async with rig([server], tmp_path, replace(mode, fails_open=fails_open)) as running:
        assert (await running.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        await running.picker.stop()
        found = {
            "GET": (await running.http.get("/v1/models")).status_code,
            "POST": (await running.http.post("/v1/completions", json={"prompt": "x"})).status_code,
        }
        assert (found["GET"] == 200) == fails_open
        # In full duplex mode Envoy fails if it had given the body away before it noticed that the picker is gone.
        is_free = fails_open and mode.body != "BUFFERED"
        assert (found["POST"] == 200) == fails_open or (is_free and found["POST"] == 500)


async def test_the_metrics_of_the_picker(tmp_path):
    server = ModelServer()
    async with rig([server], tmp_path, metrics="127.0.0.1:0") as running:
        await running.http.post("/v1/completions", json={"prompt": "word " * 400})
        await running.http.post("/v1/completions", json={"prompt": "word " * 400})
        await running.idle()
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"http://{running.picker.listening.metrics}/metrics")).text
    assert 'kvferry_picker_picks_total{kind="one",trust="fresh"} 2.0' in page
    assert "kvferry_picker_cached_tokens_total 448.0" in page
    assert 'kvferry_picker_bodies_total{problem="none"} 2.0' in page


async def test_two_pickers_beside_each_other_agree_and_do_not_herd(tmp_path):
    servers = [ModelServer() for _ in range(8)]
    async with rig(servers, tmp_path) as running:
        other = await Picker.start(config_of(servers), SystemClock())
        try:
            await eventually(lambda: other.scraper.num_rounds > 0, SECONDS)
            folder = tmp_path / "other"
            folder.mkdir()
            async with (
                envoy(other.listening.grpc, folder, DUPLEX) as url,
                httpx.AsyncClient(base_url=url, timeout=SECONDS) as http,
            ):
                for number in range(4):
                    body = chat(f"prompt {number}. " * 200)
                    answers = [await one.post("/v1/chat/completions", json=body) for one in (running.http, http)]
                    assert len({answer.json()["served_by"] for answer in answers}) == 1
        finally:
            await other.stop()
        await running.idle()
