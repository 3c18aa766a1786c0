import asyncio
from collections.abc import AsyncIterator

import pytest
from harness.fakes.scripted_fleet import ScriptedFleet, scripted_fleet

from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.fleet.readiness import can_serve, notes


@pytest.fixture
async def pair() -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(prefill=1, decode=1) as running:
        yield running


async def until(fleet: ScriptedFleet, why: str) -> None:
    async with asyncio.timeout(10):
        await fleet.fleet.wait_until(lambda f: why in f.views()[1].why_not if why else f.views()[1].takes_work)


async def test_a_view_has_the_values_of_the_workers_status(pair):
    view = pair.fleet.views()[1]
    assert (view.worker_id, view.role, view.fingerprint, view.connector) == ("d0", "decode", b"layout", "scripted")
    assert (view.max_model_tokens, view.block_tokens) == (512, 16)
    assert (view.load.blocks_total, view.load.blocks_free) == (100, 75)
    assert pair.fleet.context_tokens() == 512


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("ready", False, "not ready"),
        ("draining", True, "draining"),
        ("model", "other", "serves model 'other'"),
        ("role", "prefill", "its role is prefill, but it is listed as decode"),
    ],
)
async def test_a_worker_that_takes_no_work_is_left_out_with_its_reason(pair, attribute, value, why):
    worker = pair.workers.decode[0]
    before = getattr(worker, attribute)
    setattr(worker, attribute, value)
    await until(pair, why)
    assert pair.fleet.candidates().decode == ()
    assert not can_serve(pair.fleet)
    assert why in "".join(notes(pair.fleet))
    setattr(worker, attribute, before)
    await until(pair, "")
    assert can_serve(pair.fleet)


async def test_a_note_says_whether_requests_are_served_without_the_worker(pair):
    pair.workers.prefill[0].draining = True
    await pair.fleet.wait_until(lambda f: not f.views()[0].takes_work)
    assert can_serve(pair.fleet)
    assert notes(pair.fleet)[0].endswith("draining; requests are served without it")
    pair.workers.decode[0].draining = True
    await pair.fleet.wait_until(lambda f: not f.views()[1].takes_work)
    assert [note.rpartition(": ")[2] for note in notes(pair.fleet)] == ["draining", "draining"]


async def test_a_dead_worker_is_left_out_and_found_again_as_another_incarnation(pair):
    worker = pair.workers.decode[0]
    before = pair.fleet.views()[1].incarnation
    await worker.stop()
    await until(pair, "does not answer")
    await worker.start()
    await until(pair, "")
    assert pair.fleet.views()[1].incarnation != before


async def test_a_suspect_is_out_at_once_and_back_after_its_next_answer(pair):
    address = pair.workers.decode[0].address
    pair.fleet.suspect(address, "connection reset")
    assert "connection reset" in pair.fleet.views()[1].why_not
    await until(pair, "")


async def test_calls_held_count_as_load(pair):
    address = pair.workers.decode[0].address
    with pair.fleet.hold(address), pair.fleet.hold(address):
        assert pair.fleet.candidates().decode[0].load == 2
    assert pair.fleet.candidates().decode[0].load == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", Endpoint("host:1", "host:1")),
        ("host:1/2", Endpoint("host:1", "host:2")),
        ("[::1]:1/2", Endpoint("[::1]:1", "[::1]:2")),
    ],
)
def test_endpoints_are_read(text, expected):
    assert Endpoint.parse(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:1/", "host:1/x"])
def test_bad_endpoints_are_refused(text):
    with pytest.raises(UsageError, match="host:port"):
        Endpoint.parse(text)
