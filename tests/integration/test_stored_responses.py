"""Stored responses: one suite over the store in memory and the one in a real Redis, and what only the latter has:
several gateways, leases, sealed values, and a server that is full, a replica, gone, or written to by others."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness.servers.redis_server import RedisServer, redis_server
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.gateway.decide.config import StoreLimits
from kvferry.gateway.http.responses.memory_store import MemoryResponses
from kvferry.gateway.http.responses.shared_store import SharedResponses
from kvferry.gateway.http.responses.store import (
    LEASE_SECONDS,
    ConversationTooLong,
    Earlier,
    NewResponse,
    ResponseNotFound,
    ResponseStore,
    ResponsesUnavailable,
)
from kvferry.gateway.state.pool_seal import PoolSeal
from kvferry.gateway.state.state_client import StateClient
from kvferry.gateway.state.state_url import parse_state_url

LIMITS = StoreLimits(tenant_bytes=8000, total_bytes=20000, seconds=60.0, turns=4, conversation_bytes=3000)
EVENT = b"event: response.created\n\n"


@dataclass
class Stores:
    """Opens stores that share their responses, if their kind does."""

    clock: ManualClock
    open: Callable[[str], ResponseStore]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(policy="noeviction") as running:
        yield running


@asynccontextmanager
async def shared(
    server: RedisServer, limits: StoreLimits = LIMITS, reasons: list[str] | None = None
) -> AsyncIterator[Stores]:
    server.ask(b"FLUSHALL")
    clock, clients = ManualClock(), []

    def opened(gateway: str, key: bytes = b"k" * 32) -> SharedResponses:
        clients.append(StateClient(parse_state_url(f"redis://127.0.0.1:{server.port}/0")))
        heard = (lambda _: None) if reasons is None else reasons.append
        return SharedResponses(
            clients[-1], PoolSeal(key), gateway, limits, clock, on_failure=heard,
            wall_ms=lambda: round(1e12 + 1e3 * clock.monotonic()),
        )  # fmt: skip

    try:
        yield Stores(clock, opened)
    finally:
        for client in clients:
            await client.close()


@pytest.fixture
def reasons() -> list[str]:
    return []


@pytest.fixture
async def redis_stores(server: RedisServer, reasons: list[str]) -> AsyncIterator[Stores]:
    async with shared(server, reasons=reasons) as stores:
        yield stores


@pytest.fixture(params=["memory", "redis"])
async def stores(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Stores]:
    if request.param == "memory":
        clock = ManualClock()
        yield Stores(clock, lambda _: MemoryResponses(LIMITS, clock))
        return
    async with shared(server) as each:
        yield each


@pytest.fixture
def store(stores: Stores) -> ResponseStore:
    return stores.open("a")


def new(text: str = "x", size: int = 10, earlier: Earlier | None = None, **more: Any) -> NewResponse:
    """A response whose input and output say `text`."""
    items, output = json.dumps([f"i{text}" + "." * size]), json.dumps([f"o{text}" + "." * size])
    response = f'{{"id":"{text}","status":"completed","output":{output}}}'
    return NewResponse(response.encode(), items.encode(), output.encode(), earlier, **more)


def said(items: Any) -> list[str]:
    return [json.loads(each)[0].rstrip(".") for each in items]


async def conversation(store: ResponseStore, tenant: str = "t", *, turns: int = 3, size: int = 10) -> None:
    """Store the responses 1, 2, ..., each of which continues the one before it."""
    earlier = None
    for number in range(1, turns + 1):
        assert await store.put(tenant, str(number), new(str(number), size, earlier))
        if number < turns:
            earlier, _ = await store.continued(tenant, str(number), "f")


# -- both ----------------------------------------------------------------------------------------------------------


async def test_a_response_is_its_tenants_only(store: ResponseStore) -> None:
    assert await store.put("a", "x", new(events=(EVENT,)))
    kept = await store.read("a", "x", "f")
    assert (kept.response, kept.own_items, kept.events) == (new().response, new().items, (EVENT,))
    messages = set()
    for tenant, name in (("b", "x"), ("a", "y"), ("", "x"), ("a", "\udc80\0")):
        for use in (store.read, store.continued):
            with pytest.raises(ResponseNotFound) as missing:
                await use(tenant, name, "previous_response_id")
            assert missing.value.field == "previous_response_id"
            messages.add(missing.value.message.replace("'y'", "'x'").replace(repr("\udc80\0"), "'x'"))
        with pytest.raises(ResponseNotFound):
            await store.delete(tenant, name)
        assert not await store.cancel(tenant, name)
    assert len([each for each in messages if "'x'" in each]) == 1, "another tenant's response reads as a missing one"
    await store.delete("a", "x")
    with pytest.raises(ResponseNotFound):
        await store.delete("a", "x")


async def test_a_conversation_is_read_as_a_whole(store: ResponseStore) -> None:
    await conversation(store)
    _, items = await store.continued("t", "3", "f")
    assert said(items) == ["i1", "o1", "i2", "o2", "i3", "o3"]
    _, items = await store.continued("t", "1", "f")
    assert said(items) == ["i1", "o1"]


async def test_a_response_expires_after_its_last_use(stores: Stores) -> None:
    store = stores.open("a")
    await store.put("a", "x", new())
    for _ in range(2):
        stores.clock.advance(59)
        await store.read("a", "x", "f")
    stores.clock.advance(61)
    with pytest.raises(ResponseNotFound):
        await store.read("a", "x", "f")


async def test_a_deleted_response_is_gone_and_its_continuations_keep_their_conversation(stores: Stores) -> None:
    store = stores.open("a")
    await conversation(store)
    await store.delete("t", "1")
    await store.delete("t", "2")
    for name in "12":
        for use in (store.read, store.continued):
            with pytest.raises(ResponseNotFound):
                await use("t", name, "f")
    _, items = await store.continued("t", "3", "f")
    assert said(items) == ["i1", "o1", "i2", "o2", "i3", "o3"]
    await store.delete("t", "3")
    with pytest.raises(ResponseNotFound):
        await store.continued("t", "3", "f")


async def test_a_response_deleted_while_it_is_continued_stays_for_the_next_one(store: ResponseStore) -> None:
    await store.put("t", "1", new("1"))
    earlier, _ = await store.continued("t", "1", "f")
    await store.delete("t", "1")
    assert await store.put("t", "2", new("2", 10, earlier))
    _, items = await store.continued("t", "2", "f")
    assert said(items) == ["i1", "o1", "i2", "o2"]


async def test_the_turns_and_bytes_of_a_conversation_are_bounded(store: ResponseStore) -> None:
    await conversation(store, turns=4)
    with pytest.raises(ConversationTooLong, match="4 turns"):
        await store.continued("t", "4", "f")
    await store.read("t", "4", "f")
    await store.put("u", "1", new(size=1600))
    with pytest.raises(ConversationTooLong, match="1 turns and 32"):
        await store.continued("u", "1", "f")


async def test_the_least_recently_used_is_evicted(stores: Stores) -> None:
    store = stores.open("a")
    for number in range(1, 7):
        assert await store.put("t", str(number), new(str(number), 300))
        stores.clock.advance(0.01)
        await store.read("t", "1", "f")
        stores.clock.advance(0.01)
    with pytest.raises(ResponseNotFound):
        await store.read("t", "2", "f")
    for name in "16":
        await store.read("t", name, "f")


async def test_the_items_of_an_evicted_turn_stay_with_later_ones(stores: Stores) -> None:
    store = stores.open("a")
    await conversation(store, turns=2, size=200)
    for number in range(10, 20):
        await store.continued("t", "2", "f")
        stores.clock.advance(0.01)
        assert await store.put("t", str(number), new(str(number), 200))
    _, items = await store.continued("t", "2", "f")
    assert said(items) == ["i1", "o1", "i2", "o2"]


async def test_a_response_beyond_the_bound_is_not_kept(store: ResponseStore) -> None:
    assert await store.put("t", "small", new())
    assert not await store.put("t", "x", new(size=9000))
    with pytest.raises(ResponseNotFound):
        await store.read("t", "x", "f")


async def test_all_tenants_together_are_bounded(store: ResponseStore) -> None:
    for number in range(12):
        assert await store.put(f"t{number}", "x", new(size=700))
    with pytest.raises(ResponseNotFound):
        await store.read("t0", "x", "f")
    await store.read("t11", "x", "f")


async def test_a_response_in_the_background_is_read_when_it_has_ended(store: ResponseStore) -> None:
    assert await store.begin("t", "x", new("begun"))
    kept = await store.read("t", "x", "f")
    assert (kept.is_running, json.loads(kept.response)["id"]) == (True, "begun")
    with pytest.raises(ResponseNotFound, match="still being created"):
        await store.continued("t", "x", "f")
    assert not await store.renew([("t", "x")])
    assert await store.put("t", "x", new("ended", events=(EVENT,)), is_background=True)
    kept = await store.read("t", "x", "f")
    assert (kept.is_running, kept.events, json.loads(kept.response)["id"]) == (False, (EVENT,), "ended")
    _, items = await store.continued("t", "x", "f")
    assert said(items) == ["iended", "oended"]


async def test_a_running_response_that_is_deleted_ends_and_is_not_kept(store: ResponseStore) -> None:
    await store.begin("t", "x", new())
    await store.delete("t", "x")
    assert list(await store.renew([("t", "x")])) == [("t", "x")]
    assert not await store.put("t", "x", new(), is_background=True)
    with pytest.raises(ResponseNotFound):
        await store.read("t", "x", "f")


# -- several gateways ----------------------------------------------------------------------------------------------


async def test_a_response_is_read_continued_and_deleted_at_another_gateway(redis_stores: Stores) -> None:
    one, other = redis_stores.open("a"), redis_stores.open("b")
    await one.put("t", "1", new("1"))
    earlier, items = await other.continued("t", "1", "f")
    assert said(items) == ["i1", "o1"]
    await other.put("t", "2", new("2", 10, earlier))
    assert said((await one.continued("t", "2", "f"))[1]) == ["i1", "o1", "i2", "o2"]
    await one.delete("t", "2")
    with pytest.raises(ResponseNotFound):
        await other.read("t", "2", "f")


async def test_a_response_whose_gateway_is_lost_has_failed_by_name(redis_stores: Stores, reasons: list[str]) -> None:
    one, other = redis_stores.open("a"), redis_stores.open("b")
    await one.begin("t", "x", new())
    redis_stores.clock.advance(LEASE_SECONDS - 1)
    await one.renew([("t", "x")])
    redis_stores.clock.advance(LEASE_SECONDS - 1)
    assert (await other.read("t", "x", "f")).is_running
    redis_stores.clock.advance(2)
    kept = await other.read("t", "x", "f")
    whole = json.loads(kept.response)
    assert (whole["status"], whole["error"]["code"], kept.is_running) == ("failed", "server_error", False)
    assert "has ended before it was complete" in whole["error"]["message"]
    # What was read is final: the first gateway, which had only been slow, does not replace it.
    assert list(await one.renew([("t", "x")])) == [("t", "x")]
    assert not await one.put("t", "x", new("late"), is_background=True)
    assert reasons == ["fenced"]
    assert (await one.read("t", "x", "f")).response == kept.response
    assert not await other.cancel("t", "x")
    await other.delete("t", "x")


async def test_a_response_is_cancelled_at_another_gateway(redis_stores: Stores) -> None:
    one, other = redis_stores.open("a"), redis_stores.open("b")
    await one.begin("t", "x", new())
    await one.begin("t", "y", new())
    assert await other.cancel("t", "x")
    assert list(await one.renew([("t", "y"), ("t", "x")])) == [("t", "x")]
    assert not await other.put("t", "x", new(), is_background=True), "only its gateway ends it"
    assert await one.put("t", "x", new("cancelled"), is_background=True)
    assert not (await other.read("t", "x", "f")).is_running


async def test_a_conversation_whose_turn_is_gone_is_refused_by_name(server: RedisServer, redis_stores: Stores) -> None:
    store, seal = redis_stores.open("a"), PoolSeal(b"k" * 32)
    await conversation(store)
    name = b"%s:%s" % (seal.tenant("t"), seal.response("t", "2"))
    server.ask(b"DEL", seal.prefix + b"r:" + name)
    await store.read("t", "3", "f")
    with pytest.raises(ResponseNotFound, match="not stored as a whole"):
        await store.continued("t", "3", "f")


async def test_values_that_were_moved_or_are_another_pools_do_not_open(
    server: RedisServer, redis_stores: Stores, reasons: list[str]
) -> None:
    store, seal = redis_stores.open("a"), PoolSeal(b"k" * 32)

    def key(tenant: str, name: str) -> bytes:
        return seal.prefix + b"r:%s:%s" % (seal.tenant(tenant), seal.response(tenant, name))

    await conversation(store, "t")
    await store.put("u", "secret", new("secret"))
    foreign = redis_stores.open("b", b"z" * 32)  # type: ignore[call-arg]
    with pytest.raises(ResponseNotFound):
        await foreign.read("t", "1", "f")
    assert reasons == []
    # Another tenant's turn in front of a conversation, a turn left out, and values under other keys.
    for parent in (key("u", "secret"), key("t", "1")):
        server.ask(b"HSET", key("t", "3"), b"p", parent[len(seal.prefix) + 2 :])
        with pytest.raises(ResponseNotFound, match="not stored as a whole"):
            await store.continued("t", "3", "f")
    for field in (b"i", b"o"):
        await store.put("t", "1", new("1"))
        server.ask(b"HSET", key("t", "1"), field, bytes(server.ask(b"HGET", key("u", "secret"), field)))  # type: ignore[call-overload]
        with pytest.raises(ResponseNotFound):
            await store.read("t", "1", "f")
    assert set(reasons) == {"foreign"}


async def test_what_others_write_costs_no_tenant_its_responses(server: RedisServer, redis_stores: Stores) -> None:
    store, root = redis_stores.open("a"), PoolSeal(b"k" * 32).prefix + b"r:"
    seal = PoolSeal(b"k" * 32)
    for name in (b"ends", b"bytes", b"u:" + seal.tenant("t")):
        server.ask(b"SET", root + name, b"strange")
        assert await store.put("t", "x", new())
        await store.read("t", "x", "f")
        await store.delete("t", "x")
    name = b"%s:%s" % (seal.tenant("t"), seal.response("t", "y"))
    server.ask(b"SET", root + name, b"strange")
    with pytest.raises(ResponseNotFound):
        await store.read("t", "y", "f")
    assert await store.put("t", "y", new())
    server.ask(b"ZADD", root + b"ends", b"1", b"strange")
    assert await store.put("t", "z", new())
    # Counters that say more than there is do not keep new responses out.
    server.ask(b"HSET", root + b"bytes", b"all", b"999999", b"t:" + seal.tenant("v"), b"999999")
    assert await store.put("v", "x", new())
    await store.read("v", "x", "f")


async def test_nothing_is_left_of_deleted_and_expired_responses(server: RedisServer, redis_stores: Stores) -> None:
    store = redis_stores.open("a")
    await conversation(store)
    await store.put("u", "x", new())
    for name in "132":
        await store.delete("t", name)
    redis_stores.clock.advance(1000)
    with pytest.raises(ResponseNotFound):
        await store.read("u", "x", "f")
    assert server.ask(b"DBSIZE") == 0


# -- a server that does not do what it should ----------------------------------------------------------------------


async def test_a_full_server_refuses_to_store_and_answers_reads(
    server: RedisServer, redis_stores: Stores, reasons: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = redis_stores.open("a")
    await conversation(store)
    before = server.ask(b"DBSIZE")
    server.ask(b"CONFIG", b"SET", b"maxmemory", b"1")
    try:
        with pytest.raises(ResponsesUnavailable, match=r"OOM|OutOfMemory") as refused:
            await store.put("t", "x", new())
        assert (refused.value.http_status, refused.value.retry_after_seconds) == (503, 1.0)
        assert server.ask(b"DBSIZE") == before
        store.check()
        await store.read("t", "1", "f")
        await store.continued("t", "3", "f")
        await store.delete("t", "3")
    finally:
        server.ask(b"CONFIG", b"SET", b"maxmemory", b"1gb")
    assert await store.put("t", "x", new())
    assert reasons == ["unreachable"]
    server.ask(b"CONFIG", b"SET", b"maxmemory", b"1")
    try:
        with pytest.raises(ResponsesUnavailable):
            await store.put("t", "y", new())
    finally:
        server.ask(b"CONFIG", b"SET", b"maxmemory", b"1gb")
    assert caplog.text.count("responses are not stored") == 1, "one line a minute"
    assert reasons == ["unreachable"] * 2


async def test_a_replica_is_named(server: RedisServer, redis_stores: Stores) -> None:
    store = redis_stores.open("a")
    server.ask(b"REPLICAOF", b"127.0.0.1", b"1")
    try:
        with pytest.raises(ResponsesUnavailable, match=r"READONLY|ReadOnly"):
            await store.put("t", "x", new())
        redis_stores.clock.advance(1)
        with pytest.raises(ResponsesUnavailable):
            await store.read("t", "x", "f")
    finally:
        server.ask(b"REPLICAOF", b"NO", b"ONE")


async def test_many_calls_at_once_share_the_connections(redis_stores: Stores) -> None:
    store = redis_stores.open("a")
    kept = await asyncio.gather(*(store.put(f"t{number}", "x", new()) for number in range(200)))
    assert all(kept), "of responses of the same millisecond, the new one stays"


async def test_a_conversation_at_its_bound_is_read_with_one_call(server: RedisServer) -> None:
    async with shared(server, StoreLimits()) as stores:
        store = stores.open("a")
        await conversation(store, turns=512)
        with pytest.raises(ConversationTooLong, match="512 turns"):
            await store.continued("t", "512", "f")
        _, items = await store.continued("t", "511", "f")
        assert said(items) == [f"{kind}{number}" for number in range(1, 512) for kind in "io"]
        for number in range(1, 512):
            await store.delete("t", str(number))
        assert (await store.read("t", "512", "f")).own_items == new("512").items
        await store.delete("t", "512")
    # What was continued is kept for the requests that continue it, and nothing longer.
    assert server.ask(b"ZCARD", PoolSeal(b"k" * 32).prefix + b"r:ends") == 512 - 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "continue", "begin", "end", "read", "delete", "wait"]),
            st.sampled_from(["a", "b", "c"]),
            st.integers(0, 5),
            st.integers(1, 1500),
        ),
        max_size=40,
    )
)
def test_counters_are_those_of_what_is_kept(server: RedisServer, steps: list[tuple[str, str, int, int]]) -> None:
    async def run() -> None:
        async with shared(server, replace(LIMITS, seconds=30.0)) as stores:
            await _apply(stores, steps)
            _check_counters(server)

    asyncio.run(run())


async def _apply(stores: Stores, steps: list[tuple[str, str, int, int]]) -> None:
    store = stores.open("a")
    for action, tenant, number, size in steps:
        name = str(number)
        try:
            if action == "put":
                await store.put(tenant, name, new(name, size))
            elif action == "continue":
                earlier, _ = await store.continued(tenant, name, "f")
                await store.put(tenant, f"{size % 6}", new(name, size, earlier if size % 6 != number else None))
            elif action == "begin":
                await store.begin(tenant, f"run{number}", new(name, size))
            elif action == "end":
                await store.put(tenant, f"run{number}", new(name, size), is_background=True)
            elif action == "read":
                await store.read(tenant, name, "f")
            elif action == "delete":
                await store.delete(tenant, name)
            else:
                stores.clock.advance(size / 60)
        except (ResponseNotFound, ConversationTooLong):
            pass


def _pairs(server: RedisServer, *words: bytes) -> dict[bytes, bytes]:
    found: Any = server.ask(*words)
    return dict(zip(found[::2], found[1::2], strict=True))


def _check_counters(server: RedisServer) -> None:
    root = PoolSeal(b"k" * 32).prefix + b"r:"
    counted = _pairs(server, b"HGETALL", root + b"bytes")
    counted = {name: value for name, value in counted.items() if value != b"0"}
    members: Any = server.ask(b"ZRANGE", root + b"ends", b"0", b"-1")
    keys: Any = server.ask(b"KEYS", root + b"????????????????:*")
    assert sorted(keys) == sorted(root + each for each in members)
    total = 0
    for tenant in {each[:16] for each in members}:
        own = sum(int(counted[b"s:" + each]) for each in members if each[:16] == tenant)
        assert int(counted[b"t:" + tenant]) == own <= LIMITS.tenant_bytes
        assert (
            sorted(server.ask(b"ZRANGE", root + b"u:" + tenant, b"0", b"-1"))
            == sorted(  # type: ignore[call-overload]
                each for each in members if each[:16] == tenant
            )
        )
        total += own
    assert int(counted.get(b"all", 0)) == total <= LIMITS.total_bytes
    assert len(counted) == len(members) + len({each[:16] for each in members}) + bool(members)
