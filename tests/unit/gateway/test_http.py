"""Plain routes, request ids and keys, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.gateway.decide.config import HttpConfig

_CHAT = "/v1/chat/completions"
_GOOD: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    http = HttpConfig(address="127.0.0.1:0", max_body_bytes=4096, max_prompts=3)
    async with scripted_gateway(http=http) as running:
        yield running


@pytest.fixture
async def client(gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as opened:
        yield opened


def check_error(response: httpx.Response, status: int, param: str | None = None, words: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert words in error["message"]
    assert response.headers["x-request-id"]
    return error


async def test_an_answer_carries_the_request_id(client):
    named = await client.post(_CHAT, json=_GOOD, headers={"x-request-id": "my-id.7"})
    assert named.status_code == 200
    assert named.headers["x-request-id"] == "my-id.7"
    assert named.json()["id"] == "chatcmpl-my-id.7"
    unnamed = await client.post(_CHAT, json=_GOOD)
    assert unnamed.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("bad", ["", "two words", "x" * 129, "a\\b", "<script>"])
async def test_a_request_id_that_could_harm_a_log_is_replaced(client, bad):
    response = await client.post(_CHAT, json=_GOOD, headers={"x-request-id": bad})
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req-")


async def test_ready_follows_the_fleet_and_gives_the_reason(gateway, client):
    assert (await client.get("/ready")).status_code == 200
    gateway.workers.decode[0].draining = True
    await gateway.gateway.fleet.wait_until(lambda fleet: not fleet.views()[1].takes_work)
    response = await client.get("/ready")
    assert response.status_code == 503
    assert any("draining" in note for note in response.json()["notes"])
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ping")).json() == {"status": "alive"}
    assert (await client.get("/version")).json() == {"version": version("kvferry")}


async def test_metrics_count_requests_and_streams(gateway, client):
    await client.post(_CHAT, json=_GOOD)
    await client.get("/nowhere")
    text = (await client.get(f"{gateway.admin_url}/metrics")).text
    assert 'kvferry_gateway_requests_total{path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'kvferry_gateway_requests_total{path="other",status="404"} 1.0' in text
    assert 'kvferry_gateway_streams_total{outcome="done"} 1.0' in text
    assert "kvferry_gateway_output_tokens_total 3.0" in text
    assert 'kvferry_gateway_workers{role="decode",state="ready"} 1.0' in text
    assert 'vllm:kv_cache_usage_perc{model_name="bytes"} 0.25' in text
    assert 'vllm:num_requests_running{model_name="bytes"} 0.0' in text


async def test_each_key_selects_its_tenant(tmp_path: Path, caplog):
    keys = tmp_path / "keys"
    keys.write_text("# who may come\nsk-one acme\n\nsk-two  beta\n")
    http = HttpConfig(address="127.0.0.1:0", api_keys_file=keys)
    async with scripted_gateway(http=http) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for headers in ({}, {"authorization": "Bearer sk-three"}, {"authorization": "Basic sk-one"}):
            response = await client.post(_CHAT, json=_GOOD, headers=headers)
            check_error(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        good = await client.post(_CHAT, json=_GOOD, headers={"authorization": "Bearer sk-two"})
        assert good.status_code == 200
        assert gateway.workers.prefill[0].prefills[0].scope == "beta"
        await gateway.idle()
    assert "sk-" not in caplog.text


async def test_a_body_that_never_arrives_is_given_up():
    http = HttpConfig(address="127.0.0.1:0", body_timeout_seconds=0.1)
    async with scripted_gateway(http=http) as gateway:
        host, port = gateway.gateway.listening.http.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        async with asyncio.timeout(10):
            assert b"408" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_disconnects_while_sending_affects_no_other_request(gateway, client):
    host, port = gateway.gateway.listening.http.split(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await client.post(_CHAT, json=_GOOD)).status_code == 200
