"""Requests held until a pool has its first worker; meanwhile they stay in the queue of flow control."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from harness.fakes.byte_model import NAME, byte_model
from harness.fakes.scripted_fleet import fleet_config
from harness.fakes.scripted_worker import ScriptedWorkers
from harness.waiting import eventually

from kvferry.core.clock import SystemClock
from kvferry.core.errors import DeadlinePassed, Overloaded, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.decide.config import DispatchConfig, Endpoint, FlowConfig, HoldConfig
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.discovery import Listing
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.dispatch import worker_calls
from kvferry.gateway.dispatch.dispatcher import Dispatcher
from kvferry.gateway.dispatch.routing_parts import build_routing
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.serving.request import Caller, Request
from kvferry.serving.text_service import TextService
from kvferry.v1 import decode_pb2

CLOCK = SystemClock()


@dataclass
class Pool:
    """The parts of a gateway, over a pool without workers."""

    workers: ScriptedWorkers
    fleet: Fleet
    holding: Holding
    dispatcher: Dispatcher
    gate: FlowGate
    service: TextService

    def arrive(self) -> None:
        self.fleet.follow([Listing(w.worker_id, w.role, Endpoint.parse(w.address)) for w in self.workers.all])

    async def ask(self, name: str = "r", deadline: float | None = None, priority: int = 0, samples: int = 1) -> int:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
        caller = Caller(RequestId(name), priority=priority, arrived=CLOCK.monotonic(), deadline=deadline)
        request = Request(caller, (1, 2, 3), sampling, num_samples=samples)
        count = 0
        async with aclosing(self.service.generate(request)) as chunks:
            async for chunk in chunks:
                count += len(chunk.tokens)
        return count

    async def holds(self, count: int) -> None:
        await eventually(lambda: self.holding.num_held == count)


@asynccontextmanager
async def a_pool(max_held: int = 8, seconds: float = 20.0) -> AsyncIterator[Pool]:
    async with ScriptedWorkers(decode=1) as workers:
        fleet = Fleet(replace(fleet_config(workers), decode=()), NAME, clock=SystemClock())
        holding, instruments = Holding(HoldConfig(max_held, seconds), "ns/p"), GatewayInstruments()
        gate = FlowGate(fleet, CLOCK, FlowConfig(), Tenants.load(None, None, CLOCK), instruments, holding=holding)
        routing = build_routing(fleet, CLOCK, DispatchConfig(), instruments)
        dispatcher = Dispatcher(fleet, CLOCK, DispatchConfig(), routing=routing, gate=gate)
        fleet.start()
        try:
            yield Pool(workers, fleet, holding, dispatcher, gate, TextService(dispatcher, byte_model(), admission=gate))
            await dispatcher.wait_idle()
            assert (holding.num_held, gate.controller.num_queued, gate.controller.num_sequences) == (0, 0, 0)
            await workers.idle()
        finally:
            await gate.stop()
            await fleet.stop()


async def test_requests_wait_for_the_first_worker_and_are_served_in_order(monkeypatch):
    sent: list[str] = []

    def decode_request(run: SampleRun) -> decode_pb2.DecodeRequest:
        sent.append(run.request.caller.request_id)
        return make(run)

    make = worker_calls.decode_request
    monkeypatch.setattr(worker_calls, "decode_request", decode_request)
    async with a_pool() as pool:
        asked = []
        for i in range(6):
            asked.append(asyncio.create_task(pool.ask(f"r{i}", priority=1 if i == 0 else 0)))
            await pool.holds(i + 1)
        pool.arrive()
        assert await asyncio.gather(*asked) == [4] * 6
    assert sent == ["r1", "r2", "r3", "r4", "r5", "r0"], "by class, and in order of arrival within a class"


async def test_all_samples_of_a_request_count_as_held():
    async with a_pool() as pool:
        asked = asyncio.create_task(pool.ask(samples=3))
        await pool.holds(3)
        pool.arrive()
        assert await asked == 12


async def test_requests_beyond_the_bound_get_a_retry_time():
    async with a_pool(max_held=1) as pool:
        first = asyncio.create_task(pool.ask())
        await pool.holds(1)
        with pytest.raises(Overloaded) as full:
            await pool.ask()
        assert (full.value.reason, bool(full.value.retry_after_seconds)) == ("POOL_EMPTY", True)
        pool.arrive()
        assert await first == 4


async def test_a_request_that_waited_too_long_fails_with_the_cause():
    async with a_pool(seconds=0.05) as pool:
        with pytest.raises(Unavailable, match="ns/p had no worker") as vain:
            await pool.ask()
        assert vain.value.retry_after_seconds


async def test_its_own_deadline_comes_first():
    async with a_pool() as pool:
        with pytest.raises(DeadlinePassed, match="in the queue"):
            await pool.ask(deadline=CLOCK.monotonic() + 0.05)


async def test_a_client_that_leaves_frees_its_place():
    async with a_pool() as pool:
        asked = asyncio.create_task(pool.ask())
        await pool.holds(1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (pool.holding.num_held, pool.gate.controller.num_queued) == (0, 0)


async def test_a_pool_scaled_to_zero_holds_its_queued_requests():
    async with a_pool() as pool:
        pool.workers.decode[0].max_sequences = 1
        blocked = asyncio.Event()
        pool.workers.decode[0].step = blocked.wait
        pool.arrive()
        await pool.fleet.wait_until(lambda fleet: any(view.takes_work for view in fleet.views()))
        first = asyncio.create_task(pool.ask("first"))
        await eventually(lambda: pool.gate.controller.num_sequences == 1)
        second = asyncio.create_task(pool.ask("second"))
        await eventually(lambda: pool.gate.controller.num_queued == 1)
        assert pool.holding.num_held == 0, "the request waits for room, not for a worker"
        pool.workers.decode[0].draining = True
        await pool.holds(1)
        pool.workers.decode[0].draining = False
        blocked.set()
        assert await asyncio.gather(first, second) == [4, 4]


async def test_an_admitted_sample_whose_pool_is_empty_is_held_too():
    """The last worker may leave after the admission of a request and before its dispatch."""
    async with a_pool() as pool:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, seed=1)
        request = Request(Caller(RequestId("r"), arrived=CLOCK.monotonic()), (1, 2), sampling)

        async def tokens() -> int:
            async with aclosing(pool.dispatcher.stream(request)) as events:
                return sum([len(event.tokens) async for event in events])

        asked = asyncio.create_task(tokens())
        await pool.holds(1)
        pool.arrive()
        assert await asked == 2
