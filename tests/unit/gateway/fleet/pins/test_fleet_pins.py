"""Pins on a fleet: on workers that compute prompts, again on workers that restart, and after a worker lost them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway
from harness.fakes.scripted_worker import ScriptedWorker
from harness.waiting import eventually

from kvferry.core.clock import ManualClock
from kvferry.core.errors import InvalidRequest, Overloaded, Unavailable
from kvferry.core.hashing import cache_scope
from kvferry.core.ids import AdapterId
from kvferry.gateway.fleet.pins.fleet_pins import FleetPins
from kvferry.gateway.fleet.pins.pin_book import Prefix

BODY = {"prompt": "x" * 40, "ttl_seconds": 600}
IDS = [257, *b"x" * 40]


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway(prefill=1, decode=1, both=1) as running:
        yield running


async def post(gateway: ScriptedGateway, path: str, body: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(gateway.admin_url + path, json=body)


async def listed(gateway: ScriptedGateway) -> dict[str, list[dict[str, object]]]:
    async with httpx.AsyncClient(timeout=20) as client:
        found: dict[str, list[dict[str, object]]] = (await client.get(f"{gateway.admin_url}/pins")).json()
    return found


def by_role(gateway: ScriptedGateway) -> dict[str, ScriptedWorker]:
    return {worker.role: worker for worker in gateway.workers.all}


async def test_a_prefix_is_pinned_on_the_workers_that_compute_prompts(gateway: ScriptedGateway) -> None:
    workers = by_role(gateway)
    answer = await post(gateway, "/pin_prefix", {**BODY, "tenant": "t", "cache_salt": "s"})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert {pin["address"] for pin in made["workers"]} == {workers["prefill"].address, workers["both"].address}
    assert all((pin["num_tokens"], pin["num_blocks"]) == (41, 2) for pin in made["workers"])
    assert all(599 < pin["seconds_left"] <= 600 for pin in made["workers"])
    assert made["waiting"] == []
    assert not workers["decode"].pins
    (request,) = workers["prefill"].pins.values()
    assert list(request.token_ids) == IDS
    assert request.scope == cache_scope("t", "s")
    (pin,) = (await listed(gateway))["pins"]
    assert (pin["tenant"], pin["has_cache_salt"], pin["num_tokens"], len(pin["workers"])) == ("t", True, 41, 2)  # type: ignore[arg-type]
    other = await post(gateway, "/unpin_prefix", {"prompt": "x" * 40, "tenant": "t"})
    assert [pin["num_blocks"] for pin in other.json()["workers"]] == [0, 0]
    ended = await post(gateway, "/unpin_prefix", {"prompt": IDS, "tenant": "t", "cache_salt": "s"})
    assert [pin["num_blocks"] for pin in ended.json()["workers"]] == [2, 2]
    assert not workers["prefill"].pins
    assert (await listed(gateway))["pins"] == []


async def test_a_restarted_worker_gets_the_registered_pins_with_their_remaining_time(gateway: ScriptedGateway) -> None:
    worker = by_role(gateway)["prefill"]
    await post(gateway, "/pin_prefix", BODY)
    await worker.stop()
    await worker.start()
    assert not worker.pins
    await eventually(lambda: len(worker.pins) == 1)
    (request,) = worker.pins.values()
    assert 500 < request.ttl_seconds < 600
    await post(gateway, "/unpin_prefix", {"prompt": BODY["prompt"]})
    await worker.stop()
    await worker.start()
    await gateway.gateway.fleet.wait_until(lambda fleet: all(view.takes_work for view in fleet.views()))
    assert gateway.gateway.pins.begin_round(gateway.gateway.parts.clock.monotonic()) == 0, (
        "an unpinned prefix is not pinned again"
    )


async def test_pins_that_a_worker_lost_are_made_again_when_its_status_has_shown_it_for_a_while(
    gateway: ScriptedGateway,
) -> None:
    worker, fleet = by_role(gateway)["prefill"], gateway.gateway.fleet
    pins = FleetPins(fleet, ManualClock())
    await pins.pin(Prefix.of(IDS), 600.0)
    await fleet.wait_until(lambda _: all(view.load.pins for view in fleet.views() if view.role != "decode"))
    assert pins.begin_round(0.0) == 0
    worker.pins.clear()
    await fleet.wait_until(lambda _: fleet.view(worker.address).load.pins == 0)  # type: ignore[union-attr]
    assert [pins.begin_round(now) for now in (1.0, 5.9, 6.0)] == [0, 0, 1]
    await eventually(lambda: len(worker.pins) == 1)


async def test_a_time_to_live_that_ends_before_the_prefix_is_computed_is_an_error(gateway: ScriptedGateway) -> None:
    clock = ManualClock()
    pins = FleetPins(gateway.gateway.fleet, clock)
    call = pins._call

    async def slow(*args: Any) -> Any:
        pin = await call(*args)
        clock.advance(2.0)
        pins.report()  # removes what has expired
        return pin

    pins._call = slow  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="the time to live of 1 s ended before") as caught:
        await pins.pin(Prefix.of(IDS), 1.0)
    assert (caught.value.field, caught.value.reason) == ("ttl_seconds", "PIN_EXPIRED")
    assert not by_role(gateway)["prefill"].pins


async def test_a_prefix_that_is_unpinned_while_it_is_computed_is_an_error(gateway: ScriptedGateway) -> None:
    pins = FleetPins(gateway.gateway.fleet, ManualClock())
    call = pins._call

    async def interrupted(*args: Any) -> Any:
        pin = await call(*args)
        pins.clear()
        return pin

    pins._call = interrupted  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="was unpinned, the caches were reset") as caught:
        await pins.pin(Prefix.of(IDS), 60.0)
    assert caught.value.reason == "PIN_ENDED"
    assert not by_role(gateway)["prefill"].pins


async def test_a_late_status_makes_no_pin_again(gateway: ScriptedGateway) -> None:
    worker, fleet = by_role(gateway)["prefill"], gateway.gateway.fleet
    pins = FleetPins(fleet, ManualClock())
    await pins.pin(Prefix.of(IDS), 600.0)
    names = dict(worker.pins)
    worker.pins.clear()
    await fleet.wait_until(lambda _: fleet.view(worker.address).load.pins == 0)  # type: ignore[union-attr]
    assert pins.begin_round(1.0) == 0
    worker.pins.update(names)
    await fleet.wait_until(lambda _: all(view.load.pins for view in fleet.views() if view.role != "decode"))
    assert [pins.begin_round(now) for now in (2.0, 9.0)] == [0, 0]


async def test_a_failed_pin_is_tried_again_after_thirty_seconds(gateway: ScriptedGateway) -> None:
    worker, fleet = by_role(gateway)["both"], gateway.gateway.fleet
    pins = FleetPins(fleet, ManualClock())
    worker.pin_error = Overloaded("no")
    with pytest.raises(Overloaded):
        await pins.pin(Prefix.of(IDS), 600.0)
    worker.pin_error = None
    await fleet.wait_until(lambda _: any(view.load.pins for view in fleet.views()))
    assert [pins.begin_round(now) for now in (1.0, 29.9, 30.0)] == [0, 0, 1]
    await eventually(lambda: len(worker.pins) == 1)


async def test_a_worker_that_refuses_is_named_and_tried_again(gateway: ScriptedGateway) -> None:
    workers, pins = by_role(gateway), gateway.gateway.pins
    workers["both"].pin_error = Overloaded("pins may use 4 pages", reason="PIN_QUOTA")
    answer = await post(gateway, "/pin_prefix", BODY)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error["code"] == "pin_quota"
    assert f"1 of 2 workers did not pin the prefix, {workers['both'].address}: pins may use 4 pages" in error["message"]
    assert "the others pinned it" in error["message"]
    assert len(workers["prefill"].pins) == 1
    workers["both"].pin_error = None
    assert pins.begin_round(gateway.gateway.parts.clock.monotonic() + 31) == 1
    await eventually(lambda: len(workers["both"].pins) == 1)
    workers["prefill"].pin_error = Overloaded("no")
    incomplete = await post(gateway, "/unpin_prefix", {"prompt": BODY["prompt"]})
    assert incomplete.status_code == 503
    assert f"1 of 2 workers did not confirm: {workers['prefill'].address} (OVERLOADED)" in incomplete.text
    assert not workers["both"].pins


async def test_a_prefix_that_no_worker_pins_is_not_registered(gateway: ScriptedGateway) -> None:
    for worker in gateway.workers.all:
        worker.pin_error = InvalidRequest("the prefix has 3 tokens", field="token_ids")
    answer = await post(gateway, "/pin_prefix", BODY)
    assert answer.status_code == 400
    assert "2 of 2 workers" in answer.text
    assert "the others" not in answer.text
    assert (await listed(gateway))["pins"] == []


async def test_a_worker_that_does_not_accept_requests_pins_later(gateway: ScriptedGateway) -> None:
    worker = by_role(gateway)["both"]
    worker.draining = True
    await gateway.gateway.fleet.wait_until(lambda fleet: not fleet.view(worker.address).takes_work)  # type: ignore[union-attr]
    answer = await post(gateway, "/pin_prefix", BODY)
    assert answer.json()["waiting"] == [worker.address]
    assert not worker.pins
    worker.draining = False
    await eventually(lambda: len(worker.pins) == 1)


async def test_a_reset_of_the_caches_ends_all_pins(gateway: ScriptedGateway) -> None:
    await post(gateway, "/pin_prefix", BODY)
    assert (await post(gateway, "/reset_prefix_cache", {})).status_code == 200
    assert (await listed(gateway))["pins"] == []
    assert gateway.gateway.pins.begin_round(gateway.gateway.parts.clock.monotonic() + 60) == 0


async def test_an_adapter_is_pinned_in_the_version_of_each_worker(gateway: ScriptedGateway) -> None:
    await post(gateway, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"})
    await gateway.gateway.fleet.wait_until(lambda fleet: all(view.adapters for view in fleet.views()))
    assert (await post(gateway, "/pin_prefix", {**BODY, "model": "a"})).status_code == 200
    worker = by_role(gateway)["prefill"]
    (request,) = worker.pins.values()
    adapter = AdapterId("a", worker.adapters["a"])
    assert (request.adapter.name, request.adapter.digest) == ("a", adapter.digest)
    assert request.scope == cache_scope("", "", adapter)
    assert (await post(gateway, "/pin_prefix", {**BODY, "model": "other"})).status_code == 404


async def test_without_workers_that_compute_prompts_a_pin_is_unavailable(gateway: ScriptedGateway) -> None:
    for worker in gateway.workers.all:
        worker.draining = True
    await gateway.gateway.fleet.wait_until(lambda fleet: not any(view.takes_work for view in fleet.views()))
    answer = await post(gateway, "/pin_prefix", BODY)
    assert answer.status_code == 503
    assert "no worker that computes prompts" in answer.text
