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
from kvferry.picker.decide.endpoints import PoolEndpoint
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
            assert await anext(answer.aiter_lines())
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
