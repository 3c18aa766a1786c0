"""Causes of computed prompt tokens on real workers: in the record of each request, and equal at gateway and workers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import httpx
from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, running
from harness.servers.processes import a_worker as worker_process
from harness.servers.real_gateway import real_gateway
from harness.servers.worker_channel import TEST_KEYS
from prometheus_client.parser import text_string_to_metric_families

from kvferry.client import AsyncClient
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.decide.config import (
    CacheMapConfig,
    Endpoint,
    FleetConfig,
    GatewayConfig,
    HttpConfig,
    RoutingConfig,
)
from kvferry.gateway.gateway import Gateway

SECONDS = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NUM_TOKENS = 70
FULL_TOKENS = 64
WARM_UP_TOKENS = 17
SMALL = ("--kv-memory", "384KiB", "--max-model-len", "768")
"""48 pages, which do not hold two prompts of 320 tokens at the same time."""


def a_prompt(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return [(number * 31 + 7 * i) % 199 for i in range(num_tokens)]


def a_worker(role: str, *arguments: str) -> AbstractContextManager[RunningProcess]:
    return worker_process(role, "--metrics", "127.0.0.1:0", *arguments)


def endpoint(worker: RunningProcess) -> Endpoint:
    return Endpoint(str(worker.events["listening"]["grpc"]), str(worker.events["listening"]["admin"]))


@asynccontextmanager
async def a_gateway(
    both: Sequence[RunningProcess] = (),
    prefill: Sequence[RunningProcess] = (),
    decode: Sequence[RunningProcess] = (),
) -> AsyncIterator[Gateway]:
    config = GatewayConfig(
        fleet=FleetConfig(
            both=tuple(map(endpoint, both)),
            prefill=tuple(map(endpoint, prefill)),
            decode=tuple(map(endpoint, decode)),
            status_interval_seconds=0.05,
        ),
        routing=RoutingConfig(policy="round-robin"),
        http=HttpConfig(address="127.0.0.1:0"),
        grpc_address="127.0.0.1:0",
        admin_address="127.0.0.1:0",
        tenant_key=TEST_KEYS["KVFERRY_TENANT_KEY"].encode(),
        cache_map=CacheMapConfig(poll_seconds=0.02),
    )
    async with real_gateway(config) as gateway:
        addresses = [endpoint(worker).address for worker in (*both, *prefill, *decode)]
        await eventually(gateway, lambda: all(gateway.cache_map.state(a) is MapState.EXACT for a in addresses))
        yield gateway
        await asyncio.wait_for(gateway.dispatcher.wait_idle(), SECONDS)


async def eventually(gateway: Gateway, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        await gateway.fleet.wait_until(lambda _: holds())


async def record(
    gateway: Gateway, prompt: list[int], request_id: str, sampling: SamplingParams = GREEDY
) -> dict[str, Any]:
    """Send a prompt and return its entry in the journal."""
    async with AsyncClient(gateway.listening.grpc) as client:
        await client.complete(prompt, sampling, timeout=SECONDS, request_id=request_id)
    ((_, (entry,)),) = gateway.dispatcher.journal.find_any(request_id)  # type: ignore[arg-type]
    return entry


def causes(entry: dict[str, Any]) -> dict[str, int]:
    return {one["cause"]: one["num_tokens"] for one in entry["computed"]}


def at_gateway(gateway: Gateway, name: str = "kvferry_gateway_computed_tokens_total") -> dict[str, int]:
    """Return a counter of the gateway by its label, without zeros."""
    return {
        next(iter(sample.labels.values()), ""): int(sample.value)
        for family in gateway.instruments.registry.collect()
        for sample in family.samples
        if sample.name == name and sample.value
    }


async def at_workers(workers: Sequence[RunningProcess]) -> tuple[Counter[str], int, int]:
    """Return the workers' computed tokens by cause, their reused tokens, and all prompt tokens, without those of each
    worker's first request to itself."""
    computed, reused, prompt = Counter[str](), 0, 0
    for _ in workers:
        computed.subtract({"first_seen": WARM_UP_TOKENS - 1, "partial_block": 1})
        prompt -= WARM_UP_TOKENS
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        for worker in workers:
            page = await client.get(f"http://{worker.events['listening']['metrics']}/metrics")
            for family in text_string_to_metric_families(page.text):
                for sample in family.samples:
                    if sample.name == "kvferry_worker_computed_prompt_tokens_total" and sample.value:
                        computed[sample.labels["cause"]] += int(sample.value)
                    elif sample.name == "kvferry_worker_reused_prompt_tokens_total":
                        reused += int(sample.value)
                    elif sample.name == "kvferry_worker_prompt_tokens_total":
                        prompt += int(sample.value)
    return computed, reused, prompt


async def assert_equal_sums(gateway: Gateway, workers: Sequence[RunningProcess]) -> None:
    """Check that every prompt token of the workers has one source, and that the gateway counts the computed ones."""
    computed, reused, prompt = await at_workers(workers)
    assert sum(computed.values()) - computed["preempted"] + reused == prompt
    found = Counter(at_gateway(gateway))
    found["first_seen"] += found.pop("on_another_worker", 0)
    assert +found == +computed
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        (row,) = (await client.get(f"http://{gateway.listening.admin}/ledger")).json()["rows"]
        text = (await client.get(f"http://{gateway.listening.admin}/ledger?format=csv")).text
        assert (await client.get(f"http://{gateway.listening.admin}/ledger?format=xml")).status_code == 400
    assert (row["tenant"], row["adapter"], row["is_others"]) == ("", "", False)
    assert row["computed_tokens"] + row["computed_again_tokens"] == sum(computed.values())
    assert row["cached_tokens"] + row["loaded_tokens"] + row["handed_off_tokens"] == reused
    assert row["output_tokens"] == at_gateway(gateway, "kvferry_gateway_output_tokens_total").get("", 0)
    assert text.splitlines()[1] == ",".join(map(str, row.values())).replace("False", "false")
    await asyncio.to_thread(assert_workers_idle, [endpoint(worker).admin_address for worker in workers])


async def test_a_block_that_another_worker_has_is_not_new() -> None:
    with a_worker("both") as first, a_worker("both") as second:
        async with a_gateway([first, second]) as gateway:
            begin = await record(gateway, a_prompt(1), "begin")
            assert causes(begin) == {"first_seen": FULL_TOKENS, "partial_block": NUM_TOKENS - FULL_TOKENS}
            replicas = gateway.cache_map.replicas.values()
            await eventually(gateway, lambda: any(r.num_indexed >= FULL_TOKENS // 16 for r in replicas))
            other = await record(gateway, a_prompt(1), "other")
            assert other["routes"][0]["worker"] != begin["routes"][0]["worker"]
            assert causes(other) == {"on_another_worker": FULL_TOKENS, "partial_block": NUM_TOKENS - FULL_TOKENS}
            again = await record(gateway, a_prompt(1), "again")
            assert causes(again) == {"partial_block": NUM_TOKENS - FULL_TOKENS}
            scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
            assert causes(await record(gateway, a_prompt(1), "scored", scored)) == {
                "rows_requested": FULL_TOKENS, "partial_block": NUM_TOKENS - FULL_TOKENS,
            }  # fmt: skip
            await assert_equal_sums(gateway, [first, second])
            seen = at_gateway(gateway, "kvferry_gateway_seen_prompt_tokens_total")
            assert seen == {"new": FULL_TOKENS, "seen": 3 * FULL_TOKENS, "unnamed": 4 * (NUM_TOKENS - FULL_TOKENS)}
            with running("explain", "other", "--url", gateway.listening.http) as process:
                output = process.process.stdout
                assert output is not None
                printed = (await asyncio.to_thread(output.read)).decode()
            assert "computed   64 tokens: on_another_worker (blocks that another worker had)" in printed


async def test_evicted_and_loaded_prompts_of_a_pair_of_workers() -> None:
    with (
        a_worker("prefill", *SMALL, "--tier", "dram://?size=64MiB") as prefill,
        a_worker("decode", *SMALL) as decode,
    ):
        async with a_gateway(prefill=[prefill], decode=[decode]) as gateway:
            entries = [
                await record(gateway, a_prompt(number, 320), f"r{turn}-{number}")
                for turn in range(2)
                for number in range(4)
            ]
            for entry in entries:
                loaded = sum(kv["blocks_loaded"] * 16 for kv in entry["timing"]["kv"] if kv["source"] == "dram")
                assert sum(causes(entry).values()) + max(loaded, entry["cached_tokens"]) == 320, entry
            assert any(entry["cached_tokens"] for entry in entries[4:]), "objects were loaded from the tier"
            assert at_gateway(gateway).keys() >= {"first_seen", "partial_block", "evicted"}
            await assert_equal_sums(gateway, [prefill, decode])


async def test_a_request_whose_worker_dies_is_computed_again_elsewhere() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    with a_worker("both") as first, a_worker("both") as second:
        workers = {endpoint(worker).address: worker for worker in (first, second)}
        async with a_gateway([first, second]) as gateway, AsyncClient(gateway.listening.grpc) as client:
            num_chunks = 0
            async for _ in client.generate(a_prompt(3), long, timeout=SECONDS, request_id="moved"):
                num_chunks += 1
                if num_chunks == 3:
                    (running_now,) = [view for view in gateway.fleet.views() if view.as_replica().load]
                    dead = workers.pop(running_now.as_replica().address)
                    dead.process.kill()
            ((_, (entry,)),) = gateway.dispatcher.journal.find_any("moved")  # type: ignore[arg-type]
            assert entry["timing"]["resumed"] == 1
            again = Counter(causes(entry))
            again.subtract({"first_seen": FULL_TOKENS, "partial_block": NUM_TOKENS - FULL_TOKENS})
            again = +again
            assert set(again) <= {"resumed", "partial_block"}
            assert (again["resumed"] >= FULL_TOKENS, again.total()) == (True, NUM_TOKENS), entry
            (left,) = workers.values()
            computed, reused, prompt = await at_workers([left])
            assert (+computed, reused, prompt) == (Counter(again), 0, NUM_TOKENS)


async def test_vectors_have_causes_too() -> None:
    with a_worker("both") as worker:
        async with a_gateway([worker]) as gateway, AsyncClient(gateway.listening.grpc) as client:
            for _ in range(2):
                await client.embed([a_prompt(5)], timeout=SECONDS)
            await assert_equal_sums(gateway, [worker])
            assert at_gateway(gateway)["partial_block"] == 2 * (NUM_TOKENS - FULL_TOKENS)
