"""Whole gateways whose Redis stalls or is slow: streams have all tokens before anything waits; waits are bounded."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.servers.redis_relay import Relay, relay
from harness.servers.redis_server import RedisServer, redis_server

from kvferry.gateway.decide.config import StateConfig

BODY = {"input": "hi", "max_output_tokens": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def link(server: RedisServer) -> Iterator[Relay]:
    with relay(str(server.socket_path)) as made:
        yield made


@pytest.fixture
async def gateway(link: Relay) -> AsyncIterator[ScriptedGateway]:
    state = StateConfig(f"redis://127.0.0.1:{link.port}/0")
    async with scripted_gateway(state=state, tenant_key=b"k" * 32) as running:
        yield running


@pytest.fixture
async def http(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", timeout=30) as client:
        yield client


async def events(http: httpx.AsyncClient, **more: Any) -> list[Any]:
    answer = await http.post("/responses", json={**BODY, "stream": True, **more})
    assert answer.status_code == 200
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def stall(link: Relay) -> None:
    for number in range(256):
        link.stall(number)


async def test_a_stream_has_all_its_tokens_before_it_waits_for_a_stalled_redis(
    link: Relay, http: httpx.AsyncClient
) -> None:
    whole = await events(http, store=True)
    assert whole[-1]["response"]["store"] is True
    stall(link)
    failed = await events(http, store=True)
    assert [each["type"] for each in failed[:-1]] == [each["type"] for each in whole[:-1]]
    assert (failed[-1]["type"], failed[-1]["response"]["status"]) == ("response.failed", "failed")
    assert "does not answer in time" in failed[-1]["response"]["error"]["message"] or "TimeoutError" in str(failed[-1])
    assert (await events(http))[-1]["response"]["store"] is False


async def test_answers_say_that_they_are_not_stored_and_only_a_demand_is_refused(
    link: Relay, http: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    stall(link)
    first = await http.post("/responses", json=BODY)
    assert (first.status_code, first.json()["store"], first.json()["status"]) == (200, False, "incomplete")
    refused = await http.post("/responses", json={**BODY, "store": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "responses_unavailable")
    assert refused.headers["retry-after"] == "1"
    assert "store false" in refused.json()["error"]["message"]
    for ask in (http.get, http.delete):
        assert (await ask("/responses/resp_1")).status_code == 503
    failures = gateway.gateway.instruments.response_store_failures.labels("unreachable")
    assert failures._value.get() >= 4
    assert (await http.post("/responses", json={**BODY, "store": False})).status_code == 200


async def test_a_slow_redis_delays_the_end_and_nothing_is_lost(server: RedisServer, http: httpx.AsyncClient) -> None:
    server.ask(b"CLIENT", b"PAUSE", b"300", b"ALL")
    whole = (await events(http))[-1]["response"]
    assert whole["store"] is True
    assert (await http.get(f"/responses/{whole['id']}")).json()["output"] == whole["output"]


async def test_a_response_beyond_the_bound_says_that_it_is_not_stored(server: RedisServer) -> None:
    state = StateConfig(f"redis://127.0.0.1:{server.port}/0", total_bytes=4000)
    async with (
        scripted_gateway(state=state, tenant_key=b"k" * 32) as gateway,
        httpx.AsyncClient(base_url=f"{gateway.url}/v1", timeout=30) as http,
    ):
        for more in ({}, {"store": True}):
            answer = await http.post("/responses", json={**BODY, **more})
            assert (answer.status_code, answer.json()["store"]) == (200, False)
        refused = await http.post("/responses", json={**BODY, "background": True})
        assert (refused.status_code, "no room" in refused.text) == (429, True)
