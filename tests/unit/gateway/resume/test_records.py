"""Records of streams in a real Redis: two gateways, one position; bounds; a server that is slow, gone, or another's."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.servers.redis_relay import relay
from harness.servers.redis_server import RedisServer, redis_server
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.sampling import SampledToken
from kvferry.gateway.decide.config import HttpConfig, StateConfig
from kvferry.gateway.resume.stream_store import RecordLimits, RecordWrite, StreamStore, WriteResult
from kvferry.gateway.resume.token_batches import TokenBatch, batches_of, joined
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient, StoreUnavailable
from kvferry.gateway.state.state_url import parse_state_url

KEY = b"k" * 32
BODY = {"prompt": "hi", "max_tokens": 100, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def url(server: RedisServer) -> str:
    server.ask(b"FLUSHALL")
    return f"redis://127.0.0.1:{server.port}/0"


@asynccontextmanager
async def two_gateways(
    url: str, other_url: str = "", *, keys: tuple[bytes, bytes] = (KEY, KEY), http: HttpConfig | None = None
) -> AsyncIterator[tuple[ScriptedGateway, ScriptedGateway]]:
    """Run two gateways, whose workers generate equal tokens."""
    async with AsyncExitStack() as stack:
        states = StateConfig(url), StateConfig(other_url or url)
        first, second = [
            await stack.enter_async_context(scripted_gateway(state=state, tenant_key=key, http=http))
            for state, key in zip(states, keys, strict=True)
        ]
        yield first, second


async def read(
    gateway: ScriptedGateway,
    body: dict[str, Any],
    position: str = "",
    *,
    most: int = 1 << 30,
    key: str = "",
    **headers: str,
) -> tuple[int, list[tuple[str, Any]]]:
    """Return the status of an answer, and up to `most` events, each with its id."""
    content = json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers}
    if position:
        sent["last-event-id"] = position
    if key:
        sent["authorization"] = f"Bearer {key}"
    events: list[tuple[str, Any]] = []
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", f"{gateway.url}/v1/completions", content=content, headers=sent) as answer,
    ):
        if answer.status_code != 200:
            return answer.status_code, [("", json.loads(await answer.aread()))]
        event_id = ""
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value != "[DONE]":
                events.append((event_id, json.loads(value)))
                if len(events) == most:
                    break
    return 200, events


def text_of(events: list[tuple[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for _, event in events)


def count(gateway: ScriptedGateway, name: str, *labels: str) -> float:
    metric = getattr(gateway.gateway.instruments, name)
    return float((metric.labels(*labels) if labels else metric)._value.get())


@pytest.mark.parametrize("position", [0, 7, 60, 99])
async def test_another_gateway_sends_the_rest_from_the_record(url: str, position: int) -> None:
    async with two_gateways(url) as (first, second):
        _, whole = await read(first, BODY)
        assert len(text_of(whole)) == 100
        await drained(first)
        status, rest = await read(second, BODY, whole[position][0])
        assert status == 200
        assert text_of(whole[: position + 1]) + text_of(rest) == text_of(whole)
        assert [event["id"] for _, event in rest] == [whole[0][1]["id"]] * len(rest), "one answer has one id"
        assert count(second, "reconnections", "replayed") == 1
        assert count(second, "prompt_tokens") == 0, "nothing is computed"


async def test_another_gateway_continues_what_the_first_has_not_finished(url: str) -> None:
    body = BODY | {"max_tokens": 480, "seed": 11}
    async with two_gateways(url) as (first, second):
        _, whole = await read(first, body)
        _, beginning = await read(first, body, most=40)  # then the client is gone
        await first.idle()
        await drained(first)
        _, rest = await read(second, body, beginning[-1][0])
        assert text_of(beginning) + text_of(rest) == text_of(whole)
        assert count(second, "reconnections", "continued") == 1
        assert count(second, "output_tokens") < 480, "recorded tokens are not computed again"
        # The usage of the prompt is that of the first gateway, and the new record is whole.
        await drained(second)
        _, again = await read(first, body, beginning[-1][0])
        assert text_of(again) == text_of(rest)
        assert count(first, "reconnections", "replayed") == 1


async def drained(gateway: ScriptedGateway) -> None:
    """Wait until all records are written."""
    shared = gateway.gateway.parts.shared
    assert shared is not None
    async with asyncio.timeout(10):
        await shared.resumption.records.drain(10)


async def test_the_rest_without_a_record_is_computed_again(url: str, server: RedisServer) -> None:
    async with two_gateways(url) as (first, second):
        _, whole = await read(first, BODY)
        await drained(first)
        server.ask(b"FLUSHALL")
        _, rest = await read(second, BODY, whole[40][0])
        assert text_of(whole[:41]) + text_of(rest) == text_of(whole)
        assert count(second, "reconnections", "recomputed") == 1


@pytest.mark.parametrize(
    ("changed", "status", "named"),
    [
        ({"prompt": "ho"}, 409, "the body or its prompt"),
        ({"temperature": 0.5}, 409, "the body or its prompt"),
        ({"n": 2}, 400, "several sequences"),
    ],
)
async def test_another_request_than_the_streams_is_refused(
    url: str, changed: dict[str, Any], status: int, named: str
) -> None:
    async with two_gateways(url) as (first, second):
        _, whole = await read(first, BODY)
        await drained(first)
        found, (refused,) = await read(second, BODY | changed, whole[40][0])
        assert found == status
        assert named in refused[1]["error"]["message"]
        assert refused[1]["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize(
    "forged", ["1", "a.b.c.d", "A" * 16 + ".3.0.00000000", "A" * 16 + ".9999999.2.00000000", "x" * 5000]
)
async def test_forged_positions_are_refused(url: str, forged: str) -> None:
    async with two_gateways(url) as (first, _):
        status, (refused,) = await read(first, BODY, forged)
        assert status in (400, 409)
        assert "Last-Event-ID" in refused[1]["error"]["message"]


async def test_without_shared_state_events_have_no_ids_and_positions_are_refused() -> None:
    async with scripted_gateway() as gateway:
        _, whole = await read(gateway, BODY)
        assert {event_id for event_id, _ in whole} == {""}
        status, (refused,) = await read(gateway, BODY, "A" * 16 + ".3.0.00000000")
        assert (status, "no --state" in refused[1]["error"]["message"]) == (400, True)


async def test_a_tenant_finds_no_stream_of_another(url: str, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one acme\ntwo other\n")
    http = HttpConfig(address="127.0.0.1:0", api_keys_file=keys)
    async with two_gateways(url, http=http) as (first, second):
        _, whole = await read(first, BODY, key="one")
        await drained(first)
        status, (refused,) = await read(second, BODY, whole[40][0], key="two")
        assert (status, refused[1]["error"]["code"]) == (409, "resume_refused")
        status, rest = await read(second, BODY, whole[40][0], key="one")
        assert text_of(whole[:41]) + text_of(rest) == text_of(whole)


async def test_another_pools_records_are_none(url: str, server: RedisServer) -> None:
    async with two_gateways(url, keys=(KEY, b"x" * 32)) as (first, second):
        _, whole = await read(first, BODY | {"seed": 5})
        await drained(first)
        # Put the first pool's values under the keys that the second pool reads.
        await read(second, BODY | {"seed": 5}, whole[40][0], most=1)
        names = [name for name in keys_of(server) if name.count(b":") == 3]
        mine, other = (next(n for n in names if n.startswith(b"{kvferry:" + p.encode())) for p in pools())
        assert server.ask(b"COPY", mine, other, b"REPLACE") == 1
        _, rest = await read(second, BODY | {"seed": 5}, whole[40][0])
        assert text_of(whole[:41]) + text_of(rest) == text_of(whole), "computed again with the client's seed"
        assert count(second, "reconnections", "recomputed") == 2


def pools() -> tuple[str, str]:
    return PoolSeal(KEY).pool, PoolSeal(b"x" * 32).pool


def keys_of(server: RedisServer) -> list[bytes]:
    found = server.ask(b"KEYS", b"*")
    assert isinstance(found, list)
    return found


async def test_records_show_neither_tokens_nor_tenants(url: str, server: RedisServer) -> None:
    async with two_gateways(url) as (first, _):
        await read(first, BODY | {"logprobs": 1}, "", **{"x-request-id": "secret-request"})
        await drained(first)
        for name in keys_of(server):
            if server.ask(b"TYPE", name) == b"hash":
                values = server.ask(b"HGETALL", name)
                assert b"secret-request" not in b"".join(v for v in values if isinstance(v, bytes))  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["gone", "stalled"])
async def test_streams_go_on_without_redis(server: RedisServer, url: str, fault: str) -> None:
    with relay(str(server.socket_path)) as link:
        clock = SystemClock()
        if fault == "gone":
            link.target = "/nonexistent"
        else:
            for number in range(64):
                link.stall(number)
        async with two_gateways(f"redis://127.0.0.1:{link.port}/0", url) as (first, second):
            started = clock.monotonic()
            answers = await asyncio.gather(*(read(first, BODY) for _ in range(8)))
            assert {len(text_of(whole)) for _, whole in answers} == {100}
            await eventually(lambda: count(first, "stream_record_failures", "unreachable") > 0)
            # A position in a stream without a record: at the gateway without Redis, and at another one.
            whole = answers[0][1]
            for gateway in (first, second):
                _, rest = await read(gateway, BODY, whole[40][0])
                assert text_of(whole[:41]) + text_of(rest) == text_of(whole)
            assert clock.monotonic() - started < 20


async def test_the_earlier_gateway_ends_a_stream_that_is_continued_elsewhere(url: str) -> None:
    body = BODY | {"max_tokens": 480}
    async with two_gateways(url) as (first, second):
        shared = first.gateway.parts.shared
        assert shared is not None
        stream: list[tuple[str, Any]] = []
        rest: list[tuple[str, Any]] = []
        content, headers = json.dumps(body), {"content-type": "application/json"}
        async with (
            httpx.AsyncClient(timeout=30) as client,
            client.stream("POST", f"{first.url}/v1/completions", content=content, headers=headers) as answer,
        ):
            lines = answer.aiter_lines()
            async for line in lines:
                if line.startswith("id: "):
                    stream.append((line.removeprefix("id: "), json.loads((await anext(lines)).removeprefix("data: "))))
                elif line.startswith("data: {"):
                    stream.append(("", json.loads(line.removeprefix("data: "))))
                if len(stream) == 30:
                    _, rest = await read(second, body, stream[-1][0])
        whole = text_of(stream[:30]) + text_of(rest)
        assert len(whole) == 480
        ends = stream[-1][1]
        is_fenced = "error" in ends
        assert (ends["error"]["code"] if is_fenced else ends["choices"][0]["finish_reason"]) in (
            "resume_refused",
            "length",
        )


def store_of(url: str, total_bytes: int = 1 << 20, pool: str = "p") -> StreamStore:
    return StreamStore(StateClient(parse_state_url(url)), pool, RecordLimits(total_bytes))


def member(tenant: int, stream: int) -> bytes:
    return b"%016x:%032x" % (tenant, stream)


def write(name: bytes, epoch: int = 0, ttl: float = 60.0, size: int = 500, field: bytes = b"0") -> RecordWrite:
    return RecordWrite(name, epoch, ttl, {field: b"v" * size})


async def test_a_claim_ends_the_writes_of_the_earlier_owner(url: str) -> None:
    store, name = store_of(url), member(1, 1)
    try:
        assert await store.write([write(name)]) == [WriteResult.OK]
        fields = await store.claim(name, 60.0)
        assert fields == {b"e": b"1", b"0": b"v" * 500}
        assert await store.write([write(name, epoch=0, field=b"1")]) == [WriteResult.FENCED]
        assert await store.write([write(name, epoch=1, field=b"1"), write(member(1, 2))]) == [WriteResult.OK] * 2
        # A claim before the first write fences it too.
        assert await store.claim(member(1, 3), 60.0) == {b"e": b"1"}
        assert await store.write([write(member(1, 3))]) == [WriteResult.FENCED]
    finally:
        await store.client.close()


async def test_records_of_clients_that_never_return_stay_within_the_bound(url: str, server: RedisServer) -> None:
    store = store_of(url, total_bytes=2 << 20)
    try:
        results = []
        for start in range(0, 10_000, 200):
            results += await store.write([write(member(1, number)) for number in range(start, start + 200)])
        kept = results.count(WriteResult.OK)
        assert results.count(WriteResult.FULL) == 10_000 - kept
        assert 1000 < kept < (1 << 20) // 500, "one tenant has half"
        assert await store.write([write(member(2, 1))]) == [WriteResult.OK], "another one has room"
        assert len(keys_of(server)) == kept + 3
        assert bytes_in(server) <= 2 << 20
        claimed = await store.claim(member(1, 10_001), 60.0)
        assert claimed is None, "a claim needs room too"
    finally:
        await store.client.close()


async def test_the_bytes_of_records_that_have_ended_are_free_again(url: str, server: RedisServer) -> None:
    store = store_of(url, total_bytes=64 << 10)
    try:
        for start in range(0, 2000, 200):
            await store.write([write(member(3, number), ttl=0.001) for number in range(start, start + 200)])
        for _ in range(10):  # each call subtracts some
            assert await store.claim(member(4, 1), 60.0) is not None
        await eventually(lambda: len(keys_of(server)) == 3)
        assert bytes_in(server) == 256
        assert server.ask(b"HKEYS", prefix() + b"bytes") != []
    finally:
        await store.client.close()


def prefix() -> bytes:
    return b"{kvferry:p}:"


def bytes_in(server: RedisServer) -> int:
    found = server.ask(b"HGET", prefix() + b"bytes", b"all")
    assert isinstance(found, bytes)
    return int(found)


async def test_a_write_that_is_repeated_overwrites_itself(url: str) -> None:
    store, name = store_of(url), member(1, 1)
    seal = PoolSeal(KEY).seal(name)
    try:
        for count_ in (3, 5):
            batch = TokenBatch.of([SampledToken(at) for at in range(count_)])
            await store.write([RecordWrite(name, 0, 60.0, {b"0": seal.sealed(b"0", batch)})])
        await store.write([RecordWrite(name, 0, 60.0, {b"3": seal.sealed(b"3", TokenBatch.of([SampledToken(3)]))})])
        await store.write([RecordWrite(name, 0, 60.0, {b"9": seal.sealed(b"9", TokenBatch.of([SampledToken(9)]))})])
        fields = await store.claim(name, 60.0)
        assert fields is not None
        assert [token.token_id for token in joined(batches_of(seal, fields)).tokens] == [0, 1, 2, 3, 4]
    finally:
        await store.client.close()


async def test_errors_name_the_server_and_no_password(server: RedisServer) -> None:
    store = store_of(f"redis://user:hunter2@127.0.0.1:{server.port}/0")
    try:
        with pytest.raises(StoreUnavailable, match=f"Redis at redis://127.0.0.1:{server.port}/0 failed") as found:
            await store.claim(member(1, 1), 60.0)
        assert "hunter2" not in found.value.message
    finally:
        await store.client.close()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://h/0", "not a Redis server"), ("redis://", "the host is missing"), ("redis://h/x", "database number"),
        ("redis://h:port/0", "malformed"), ("redis+unix://", "the socket is missing"), ("redis://u@h", "a user is set"),
        ("redis://h?ttl=3", "unknown option 'ttl'"), ("redis://h?cacert=x", "needs rediss"),
        ("redis://u:p@h?password_file=x", "both a password"), ("redis://h?password_file=/none", "cannot read"),
    ],
)  # fmt: skip
def test_a_wrong_url_is_refused_by_name(url: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as found:
        parse_state_url(url)
    assert found.value.field == "state"


def test_urls_have_hosts_sockets_and_passwords(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("secret\n")
    found = parse_state_url(f"rediss://me@[::1]:7000/2?password_file={tmp_path / 'p'}&cacert=ca.pem")
    assert (found.host, found.port, found.db, found.username, found.password) == ("::1", 7000, 2, "me", "secret")
    assert (found.is_tls, found.cacert, found.text) == (True, "ca.pem", "rediss://[::1]:7000/2")
    assert parse_state_url("redis+unix:///run/r.sock").socket == "/run/r.sock"
    assert "secret" not in repr(found)


async def test_state_without_a_pools_key_is_refused() -> None:
    with pytest.raises(UsageError, match="--tenant-key-file"):
        async with scripted_gateway(state=StateConfig("redis://127.0.0.1:1/0")):
            pass


async def test_the_permissions_of_the_documentation_suffice() -> None:
    page = (Path(__file__).parents[4] / "docs" / "resuming.md").read_text("utf-8")
    (rule,) = re.findall(r"ACL SETUSER NAME ([^`]*)`", page)
    with redis_server(acl=("default off", f"gateways {' '.join(rule.split())}")) as server:
        url = f"redis://gateways:PASSWORD@127.0.0.1:{server.port}/0"
        async with two_gateways(url) as (first, second):
            _, whole = await read(first, BODY)
            await drained(first)
            _, rest = await read(second, BODY, whole[50][0])
            assert text_of(whole[:51]) + text_of(rest) == text_of(whole)
            assert count(second, "reconnections", "replayed") == 1
