"""The admin API: its routes are served on the admin port only."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.gateway.decide.config import HttpConfig

_BODY = {"model": "bytes", "prompt": "hi", "max_tokens": 3}


@pytest.fixture
async def gateway(tmp_path) -> AsyncIterator[ScriptedGateway]:
    keys = tmp_path / "keys"
    keys.write_text("secret-key tenant-a\n")
    async with scripted_gateway(http=HttpConfig(address="127.0.0.1:0", api_keys_file=keys)) as running:
        yield running


@pytest.mark.parametrize("path", ["/metrics", "/fleet", "/debug/requests/x"])
async def test_operator_routes_are_served_on_the_admin_port_only(gateway: ScriptedGateway, path: str) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        key = {"authorization": "Bearer secret-key"}
        assert (await client.get(gateway.url + path)).status_code == 404
        assert (await client.get(gateway.url + path, headers=key)).status_code == 404
        assert (await client.get(gateway.admin_url + path)).status_code == (404 if "debug" in path else 200)


async def test_metrics_have_no_series_of_creation_times(gateway: ScriptedGateway) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        page = (await client.get(f"{gateway.admin_url}/metrics")).text
    names = {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    assert "kvferry_gateway_prompt_tokens_total" in names
    assert [name for name in names if name.endswith("_created")] == []


async def test_an_operator_finds_any_tenants_request(gateway: ScriptedGateway) -> None:
    headers = {"authorization": "Bearer secret-key", "x-request-id": "mine"}
    async with httpx.AsyncClient(timeout=20) as client:
        assert (await client.post(f"{gateway.url}/v1/completions", json=_BODY, headers=headers)).status_code == 200
        (found,) = (await client.get(f"{gateway.admin_url}/debug/requests/mine")).json()["tenants"]
        missing = await client.get(f"{gateway.admin_url}/debug/requests/other")
    assert found["tenant"] == "tenant-a"
    assert found["samples"][0]["output_tokens"] == 3
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "request_not_found"


async def test_the_prefix_caches_of_all_workers_are_reset(gateway: ScriptedGateway) -> None:
    path = "/reset_prefix_cache"
    async with httpx.AsyncClient(timeout=20) as client:
        done = await client.post(gateway.admin_url + path)
        assert (await client.get(gateway.admin_url + path)).status_code == 404
        assert (await client.post(gateway.url + path)).status_code == 404
        addresses = [worker.address for worker in gateway.workers.all]
        assert done.json() == {"workers": [{"address": address, "num_blocks": 7} for address in addresses]}
        assert [worker.num_resets for worker in gateway.workers.all] == [1, 1]
        await gateway.workers.all[1].stop()
        incomplete = await client.post(gateway.admin_url + path)
    assert incomplete.status_code == 503
    assert f"1 of 2 workers did not confirm the reset: {addresses[1]} (UNAVAILABLE)" in incomplete.text
    assert gateway.workers.all[0].num_resets == 2


async def test_clients_routes_are_not_served_to_operators(gateway: ScriptedGateway) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        refused = await client.post(f"{gateway.admin_url}/v1/completions", json=_BODY)
    assert refused.status_code == 404
    assert "/metrics" in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", ["lora_name", "lora_path"])
async def test_a_text_that_is_not_unicode_is_refused(gateway: ScriptedGateway, field: str) -> None:
    body = json.dumps({"lora_name": "a", "lora_path": "a"} | {field: "\ud800"})
    async with httpx.AsyncClient(timeout=20) as client:
        headers = {"content-type": "application/json"}
        refused = await client.post(f"{gateway.admin_url}/v1/load_lora_adapter", content=body, headers=headers)
    assert refused.status_code == 400
    assert f"{field} is not valid Unicode" in refused.json()["error"]["message"]
