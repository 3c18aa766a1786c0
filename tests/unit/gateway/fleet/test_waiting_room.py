"""Requests held for a pool's first worker, and the pool that they wake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness.fakes.byte_model import NAME
from harness.fakes.scripted_fleet import fleet_config
from harness.fakes.scripted_worker import ScriptedWorkers
from kvferry.gateway.fleet.waiting_room import WaitingRoom

from kvferry.core.clock import SystemClock
from kvferry.core.errors import DeadlinePassed, Overloaded, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.config import DispatchConfig, Endpoint, HoldConfig, PoolName
from kvferry.gateway.dispatch import calls
from kvferry.gateway.dispatch.dispatcher import Dispatcher
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.pool_api import ApiError
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.lifecycle.sample_run import SampleRun
from kvferry.gateway.routing.discovery import Listing
from kvferry.gateway.routing.holding import Holding
from kvferry.rpc.text.token_source import TokenRequest
from kvferry.v1 import decode_pb2

CLOCK = SystemClock()


@dataclass
class Pool:
    """A gateway's insides over a pool that is empty so far."""

    workers: ScriptedWorkers
    fleet: Fleet
    holding: Holding
    dispatcher: Dispatcher

    def arrive(self) -> None:
        self.fleet.follow([Listing(w.worker_id, w.role, Endpoint.parse(w.address)) for w in self.workers.all])

    async def ask(self, name: str = "r", deadline: float | None = None) -> int:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
        request = TokenRequest(
            RequestId(name),
            token_ids=(1, 2, 3),
            sampling=sampling,
            arrived=CLOCK.monotonic(),
            deadline=deadline,
        )
        count = 0
        async with aclosing(self.dispatcher.stream(request)) as events:
            async for event in events:
                count += len(event.tokens)
        return count

    async def holds(self, count: int) -> None:
        async with asyncio.timeout(10):
            for _ in iter(lambda: self.holding.num_held, count):
                await asyncio.sleep(0)


@asynccontextmanager
async def a_pool(max_held: int = 8, seconds: float = 20.0) -> AsyncIterator[Pool]:
    async with ScriptedWorkers(decode=1) as workers:
        fleet = Fleet(replace(fleet_config(workers), decode=()), NAME)
        holding = Holding(HoldConfig(max_held, seconds), "ns/p")
        dispatcher = Dispatcher(fleet, CLOCK, DispatchConfig(), room=WaitingRoom(fleet, holding, None))
        fleet.start()
        try:
            yield Pool(workers, fleet, holding, dispatcher)
            await dispatcher.wait_idle()
            assert holding.num_held == 0
            await workers.idle()
        finally:
            await fleet.stop()


async def test_requests_wait_for_the_first_worker_and_are_served_in_order(monkeypatch):
    sent: list[str] = []

    def decode_request(run: SampleRun) -> decode_pb2.DecodeRequest:
        sent.append(run.request.request_id)
        return make(run)

    make = calls.decode_request
    monkeypatch.setattr(calls, "decode_request", decode_request)
    async with a_pool() as pool:
        asked = []
        for i in range(6):
            asked.append(asyncio.create_task(pool.ask(f"r{i}")))
            await pool.holds(i + 1)
        pool.arrive()
        assert await asyncio.gather(*asked) == [4] * 6
    assert sent == [f"r{i}" for i in range(6)]


async def test_beyond_the_bound_they_are_told_to_come_back():
    async with a_pool(max_held=1) as pool:
        first = asyncio.create_task(pool.ask())
        await pool.holds(1)
        with pytest.raises(Overloaded) as full:
            await pool.ask()
        assert full.value.retry_after_seconds
        pool.arrive()
        assert await first == 4


async def test_one_that_waited_in_vain_is_told_so():
    async with a_pool(seconds=0.05) as pool:
        with pytest.raises(Unavailable, match="ns/p had no worker") as vain:
            await pool.ask()
        assert vain.value.retry_after_seconds


async def test_its_own_deadline_comes_first():
    async with a_pool() as pool:
        with pytest.raises(DeadlinePassed):
            await pool.ask(deadline=CLOCK.monotonic() + 0.05)


async def test_a_client_that_leaves_gives_its_place_back():
    async with a_pool() as pool:
        asked = asyncio.create_task(pool.ask())
        await pool.holds(1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert pool.holding.num_held == 0


class ScriptedApi:
    """Scalers by role; an error in a scaler's place is raised."""

    pool = PoolName("ns", "p")

    def __init__(self, **scalers: Any) -> None:
        self.scalers = scalers
        self.wakes: list[tuple[str, str]] = []
        self.wake_error: ApiError | None = None

    def scaler(self, role: str) -> Any:
        found = self.scalers.get(role)
        if isinstance(found, Exception):
            raise found
        return found

    def wake(self, role: str, version: str) -> None:
        self.wakes.append((role, version))
        if self.wake_error is not None:
            raise self.wake_error


def asleep(version: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version, "annotations": {"kvferry.dev/wake": "true"}},
        "spec": {"replicas": 0},
    }


async def test_waiting_wakes_each_role_that_may_be_woken_once():
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi(prefill=asleep("3"), decode=asleep("4"))
    waker = Waker(api, holding, CLOCK)  # type: ignore[arg-type]
    await waker.check()
    assert api.wakes == []
    with holding.held():
        await waker.check()
        await waker.check()
    assert api.wakes == [("prefill", "3"), ("decode", "4")]
    assert (waker.num_wakes, waker.failure) == (2, "")


async def test_trouble_is_logged_once_and_told_until_it_is_over(caplog):
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi(prefill=ApiError("refused with 403", 403), decode=asleep())
    waker = Waker(api, holding, CLOCK)  # type: ignore[arg-type]
    with holding.held():
        await waker.check()
        await waker.check()
        assert waker.failure == "refused with 403"
        assert api.wakes == [("decode", "1")], "one role's failure is not another's"
        api.scalers["prefill"] = None
        await waker.check()
        assert waker.failure == ""
    assert len([record for record in caplog.records if "cannot be scaled up" in record.message]) == 1


@pytest.mark.parametrize(("status", "failure"), [(409, ""), (403, "no")])
async def test_a_scaler_that_changed_meanwhile_is_no_trouble(status, failure):
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi(decode=asleep())
    api.wake_error = ApiError("no", status)
    waker = Waker(api, holding, CLOCK)  # type: ignore[arg-type]
    with holding.held():
        await waker.check()
    assert (waker.failure, waker.num_wakes) == (failure, 0)


async def test_it_looks_as_long_as_anybody_waits():
    holding = Holding(HoldConfig(), "ns/p")
    api = ScriptedApi()
    slept = asyncio.Semaphore(0)

    async def sleep(_seconds: float) -> None:
        slept.release()
        await asyncio.sleep(0)

    waker = Waker(api, holding, CLOCK, sleep=sleep)  # type: ignore[arg-type]
    running = asyncio.create_task(waker.run())
    with holding.held():
        waker.want()
        async with asyncio.timeout(10):
            await slept.acquire()
            api.scalers["decode"] = asleep()
            for _ in iter(lambda: bool(api.wakes), True):
                await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
