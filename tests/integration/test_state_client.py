"""Many calls at a time at the Redis server that gateways share."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.servers.redis_server import RedisServer, redis_server

from kvferry.core.clock import SystemClock
from kvferry.gateway.state.blocking_client import BlockingStateClient
from kvferry.gateway.state.state_client import StateClient, StoreUnavailable
from kvferry.gateway.state.state_url import StateServer, parse_state_url

SCRIPT = "return {redis.call('INCR', KEYS[1])}"
CALLS = 300


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def url_of(server: RedisServer) -> StateServer:
    return parse_state_url(f"redis://127.0.0.1:{server.port}/0")


async def test_more_calls_than_connections_wait_for_one(server: RedisServer) -> None:
    outcomes = list[str]()
    client = StateClient(url_of(server), lambda _, outcome: outcomes.append(outcome))
    try:
        script = client.script("test", SCRIPT)
        replies = await asyncio.gather(*(script.run([b"n"], [], 60.0) for _ in range(CALLS)))
    finally:
        await client.close()
    assert sorted(reply[0] for reply in replies) == list(range(1, CALLS + 1))
    assert outcomes == ["ok"] * CALLS


async def test_a_call_that_waits_for_a_connection_has_its_own_time_limit(server: RedisServer) -> None:
    client = StateClient(url_of(server))
    try:
        script = client.script("test", SCRIPT)
        await script.run([b"m"], [], 60.0)
        server.ask(b"CLIENT", b"PAUSE", b"60000", b"WRITE")
        held = [asyncio.create_task(script.run([b"m"], [], 60.0)) for _ in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable):
            await script.run([b"m"], [], 0.01)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        server.ask(b"CLIENT", b"UNPAUSE")
        replies = await asyncio.gather(*(script.run([b"m"], [], 60.0) for _ in range(32)))
        assert len({reply[0] for reply in replies}) == 32, "connections of cancelled calls are not lost"
    finally:
        await client.close()


def test_more_threads_than_connections_wait_for_one(server: RedisServer) -> None:
    server.ask(b"DEL", b"n")
    client, together = BlockingStateClient(url_of(server), SystemClock(), "test"), threading.Barrier(40)
    script = client.register(SCRIPT)

    def call(_: int) -> int:
        together.wait(60)
        return int(client.run(script, [b"n"], [])[0])

    with ThreadPoolExecutor(40) as threads:
        found = list(threads.map(call, range(40)))
    client.close()
    assert sorted(found) == list(range(1, 41))
