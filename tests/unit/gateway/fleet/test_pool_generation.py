"""Pauses and weight updates of a fleet of scripted workers: agreement, and workers that fail, join or differ."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from harness.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

from kvferry.core.errors import InvalidRequest, Unavailable
from kvferry.core.pausing import PauseMode, PauseState
from kvferry.gateway.decide.generation_rule import GenerationRule, PoolWeights
from kvferry.v1 import worker_admin_pb2 as pb

KEPT = PauseState(5, PauseMode.KEEP, "ann", 100.0)
NEW = PoolWeights(7, "v7", "digest", "path")


def test_the_newest_state_of_any_worker_is_the_pools_and_those_behind_are_refused() -> None:
    rule = GenerationRule()
    rule.saw("a", PauseState(), PoolWeights(0, "v0", "d0"))
    assert rule.refusal("a") == ""
    rule.saw("b", KEPT, PoolWeights(0, "v0", "d0"))
    assert rule.pause == KEPT
    assert (rule.refusal("a"), rule.refusal("b")) == ("is not paused yet, and the pool is", "")
    rule.saw("a", KEPT, NEW)
    assert rule.weights == NEW
    assert rule.refusal("b") == "has weights 'v0', and the pool has 'v7'"
    assert not rule.starts_steps("a")
    assert rule.note(160.0) == "generation is paused since 60 s by ann (mode keep)"


def test_a_late_status_does_not_undo_an_answer() -> None:
    rule = GenerationRule()
    rule.saw("a", PauseState(6, None, "ann", 110.0), NEW)
    rule.saw("a", KEPT, PoolWeights(0, "v0", "d0"))
    assert rule.of("a") == (PauseState(6, None, "ann", 110.0), NEW)
    assert rule.refusal("a") == ""
    assert rule.note(200.0) == ""


def test_no_worker_is_refused_while_the_pool_changes() -> None:
    rule = GenerationRule(is_changing=True)
    rule.saw("a", KEPT, NEW)
    assert rule.pause == PauseState()
    assert rule.refusal("b") == ""


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway(prefill=1, decode=2) as made:
        yield made


async def post(gateway: ScriptedGateway, route: str, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        headers = {"content-type": "application/json"}
        return await client.post(gateway.admin_url + route, content=json.dumps(body), headers=headers)


async def until_all(gateway: ScriptedGateway, revision: int) -> None:
    """Wait until the gateway knows that the present process of each worker has the weights and is used."""
    expected = {(worker.incarnation, revision) for worker in gateway.workers.all}
    async with asyncio.timeout(20):
        await gateway.gateway.fleet.wait_until(
            lambda fleet: {(v.incarnation, v.weights.revision) for v in fleet.views() if v.takes_work} == expected
        )


async def test_a_worker_that_cannot_read_the_weights_keeps_all_others_from_changing(gateway: ScriptedGateway) -> None:
    gateway.workers.decode[1].fails_at["PrepareWeights"] = InvalidRequest("the file is cut", reason="WEIGHTS_INVALID")
    answer = await post(gateway, "/weights", path="new")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "weights_invalid")
    assert "1 of 3 workers" in answer.json()["error"]["message"]
    for worker in gateway.workers.all:
        assert (worker.weights.version, worker.prepared_weights, worker.pause.revision) == ("start", None, 0)


async def test_a_worker_that_fails_late_is_brought_up_to_date_before_it_is_used(gateway: ScriptedGateway) -> None:
    late = gateway.workers.decode[1]
    late.fails_at["CommitWeights"] = Unavailable("stuck")
    answer = await post(gateway, "/weights", path="new", version="v1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "update_incomplete")
    revision = gateway.workers.prefill[0].weights.revision
    assert (late.weights.version, late.pause.mode) == ("start", pb.PAUSE_MODE_UNSPECIFIED)
    assert gateway.gateway.fleet.rule.weights.version == "v1"
    refused = [view.why_not for view in gateway.gateway.fleet.views() if view.why_not]
    assert refused == ["has weights 'start', and the pool has 'v1'"]
    late.fails_at.clear()
    await until_all(gateway, revision)


async def test_a_worker_that_restarts_is_paused_and_gets_the_weights(gateway: ScriptedGateway) -> None:
    assert (await post(gateway, "/weights", path="new", version="v1")).status_code == 200
    assert (await post(gateway, "/pause?mode=keep&clear_cache=false")).status_code == 200
    again = gateway.workers.decode[0]
    revision = again.weights.revision
    await again.stop()
    again.pause, again.weights = pb.PauseStatus(), pb.WeightsStatus(version="start", digest="00")
    await again.start()
    await until_all(gateway, revision)
    assert again.pause.mode == pb.PAUSE_MODE_KEEP
    assert (await post(gateway, "/resume")).status_code == 200
    assert {worker.pause.mode for worker in gateway.workers.all} == {pb.PAUSE_MODE_UNSPECIFIED}


async def test_different_files_under_one_path_are_refused(gateway: ScriptedGateway) -> None:
    gateway.workers.decode[1].digest_of = lambda path: f"another {path}"
    answer = await post(gateway, "/weights", path="new")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "weights_differ")
    assert {worker.weights.version for worker in gateway.workers.all} == {"start"}


async def test_a_pause_that_does_not_settle_is_reported_and_stays(gateway: ScriptedGateway) -> None:
    gateway.workers.decode[0].settles = False
    answer = await post(gateway, "/pause?mode=wait&timeout_seconds=0")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "pause_not_settled")
    async with httpx.AsyncClient(timeout=20) as client:
        state = (await client.get(gateway.admin_url + "/is_paused")).json()
        page = (await client.get(gateway.admin_url + "/metrics")).text
    assert (state["is_paused"], state["mode"], state["by"]) == (True, "wait", "loopback")
    assert "kvferry_gateway_paused_seconds 0.0\n" not in page


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/pause?mode=stop", {}, "mode"),
        ("/pause?mode=keep&mode=wait", {}, "mode"),
        ("/pause?timeout_seconds=nan", {}, "timeout_seconds"),
        ("/pause?timeout_seconds=-1", {}, "timeout_seconds"),
        ("/pause?clear_cache=maybe", {}, "clear_cache"),
        ("/pause?timeout_seconds=1_0", {}, "timeout_seconds"),
        ("/pause?timeout_seconds=%D9%A1", {}, "timeout_seconds"),
        ("/pause?other=1", {}, "other"),
        ("/pause", {"mode": "keep"}, "mode"),
        ("/pause_generation?mode=in_place", {}, "mode"),
        ("/resume?other=1", {}, "other"),
        ("/resume", {"other": 1}, "other"),
        ("/continue_generation?other=1", {}, "other"),
        ("/weights?mode=abort", {"path": "a"}, "mode"),
        ("/update_weights_from_disk?model_path=a", {"model_path": "b"}, "model_path"),
        ("/reset_prefix_cache?other=1", {}, "other"),
        ("/reset_prefix_cache?reset_running_requests=true", {}, "reset_running_requests"),
        ("/v1/load_lora_adapter?lora_name=a", {"lora_name": "b", "lora_path": "c"}, "lora_name"),
        ("/weights", {}, "path"),
        ("/weights", {"path": ""}, "path"),
        ("/weights", {"path": "\ud800"}, "path"),
        ("/weights", {"path": "a", "version": 3}, "version"),
        ("/weights", {"path": "a", "mode": ["keep"]}, "mode"),
        ("/weights", {"path": "a", "timeout_seconds": True}, "timeout_seconds"),
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/update_weights_from_disk", {"model_path": "a", "load_format": "dummy"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": "a", "flush_cache": False}, "flush_cache"),
    ],
)
async def test_an_invalid_field_is_named_and_changes_nothing(
    gateway: ScriptedGateway, route: str, body: dict[str, object], field: str
) -> None:
    answer = await post(gateway, route, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert {worker.pause.revision for worker in gateway.workers.all} == {0}
