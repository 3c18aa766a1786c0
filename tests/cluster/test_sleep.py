"""A pool that scales itself on a real node: asleep without requests, woken by one, larger under many, asleep again."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness.pools.on_node import CLOCK, MODEL, PoolOnNode

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(400)]

ROLE = {
    "name": "both",
    "engine": {"kvMemory": "256MiB", "threads": 1, "maxNumSeqs": 8},
    "scaling": {
        "mode": "Auto",
        "minReplicas": 0,
        "maxReplicas": 2,
        "targetRequests": 3,
        "scaleToZero": {"idleSeconds": 8},
        "scaleDown": {"stabilizationWindowSeconds": 8},
    },
    "template": {"spec": {"runtimeClassName": "host"}},
}


@pytest.fixture
def pool(operated: Any, namespace: str) -> Iterator[PoolOnNode]:
    made = PoolOnNode(operated.cluster, namespace)
    yield made
    made.kubectl("delete", "kvpool", made.name, "--ignore-not-found")


def asleep(pool: dict[str, Any]) -> bool:
    return any(
        c["reason"] == "ScaledToZero" for c in pool.get("status", {}).get("conditions", []) if c["type"] == "Ready"
    )


def test_a_pool_sleeps_wakes_and_grows_by_itself(pool: PoolOnNode, say: Callable[[str], None]) -> None:
    pool.apply({"spec": {"roles": [ROLE], "gateway": {"replicas": 1}}})
    pool.until(asleep, "the pool sleeps")
    say("asleep, with no worker pod")
    assert pool.pods("both", ready=False) == []

    began = CLOCK.monotonic()
    (answer,) = asyncio.run(ask(pool, 1, 8))
    assert answer["usage"]["completion_tokens"] == 8
    say(f"woken: a request was held and answered after {CLOCK.monotonic() - began:.1f} s")

    answers = asyncio.run(ask(pool, 9, 250))
    assert len(answers) == 9
    decisions = pool.get()["status"]["scaling"]
    assert {"role": "both", "from": 1, "to": 2} in [{k: d[k] for k in ("role", "from", "to")} for d in decisions]
    say(f"grew under nine requests: {decisions[0]['reason']}")

    pool.until(asleep, "the pool sleeps again")
    reasons = [decision["reason"] for decision in pool.get()["status"]["scaling"]]
    assert any(reason.startswith("no requests for 8 s") for reason in reasons)
    say("asleep again")


async def ask(pool: PoolOnNode, requests: int, tokens: int) -> list[dict[str, Any]]:
    """Send requests concurrently and check that each succeeds."""

    async def one(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": f"Story {number}: once", "max_tokens": tokens, "temperature": 0}
        answer = await client.post(f"{pool.http}/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async with httpx.AsyncClient(timeout=120) as client:
        return await asyncio.gather(*(one(client, number) for number in range(requests)))
