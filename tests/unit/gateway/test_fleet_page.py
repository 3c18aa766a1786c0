"""Reports of a gateway to operators and load balancers while it serves, lingers and drains."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from harness.fakes.scripted_gateway import scripted_gateway

from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import PoolName

OPERATIONS = (Path(__file__).resolve().parents[3] / "docs/operations.md").read_text("utf-8")


async def test_the_fleet_page_lists_the_workers():
    async with scripted_gateway() as gateway, httpx.AsyncClient(base_url=gateway.admin_url, timeout=20) as client:
        answer = await client.get("/fleet")
        page = (await client.get("/metrics")).text
    fleet = answer.json()
    assert answer.status_code == 200
    assert (fleet["pool"], fleet["held"], fleet["source"]["state"]) == ("", 0, "listed")
    assert [(w["role"], w["takes_work"], w["worker_id"]) for w in fleet["workers"]] == [
        ("prefill", True, "p0"),
        ("decode", True, "d0"),
    ]
    assert "kvferry_gateway_held_requests 0.0" in page
    assert "kvferry_gateway_fleet_stale 0.0" in page
    assert "kvferry_gateway_scale_from_zero_total 0.0" in page


async def test_the_documented_fields_are_those_of_the_page():
    async with scripted_gateway() as gateway, httpx.AsyncClient(base_url=gateway.admin_url, timeout=20) as client:
        fleet = (await client.get("/fleet")).json()
    table = OPERATIONS[OPERATIONS.index("### `GET /fleet`") :].split("\n\n")[2]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z_.\[\]]+)`", line.split("|")[1])]
    at = names.index("workers[]")
    assert {name.partition(".")[0] for name in names[:at]} == fleet.keys() - {"workers"}
    for worker in fleet["workers"]:
        assert set(names[at + 1 :]) == worker.keys()


async def test_a_lingering_gateway_serves_and_is_not_ready():
    async with scripted_gateway() as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        assert (await client.get("/ready")).status_code == 200
        lingering = asyncio.create_task(gateway.gateway.linger(30))
        async with asyncio.timeout(10):
            while (await client.get("/ready")).status_code != 503:
                pass
        body = {"model": "bytes", "prompt": "hi", "max_tokens": 3}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        lingering.cancel()
        await asyncio.gather(lingering, return_exceptions=True)


@pytest.mark.parametrize(
    "text", ["", "p", "ns/", "/p", "a/b/c", "Ns/p", "ns/p_", "ns/-p", "ns/" + "p" * 64, "ns/p?x=1"]
)
def test_invalid_pool_names_are_refused(text):
    with pytest.raises(UsageError, match="NAMESPACE/NAME"):
        PoolName.parse(text)


def test_a_pools_name_is_read():
    assert str(PoolName.parse("chat/smollm-2")) == "chat/smollm-2"
