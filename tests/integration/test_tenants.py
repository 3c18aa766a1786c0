"""Tenants of a real stack: one far above its quota, one that fills the queue, and clients that cancel while queued."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.servers.processes import running

from kvferry.client import Client
from kvferry.core.errors import Overloaded
from kvferry.core.sampling import SamplingParams

SECONDS = 120.0
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error")
ENGINE = ("--model", "tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--max-num-seqs", "2")


def hashed(key: str) -> str:
    """Return the hash that `kvferry key hash` prints."""
    command = [sys.executable, "-m", "kvferry.cli.main", "key", "hash"]
    done = subprocess.run(command, input=key + "\n", capture_output=True, text=True, check=True, timeout=SECONDS)
    assert key not in done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    file: Path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(
        f'[tenants.greedy]\nkeys = ["{hashed("key-of-the-greedy")}"]\nconcurrent_requests = 1\n'
        f'[tenants.flood]\nkeys = ["{hashed("key-of-the-flood")}"]\n'
        f'[tenants.calm]\nkeys = ["{hashed("key-of-the-calm-one")}"]\n'
    )
    with running("up", *ENGINE, "--tenants", str(file), "--json", *ADDRESSES) as process:
        yield dict(process.wait_for("ready"))
        assert process.stop() == 0


def client(stack: dict[str, Any], key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=f"http://{stack['http']}", timeout=SECONDS, headers=headers, limits=limits)


async def ask(http: httpx.AsyncClient, tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
    return await http.post("/v1/completions", json=body)


async def flow(stack: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=SECONDS, verify=False) as http:
        found: dict[str, Any] = (await http.get(f"http://{stack['admin']}/fleet")).json()["flow"]
    return found


async def flow_is(stack: dict[str, Any], **expected: int) -> None:
    async with asyncio.timeout(SECONDS):
        while not expected.items() <= (found := await flow(stack)).items():
            assert found["dispatched"] <= 2, "the workers have room for two sequences"


async def flow_has(stack: dict[str, Any], queued: int) -> None:
    async with asyncio.timeout(SECONDS):
        while (await flow(stack))["queued"] < queued:
            continue


async def test_a_tenant_at_many_times_its_quota_does_not_delay_another(stack):
    async with client(stack, "key-of-the-greedy") as greedy, client(stack, "key-of-the-calm-one") as calm:
        is_over = asyncio.Event()
        statuses: list[int] = []

        async def hammer() -> None:
            while not is_over.is_set():
                statuses.append((await ask(greedy, 200)).status_code)

        hammers = [asyncio.create_task(hammer()) for _ in range(20)]
        waits: list[float] = []
        for _ in range(10):
            answer = await ask(calm, 8)
            assert answer.status_code == 200, answer.text
            waits.append(answer.json()["kvferry"]["queue_seconds"])
            assert (await flow(stack))["dispatched"] <= 2
        is_over.set()
        await asyncio.gather(*hammers)
        assert set(statuses) == {200, 429}
        assert statuses.count(429) > statuses.count(200), "most of the tenant's requests exceeded its quota"
        assert sorted(waits)[5] < 0.25, "the other tenant did not wait for room"
    await flow_is(stack, queued=0, dispatched=0)


async def test_a_tenant_that_fills_the_queue_does_not_delay_another(stack):
    async with client(stack, "key-of-the-flood") as flood, client(stack, "key-of-the-calm-one") as calm:
        many = [asyncio.create_task(ask(flood, 100)) for _ in range(40)]
        await flow_is(stack, dispatched=2)
        await flow_has(stack, 30)
        assert (await ask(calm, 8)).status_code == 200
        left = sum(not one.done() for one in many)
        assert left >= 20, "in order of arrival, all of these would have been served first"
        assert {(await one).status_code for one in many} == {200}
    await flow_is(stack, queued=0, dispatched=0)


async def test_clients_that_leave_the_queue_free_it_at_once(stack):
    async with client(stack, "key-of-the-flood") as flood:
        tasks = [asyncio.create_task(ask(flood, 1900)) for _ in range(12)]
        await flow_is(stack, queued=10, dispatched=2)
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await flow_is(stack, queued=0, dispatched=0)


def test_a_quota_is_refused_over_grpc_with_a_time_to_retry(stack):
    with Client(str(stack["grpc"]), api_key="key-of-the-greedy", timeout=SECONDS) as greedy:
        stream = greedy.generate("Hello", SamplingParams(max_tokens=1900, ignore_eos=True))
        next(stream)
        with pytest.raises(Overloaded, match="concurrent_requests = 1") as over:
            greedy.complete("Hello", SamplingParams(max_tokens=2))
        assert over.value.retry_after_seconds
        stream.close()
