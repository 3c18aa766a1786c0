"""A vector is computed by one worker, or by another one after a loss; no state is left."""

import asyncio

import numpy as np
import pytest
from harness.fakes.scripted_fleet import ScriptedFleet, scripted_fleet
from harness.fakes.scripted_tokens import vector_of
from harness.fakes.scripted_worker import Act, Fault

from kvferry.core.clock import SystemClock
from kvferry.core.errors import STEP_FAILED, DeadlinePassed, InvalidRequest, InvariantBroken, Overloaded, RequestRefused
from kvferry.core.ids import RequestId
from kvferry.core.inference.pooling import Pooling, PoolingParams
from kvferry.core.sampling import SamplingParams
from kvferry.gateway.decide.config import DispatchConfig
from kvferry.serving.request import Caller, Request
from kvferry.serving.token_source import Vector

PROMPT = list(b"tell me a story of a ferry")
MEAN = PoolingParams(Pooling.MEAN, dimensions=5)


def ask(seconds: float | None = None, index: int = 0, priority: int = 0) -> Request:
    now = SystemClock().monotonic()
    caller = Caller(
        RequestId("r"),
        "t",
        "s",
        priority=priority,
        arrived=now,
        deadline=None if seconds is None else now + seconds,
    )
    return Request(caller, PROMPT, SamplingParams(max_tokens=1, temperature=0.0, seed=0), index)


async def pool(fleet: ScriptedFleet, request: Request) -> Vector:
    async with asyncio.timeout(20):
        return await fleet.dispatcher.pool(request, MEAN)


async def idle(fleet: ScriptedFleet) -> None:
    async with asyncio.timeout(10):
        await fleet.dispatcher.wait_idle()
    assert fleet.dispatcher.open_streams == 0


@pytest.mark.parametrize(("prefill", "decode", "both"), [(1, 1, 0), (0, 0, 1), (1, 1, 1), (1, 0, 0)])
async def test_a_worker_that_computes_prompts_computes_the_vector(prefill, decode, both):
    async with scripted_fleet(prefill=prefill, decode=decode, both=both) as fleet:
        found = await pool(fleet, ask(priority=3))
        assert np.array_equal(found.values, vector_of(PROMPT, MEAN))
        assert (found.num_prompt_tokens, found.num_cached_tokens) == (len(PROMPT), 1)
        worker = (fleet.workers.prefill or fleet.workers.both)[0]
        (pooling_request,) = worker.pools
        assert (pooling_request.request_id, list(pooling_request.token_ids), pooling_request.priority) == (
            "r",
            PROMPT,
            3,
        )
        assert pooling_request.scope == ask().caller.scope != "t"
        (sample,) = fleet.dispatcher.journal.find("t", RequestId("r"))
        assert (sample["outcome"], sample["prompt_tokens"], sample["output_tokens"]) == ("done", len(PROMPT), 0)
        assert sample["routes"][0]["reason"] == "pooling"
        await idle(fleet)


@pytest.mark.parametrize("act", [Act.CRASH, Act.DIE])
async def test_a_lost_worker_s_vector_is_computed_by_another_one(act):
    async with scripted_fleet(prefill=2, decode=1) as fleet:
        shared = fleet.workers.prefill[0].faults["pool"]
        fleet.workers.prefill[1].faults["pool"] = shared
        shared.append(Fault(act))
        found = await pool(fleet, ask())
        assert np.array_equal(found.values, vector_of(PROMPT, MEAN))
        assert [len(worker.pools) for worker in fleet.workers.prefill] == [1, 1]
        await idle(fleet)


async def test_a_busy_worker_s_vector_is_computed_by_another_one():
    async with scripted_fleet(prefill=2, decode=1) as fleet:
        shared = fleet.workers.prefill[0].faults["pool"]
        fleet.workers.prefill[1].faults["pool"] = shared
        shared.append(Fault(Act.FAIL, error=Overloaded("the queue is full")))
        assert (await pool(fleet, ask())).num_prompt_tokens == len(PROMPT)
        await idle(fleet)


async def test_a_request_that_fails_on_every_worker_is_not_repeated():
    async with scripted_fleet(prefill=2, decode=1) as fleet:
        for worker in fleet.workers.prefill:
            worker.faults["pool"].append(Fault(Act.FAIL, error=InvalidRequest("no", field="prompt")))
        with pytest.raises(InvalidRequest, match="no"):
            await pool(fleet, ask())
        assert sum(len(worker.pools) for worker in fleet.workers.prefill) == 1
        await idle(fleet)


async def test_a_request_in_two_failed_steps_is_refused():
    async with scripted_fleet(prefill=3, decode=1) as fleet:
        for worker in fleet.workers.prefill:
            worker.faults["pool"].append(Fault(Act.FAIL, error=InvariantBroken("step", reason=STEP_FAILED)))
        with pytest.raises(RequestRefused, match="2 workers failed"):
            await pool(fleet, ask())
        await idle(fleet)


async def test_the_deadline_ends_the_call():
    async with scripted_fleet(prefill=1, decode=1) as fleet:
        fleet.workers.prefill[0].faults["pool"].append(Fault(Act.HANG))
        with pytest.raises(DeadlinePassed):
            await pool(fleet, ask(seconds=0.2))
        await idle(fleet)


async def test_cancellation_ends_the_worker_s_call():
    async with scripted_fleet(prefill=1, decode=1) as fleet:
        worker = fleet.workers.prefill[0]
        worker.faults["pool"].append(Fault(Act.HANG))
        task = asyncio.create_task(fleet.dispatcher.pool(ask(), MEAN))
        await worker.fault_reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(fleet)
        await fleet.workers.idle()
        (sample,) = fleet.dispatcher.journal.find("t", RequestId("r"))
        assert sample["outcome"] == "cancelled"


async def test_vectors_count_towards_the_limit_of_streams():
    async with scripted_fleet(prefill=1, decode=1, config=DispatchConfig(max_streams=1)) as fleet:
        worker = fleet.workers.prefill[0]
        worker.faults["pool"].append(Fault(Act.HANG))
        task = asyncio.create_task(fleet.dispatcher.pool(ask(), MEAN))
        await worker.fault_reached.wait()
        with pytest.raises(Overloaded, match="max_streams is 1"):
            await pool(fleet, ask())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(fleet)
