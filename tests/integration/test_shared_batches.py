"""Files and batches in Redis over HTTP: cut uploads, a store without room, a Redis that is gone, and settings."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from click.testing import CliRunner
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import eventually

from kvferry.cli.main import main
from kvferry.gateway.batches.shared.shared_contents import CHUNK_BYTES
from kvferry.gateway.decide.config import BatchConfig, StateConfig

LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "bytes", "prompt": "hi", "max_tokens": 3, "seed": 1},
}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server(policy="noeviction") as running:
        yield running


@asynccontextmanager
async def served(server: RedisServer, most: int = 64 << 20) -> AsyncIterator[tuple[ScriptedGateway, httpx.AsyncClient]]:
    state = StateConfig(f"redis://127.0.0.1:{server.port}/0", file_bytes=most)
    batches = BatchConfig(None, max_file_bytes=16 << 20)
    async with (
        scripted_gateway(batches=batches, state=state, tenant_key=b"k" * 32) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        yield gateway, http


def stored_bytes(server: RedisServer) -> int:
    """Return the bytes that files and batches take."""
    keys = server.ask(b"KEYS", b"*:f:bytes")
    assert isinstance(keys, list)
    return int(bytes(server.ask(b"HGET", keys[0], b"all") or b"0")) if keys else 0  # type: ignore[call-overload]


async def upload(http: httpx.AsyncClient, content: bytes) -> httpx.Response:
    return await http.post("/v1/files", data={"purpose": "batch"}, files={"file": content})


async def test_two_gateways_serve_the_same_files_and_batches(server):
    async with served(server) as (_, one), served(server) as (_, two):
        content = json.dumps(LINE).encode() + b"\n"
        file = (await upload(one, content)).json()["id"]
        assert (await two.get(f"/v1/files/{file}/content")).content == content
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await two.post("/v1/batches", json=body)).json()["id"]
        async with asyncio.timeout(30):
            while (found := (await one.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
                pass
        (result,) = (await two.get(f"/v1/files/{found['output_file_id']}/content")).text.splitlines()
        assert json.loads(result)["custom_id"] == "a"
        assert [each["id"] for each in (await one.get("/v1/batches")).json()["data"]] == [batch]
        assert (await one.delete(f"/v1/files/{file}")).json()["deleted"] is True
        assert (await two.get(f"/v1/files/{file}")).status_code == 404


async def test_a_cut_upload_leaves_nothing(server):
    async with served(server) as (gateway, _):
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        writer.write(head + b"content-length: 9000000\r\n\r\n" + part + b"x" * (12 * CHUNK_BYTES))
        await writer.drain()
        await eventually(lambda: stored_bytes(server) >= 4 * CHUNK_BYTES)
        writer.transport.abort()
        await eventually(lambda: stored_bytes(server) == 0)
        assert server.ask(b"KEYS", b"*:f:o:*") == []


async def test_a_store_without_room_names_its_setting(server):
    async with served(server, most=8 * CHUNK_BYTES) as (gateway, http):
        kept = (await upload(http, b"k" * CHUNK_BYTES)).json()["id"]
        answer = await upload(http, b"x" * (8 * CHUNK_BYTES))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "files_full")
        assert answer.json()["error"]["param"] == "state_file_bytes"
        assert (await http.get(f"/v1/files/{kept}/content")).content == b"k" * CHUNK_BYTES
        await eventually(lambda: stored_bytes(server) < 2 * CHUNK_BYTES)
        assert gateway.gateway.instruments.file_store_failures.labels("full")._value.get() == 1


async def test_a_gateway_without_its_redis_answers_by_name_and_other_routes_go_on(server):
    async with served(server) as (gateway, http):
        await upload(http, b"{}\n")
        server.kill()
        for answer in (
            await http.get("/v1/files"),
            await upload(http, b"{}\n"),
            await http.get("/v1/batches/batch_0"),
            await http.post("/v1/batches/batch_0/cancel"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "files_unavailable")
            assert answer.headers["retry-after"]
        body = {"model": "bytes", "prompt": "hi", "max_tokens": 3}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        calls = gateway.gateway.instruments.state_calls
        assert calls.labels("files", "unreachable")._value.get() > 0


async def test_a_redis_that_stalls_delays_a_request_for_its_time_limit_only(server):
    async with served(server) as (gateway, http):
        file = (await upload(http, b"{}\n")).json()["id"]
        server.process.send_signal(signal.SIGSTOP)
        try:
            stalled = await http.get(f"/v1/files/{file}")
            assert (stalled.status_code, stalled.json()["error"]["code"]) == (503, "files_unavailable")
            assert gateway.gateway.instruments.state_calls.labels("files", "slow")._value.get() > 0
        finally:
            server.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while (await http.get(f"/v1/files/{file}/content")).status_code != 200:
                pass


def test_the_word_state_needs_the_setting_state():
    flags = ["gateway", "--model", "tiny", "--both", "127.0.0.1:1/2", "--batch-folder", "state"]
    refused = CliRunner().invoke(main, flags)
    assert refused.exit_code == 2
    assert "--state redis://" in refused.output
