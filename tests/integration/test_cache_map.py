"""The gateway's map of real workers' caches: requests are routed to the worker with their prompt, with the reason."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from harness.idle import assert_workers_idle
from harness.servers.processes import RunningProcess, a_worker, running
from harness.servers.real_gateway import real_gateway
from harness.servers.worker_channel import TEST_KEYS

from kvferry.client import AsyncClient
from kvferry.core.hashing import BlockNamers
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.decide.config import CacheMapConfig, Endpoint, FleetConfig, GatewayConfig, HttpConfig
from kvferry.gateway.decide.routing.cached_prefix import prefix_key
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.routes import RouteRequest
from kvferry.gateway.gateway import Gateway

SECONDS = 60.0
TENANT_KEY = TEST_KEYS["KVFERRY_TENANT_KEY"].encode()
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NUM_TOKENS = 70
CACHED_TOKENS = 64


def a_prompt(number: int) -> list[int]:
    return [(number * 31 + 7 * i) % 199 for i in range(NUM_TOKENS)]


def endpoint(worker: RunningProcess) -> Endpoint:
    return Endpoint(str(worker.events["listening"]["grpc"]), str(worker.events["listening"]["admin"]))


@asynccontextmanager
async def a_gateway(*workers: RunningProcess, tenant_key: bytes = TENANT_KEY) -> AsyncIterator[Gateway]:
    config = GatewayConfig(
        fleet=FleetConfig(both=tuple(map(endpoint, workers)), status_interval_seconds=0.05),
        http=HttpConfig(address="127.0.0.1:0"),
        grpc_address="127.0.0.1:0",
        tenant_key=tenant_key,
        cache_map=CacheMapConfig(audit_seconds=0.2, poll_seconds=0.02),
    )
    async with real_gateway(config) as gateway:
        yield gateway
        await asyncio.wait_for(gateway.dispatcher.wait_idle(), SECONDS)


async def eventually(gateway: Gateway, holds: Callable[[], bool]) -> None:
    """Wait until `holds()` is true, evaluated after every status poll of a worker."""
    async with asyncio.timeout(SECONDS):
        await gateway.fleet.wait_until(lambda _: holds())


async def request_entry(gateway: Gateway, prompt: list[int], request_id: str) -> dict[str, object]:
    """Send a prompt and return the journal's entry."""
    async with AsyncClient(gateway.listening.grpc) as client:
        await client.complete(prompt, GREEDY, timeout=SECONDS, request_id=request_id)
    ((_, (entry,)),) = gateway.dispatcher.journal.find_any(request_id)  # type: ignore[arg-type]
    return entry


def rendezvous(gateway: Gateway, prompt: list[int]) -> str:
    """Return the address of the worker that would be chosen without a map."""
    key = prefix_key(BlockNamers(TENANT_KEY), "", prompt, 4)
    chosen = PrefixHash(1.25).one(RouteRequest(key), gateway.fleet.candidates().both)
    assert chosen is not None
    return chosen.preferred


async def test_a_prompt_is_routed_to_the_worker_with_its_cache_also_after_a_restart() -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(a_worker("both")) for _ in range(2)]
        addresses = [endpoint(worker).address for worker in workers]
        async with a_gateway(*workers) as gateway:
            cache_map = gateway.cache_map
            await eventually(gateway, lambda: all(cache_map.state(a) is MapState.EXACT for a in addresses))
            prompts = [prompt for prompt in map(a_prompt, range(64)) if rendezvous(gateway, prompt) == addresses[0]]
            # Send the prompt through another gateway that is configured with the second worker only.
            async with a_gateway(workers[1]) as other:
                await request_entry(other, prompts[0], "elsewhere")
            blocks = cache_map.replicas[addresses[1]]
            await eventually(gateway, lambda: blocks.num_indexed >= 1 + CACHED_TOKENS // 16)

            entry = await request_entry(gateway, prompts[0], "warm")
            (note,) = entry["routes"]  # type: ignore[misc]
            assert note["worker"] == note["preferred"] == addresses[1]
            assert (note["cached_tokens"], note["map_state"]) == (CACHED_TOKENS, "exact")
            assert entry["cached_tokens"] == CACHED_TOKENS, "the prediction equals the tokens that were cached"
            first, second = note["candidates"]
            assert (first["worker"], first["confirmed_tokens"], first["basis"]) == (
                addresses[1],
                CACHED_TOKENS,
                "exact",
            )
            assert (second["worker"], second["cached_tokens"], second["map_state"]) == (addresses[0], 0, "exact")
            with running("explain", "warm", "--url", gateway.listening.http) as process:
                output = process.process.stdout
                assert output is not None
                printed = (await asyncio.to_thread(output.read)).decode()
            assert f"{addresses[1]}: {CACHED_TOKENS} tokens cached (its map is exact), load 0" in printed

            cold = await request_entry(gateway, prompts[1], "cold")
            assert cold["routes"][0]["worker"] == addresses[0]  # type: ignore[index]
            assert cold["cached_tokens"] == 0
            await eventually(gateway, lambda: gateway.cache_feeds.audits["match"] > 2)
            assert gateway.cache_feeds.audits["mismatch"] == gateway.cache_feeds.audits["stalled"] == 0

            # Restart the second worker at the same address, with an empty cache.
            workers[1].process.kill()
            workers[1].process.wait(SECONDS)
            await eventually(gateway, lambda: cache_map.state(addresses[1]) is MapState.BLIND)
            listen = endpoint(workers[1])
            ports = ("--listen", listen.address, "--admin", listen.admin_address)
            workers[1] = await asyncio.to_thread(stack.enter_context, a_worker("both", *ports))
            async with asyncio.timeout(SECONDS):
                await gateway.fleet.wait_until(lambda fleet: all(view.takes_work for view in fleet.views()))
            await eventually(gateway, lambda: cache_map.state(addresses[1]) is MapState.EXACT)
            again = await request_entry(gateway, prompts[0], "after")
            (note,) = again["routes"]  # type: ignore[misc]
            assert (note["worker"], note["cached_tokens"]) == (addresses[0], 0)
            assert again["cached_tokens"] == 0
            page = gateway.instruments.registry.get_sample_value
            labels = {"basis": "exact", "outcome": "equal"}
            assert page("kvferry_gateway_cache_predictions_total", labels) == 3
            assert page("kvferry_gateway_cache_map_state", {"worker": addresses[1], "state": "exact"}) == 1
            json.dumps(again)
        await asyncio.to_thread(assert_workers_idle, [endpoint(worker).admin_address for worker in workers])


async def test_another_tenant_key_is_noticed_and_history_serves_instead() -> None:
    with a_worker("both") as first, a_worker("both") as second:
        async with a_gateway(first, second, tenant_key=b"another key") as gateway:
            replicas = gateway.cache_map.replicas
            await eventually(
                gateway, lambda: len(replicas) == 2 and all("--tenant-key-file" in r.why for r in replicas.values())
            )
            begin = await request_entry(gateway, a_prompt(1), "one")
            again = await request_entry(gateway, a_prompt(1), "two")
            assert again["cached_tokens"] == CACHED_TOKENS
            (note,) = again["routes"]  # type: ignore[misc]
            assert note["worker"] == begin["routes"][0]["worker"]  # type: ignore[index]
            assert (note["map_state"], note["cached_tokens"]) == ("blind", CACHED_TOKENS)
            assert note["candidates"][0]["basis"] == "history"
