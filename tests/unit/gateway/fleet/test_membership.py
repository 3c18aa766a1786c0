"""A fleet whose members change, and a source of members that fails."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

import grpc
import pytest
from harness.fakes.byte_model import NAME
from harness.fakes.scripted_fleet import ScriptedFleet, fleet_config, scripted_fleet
from harness.fakes.scripted_worker import ScriptedWorker, ScriptedWorkers

from kvferry.core.clock import SystemClock
from kvferry.core.load import WorkerLoad
from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.decide.routing.discovery import Listing, Update
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.fleet_report import fleet_report
from kvferry.gateway.fleet.membership import Knowledge, Membership
from kvferry.v1 import decode_pb2


def listing(worker: ScriptedWorker, name: str = "", *, stopping: bool = False) -> Listing:
    return Listing(name or worker.worker_id, worker.role, Endpoint.parse(worker.address), stopping)


async def until(fleet: Fleet, holds) -> None:
    async with asyncio.timeout(10):
        await fleet.wait_until(holds)


async def soon(holds) -> None:
    async with asyncio.timeout(10):
        for _ in iter(holds, True):
            await asyncio.sleep(0)


def watch_tasks() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("watch "))


@pytest.fixture
async def pair() -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(prefill=1, decode=1) as running:
        yield running


@pytest.fixture
async def three() -> AsyncIterator[tuple[ScriptedWorkers, Fleet]]:
    """Workers p0, d0 and d1, and a fleet without members."""
    async with ScriptedWorkers(prefill=1, decode=2) as workers:
        empty = replace(fleet_config(workers), prefill=(), decode=(), both=())
        fleet = Fleet(empty, NAME, clock=SystemClock())
        fleet.start()
        yield workers, fleet
        await fleet.stop()
        assert watch_tasks() == []


async def test_a_worker_that_joins_is_watched_and_one_that_leaves_is_forgotten(three):
    workers, fleet = three
    listings = [listing(worker) for worker in workers.all]
    fleet.follow(listings)
    await until(fleet, lambda f: sum(view.takes_work for view in f.views()) == 3)
    assert len(watch_tasks()) == 3
    fleet.follow(listings[:2])
    assert [r.worker_id for r in fleet.candidates().decode] == ["d0"], "a worker that left gets no new calls"
    await until(fleet, lambda f: len(f.views()) == 2)
    fleet.follow([])
    await until(fleet, lambda f: f.views() == ())
    await soon(lambda: not watch_tasks())
    assert fleet.view(workers.decode[0].address) is None
    with pytest.raises(KeyError):
        fleet.prefill(workers.prefill[0].address)
    fleet.suspect(workers.prefill[0].address, "a late failure is no failure")


async def test_a_worker_that_stays_keeps_its_status(three):
    workers, fleet = three
    fleet.follow([listing(workers.decode[0])])
    await until(fleet, lambda f: f.views()[0].takes_work)
    fleet.follow([listing(workers.decode[0]), listing(workers.decode[1])])
    assert fleet.views()[0].takes_work
    assert not fleet.views()[1].takes_work


async def test_running_calls_of_a_worker_that_leaves_continue_to_their_end(three):
    workers, fleet = three
    worker = workers.decode[0]
    gate = asyncio.Event()
    worker.step = gate.wait
    fleet.follow([listing(worker)])
    await until(fleet, lambda f: f.views()[0].takes_work)
    with fleet.hold(worker.address) as held:
        request = decode_pb2.DecodeRequest(token_ids=[1, 2])
        request.sampling.max_tokens = 3
        call = held.watch(fleet.decode(worker.address).Run(request, timeout=20))
        begun = asyncio.ensure_future(call.read())
        polls = fleet.num_polls
        fleet.follow([])
        await until(fleet, lambda f: f.num_polls > polls + 3)
        assert fleet.views()[0].why_not == "removed from the pool"
        gate.set()
        assert (await begun).tokens
        while (await call.read()) is not grpc.aio.EOF:
            pass
        assert not held.why_lost
    await until(fleet, lambda f: f.views() == ())


async def test_a_silent_worker_that_left_is_given_up(three):
    workers, fleet = three
    worker = workers.decode[0]
    worker.step = asyncio.Event().wait
    fleet.follow([listing(worker)])
    await until(fleet, lambda f: f.views()[0].takes_work)
    with fleet.hold(worker.address) as held:
        request = decode_pb2.DecodeRequest(token_ids=[1, 2])
        request.sampling.max_tokens = 3
        call = held.watch(fleet.decode(worker.address).Run(request, timeout=20))
        reading = asyncio.ensure_future(call.read())
        fleet.follow([])
        await worker.stop()
        await asyncio.wait([reading], timeout=10)
    assert reading.cancelled() or reading.exception() is not None or reading.result() is grpc.aio.EOF
    await until(fleet, lambda f: f.views() == ())


async def test_a_stopping_worker_gets_no_new_calls_and_keeps_the_running_ones(three):
    workers, fleet = three
    worker = workers.decode[0]
    fleet.follow([listing(worker)])
    await until(fleet, lambda f: f.views()[0].takes_work)
    with fleet.hold(worker.address) as held:
        fleet.follow([listing(worker, stopping=True)])
        assert fleet.views()[0].why_not == "terminating"
        assert fleet.candidates().decode == ()
        assert not fleet.may_recover()
        assert not held.why_lost
        polls = fleet.num_polls
        await until(fleet, lambda f: f.num_polls > polls + 3)
        assert fleet.views()[0].in_flight == 1


async def test_another_pod_at_an_old_address_inherits_nothing(three):
    workers, fleet = three
    worker = workers.decode[0]
    worker.step = asyncio.Event().wait
    fleet.follow([listing(worker, "old")])
    await until(fleet, lambda f: f.views()[0].takes_work)
    fleet.suspect(worker.address, "of the old one")
    with fleet.hold(worker.address) as held:
        request = decode_pb2.DecodeRequest(token_ids=[1])
        request.sampling.max_tokens = 3
        call = held.watch(fleet.decode(worker.address).Run(request, timeout=20))
        reading = asyncio.ensure_future(call.read())
        fleet.follow([listing(worker, "new")])
        await asyncio.wait([reading], timeout=10)
        assert "another worker at its address" in held.why_lost
    view = fleet.view(worker.address)
    assert view is not None
    assert (view.name, view.why_not, view.in_flight, view.incarnation) == ("new", "no status yet", 0, None)
    await until(fleet, lambda f: [v.name for v in f.views()] == ["new"] and f.views()[0].takes_work)


async def test_a_worker_that_returns_before_it_is_forgotten_is_the_same_member(three):
    workers, fleet = three
    worker = workers.decode[0]
    fleet.follow([listing(worker)])
    await until(fleet, lambda f: f.views()[0].takes_work)
    with fleet.hold(worker.address):
        fleet.follow([])
        fleet.follow([listing(worker)])
        assert fleet.views()[0].takes_work
        assert fleet.views()[0].in_flight == 1


async def test_no_channel_or_task_stays_open_after_many_changes(three):
    workers, fleet = three
    for turn in range(20):
        fleet.follow([listing(worker, f"{worker.worker_id}-{turn}") for worker in workers.all])
        await until(fleet, lambda f, t=turn: all(v.takes_work and v.name.endswith(f"-{t}") for v in f.views()))
    assert len(fleet.views()) == 3
    await soon(lambda: len(watch_tasks()) <= 3)
    gc.collect()
    channels = [found for found in gc.get_objects() if issubclass(type(found), grpc.aio.Channel)]
    assert len(channels) <= 6, "two channels for each of three workers"


async def test_before_the_start_members_are_only_recorded():
    async with ScriptedWorkers(decode=1) as workers:
        fleet = Fleet(fleet_config(workers), NAME, clock=SystemClock())
        fleet.follow([])
        assert fleet.views() == ()


class ScriptedSource:
    """A source whose updates come from the test; it raises an update that is an exception."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[Update | Exception | None] = asyncio.Queue()
        self.num_opened = 0
        self.num_closed = 0

    async def updates(self):
        self.num_opened += 1
        try:
            while True:
                line = await self.lines.get()
                if line is None:
                    return
                if isinstance(line, Exception):
                    raise line
                yield line
        finally:
            self.num_closed += 1


async def test_a_source_that_fails_changes_nothing_and_reports_the_error(three):
    workers, fleet = three
    source = ScriptedSource()
    membership = Membership(fleet, source)
    assert membership.state.state is Knowledge.UNKNOWN
    assert "has not been read" in membership.notes()[0]
    running = asyncio.create_task(membership.run())
    source.lines.put_nowait(Update((listing(workers.decode[0]),)))
    await until(fleet, lambda f: bool(f.views()) and f.views()[0].takes_work)
    assert membership.state.state is Knowledge.FOLLOWED
    assert membership.notes() == []
    source.lines.put_nowait(Update(None, "the API server cannot be reached"))
    await soon(lambda: membership.state.state is Knowledge.STALE)
    assert fleet.views()[0].takes_work
    assert membership.notes() == ["pool: the API server cannot be reached; the last known workers are used"]
    source.lines.put_nowait(Update((listing(workers.decode[0]),)))
    await soon(lambda: membership.state.state is Knowledge.FOLLOWED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (source.num_opened, source.num_closed) == (1, 1)


@pytest.mark.parametrize("line", [None, RuntimeError("a bug")])
async def test_a_source_that_ends_or_breaks_is_opened_again(three, line):
    workers, fleet = three
    source = ScriptedSource()
    membership = Membership(fleet, source)
    running = asyncio.create_task(membership.run())
    source.lines.put_nowait(Update((listing(workers.decode[0]),)))
    await until(fleet, lambda f: bool(f.views()))
    source.lines.put_nowait(line)
    source.lines.put_nowait(Update(()))
    await until(fleet, lambda f: not f.views())
    assert source.num_opened == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_fleet_given_by_flags_has_no_source_to_follow(pair):
    membership = Membership(pair.fleet, None)
    await membership.run()
    assert membership.state.state is Knowledge.LISTED
    assert membership.notes() == []


async def test_the_report_has_state_and_load_of_each_worker(pair):
    worker = pair.workers.decode[0]
    report = fleet_report(
        pair.fleet.views(),
        pool="ns/p",
        held=2,
        source=Membership(pair.fleet, None).state,
        wake_failure="not allowed",
        gateway="00ff",
        handoffs={"fetched": 3},
        model_tokens=512,
    )
    assert {key: value for key, value in report.items() if key != "workers"} == {
        "pool": "ns/p",
        "held": 2,
        "source": {"state": "listed", "detail": ""},
        "waking": {"detail": "not allowed"},
        "gateway": "00ff",
        "handoffs": {"fetched": 3},
        "model_tokens": 512,
        "pool_certificate_not_after": 0,
    }
    assert report["workers"][1] == {
        "name": worker.address,
        "address": worker.address,
        "role": "decode",
        "takes_work": True,
        "why_not": "",
        "worker_id": "d0",
        "incarnation": worker.incarnation,
        "fingerprint": b"layout".hex(),
        "family": "",
        "connector": "scripted",
        "domain": "",
        "model_digest": "",
        "context_tokens": 512,
        "device": "",
        "staged": False,
        "adapters": [],
        "adapter_failures": {},
        "pause": {"mode": None, "by": "", "since": 0.0, "settled": False},
        "weights": {"revision": 0, "version": "start", "digest": "00", "path": ""},
        "in_flight": 0,
        "load": asdict(WorkerLoad(blocks_total=100, blocks_free=75)),
    }
