"""Recordings of a running engine: results of a call, and a log that equals the schedule of a live run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from harness.idle import assert_idle

from kvferry.bench.profiling import profile_engine, spans_of
from kvferry.bench.step_replay import engine_for, replay
from kvferry.core.clock import SystemClock
from kvferry.core.errors import InvalidRequest, Overloaded, UsageError
from kvferry.core.ids import Incarnation, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine import LLM
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.observe.log_file import read_log
from kvferry.engine.observe.watch import NO_WATCH, StepWatch
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.simulator.worker.step_replay import StepReplay
from kvferry.v1 import worker_admin_pb2
from kvferry.workers.calls.context import UnitIdentity, WorkerContext
from kvferry.workers.services.profiling import Profiling

SETTINGS = EngineSettings("tiny", dtype="float32", kv_memory=4 << 20, threads=1)


def a_call(steps: int = 500, seconds: float = 60.0, **more: bool) -> worker_admin_pb2.ProfileRequest:
    return worker_admin_pb2.ProfileRequest(steps=steps, timeout_seconds=seconds, **more)


def a_request(number: int) -> EngineRequest:
    """Return one of several requests: different lengths, some with a common prefix, some sampled."""
    own = [5 + (number * 7 + index) % 90 for index in range(3 + 11 * number % 70)]
    prompt = [*range(10, 42), *own] if number % 3 else own
    sampling = SamplingParams(temperature=0.0 if number % 2 else 0.8, seed=number, max_tokens=4 + 5 * number % 40)
    return EngineRequest(RequestId(f"r{number}"), prompt, sampling)


@asynccontextmanager
async def profiled() -> AsyncIterator[tuple[Profiling, EngineLoop, LLM]]:
    llm = LLM.of(SETTINGS)
    loop = EngineLoop(llm.engine, CommandQueue(), name="engine under test", on_failure=lambda _: None)
    loop.start()
    context = WorkerContext(
        UnitIdentity(Incarnation("0" * 16)),
        "both",
        "tiny",
        llm.runner.kv.layout,
        "tcp",
        "",
        512,
        loop,
        SystemClock(),
    )
    try:
        yield Profiling(context), loop, llm
    finally:
        await loop.stop()
    assert_idle(llm.engine)


async def record(profiling: Profiling, call: worker_admin_pb2.ProfileRequest) -> tuple[bytes, bytes]:
    parts = [part async for part in profiling.record(call)]
    return b"".join(part.trace for part in parts), b"".join(part.log for part in parts)


async def serve(loop: EngineLoop, count: int) -> None:
    """Submit requests while others run. The number of steps between two arrivals depends on the threads."""

    async def one(number: int) -> None:
        with loop.submit(a_request(number)) as stream:
            async for item in stream:
                if number % 5 == 4 and item.update is not None:
                    return  # the client leaves

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
            for _ in range(number % 4 * 10):
                await asyncio.sleep(0)


async def watch_of(loop: EngineLoop) -> StepWatch:
    """Return the engine's watch after all commands so far."""
    await loop.unpin_prefix("", [])
    return loop._engine.watch


async def test_the_log_of_a_live_run_is_its_schedule_and_has_its_tokens() -> None:
    async with profiled() as (profiling, loop, _):
        recording = asyncio.create_task(record(profiling, a_call(seconds=600.0, tokens=True)))
        while (await watch_of(loop)) is NO_WATCH:
            pass
        await serve(loop, 20)
        loop._engine.watch.finish()
        trace, text = await recording
    log = read_log(text.decode().splitlines())
    assert log.obstacle == ""
    assert log.engine.runs_ahead
    assert any(step.is_ahead for step in log.steps)
    assert len(log.requests) == 20
    done = StepReplay(log).run()
    assert (done.difference, done.num_steps) == (None, len(log.steps))
    again = replay(log, engine_for(log, SETTINGS))
    assert again.is_equal
    assert again.num_tokens == sum(len(ids) for step in log.steps for _, ids in step.tokens) > 100
    spans = spans_of(json.loads(trace))
    assert {span.name for span in spans} >= {"plan", "compute", "record", "forward"}
    last = max(number for number, step in enumerate(log.steps) if step.tokens)
    log.steps[last].tokens[0][1][0] += 1
    assert replay(log, engine_for(log, SETTINGS)).tokens_differ_at == last


async def test_a_call_ends_after_its_steps_or_its_time() -> None:
    async with profiled() as (profiling, loop, _):
        recording = asyncio.create_task(record(profiling, a_call(steps=3)))
        while (await watch_of(loop)) is NO_WATCH:
            pass
        with pytest.raises(Overloaded, match="another call"):
            await record(profiling, a_call())
        await serve(loop, 1)
        _, text = await recording
        log = read_log(text.decode().splitlines())
        assert sum(bool(step.plan) for step in log.steps) == 3
        assert not log.has_tokens
        assert (await watch_of(loop)) is NO_WATCH
        _, text = await record(profiling, a_call(seconds=0.01, reset_prefix_cache=True))
        idle = read_log(text.decode().splitlines())
        assert idle.obstacle == ""
        assert not any(step.plan for step in idle.steps)


async def test_a_cancelled_call_ends_its_recording() -> None:
    async with profiled() as (profiling, loop, _):
        recording = asyncio.create_task(record(profiling, a_call()))
        while (await watch_of(loop)) is NO_WATCH:
            pass
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording
        assert (await watch_of(loop)) is NO_WATCH
        await record(profiling, a_call(seconds=0.01))


@pytest.mark.parametrize(
    ("call", "field"),
    [(a_call(0), "steps"), (a_call(10_001), "steps"), (a_call(1, 0.0), "timeout_seconds"),
     (a_call(1, float("nan")), "timeout_seconds"), (a_call(1, 601.0), "timeout_seconds")],
)  # fmt: skip
async def test_numbers_out_of_range_are_refused(call: worker_admin_pb2.ProfileRequest, field: str) -> None:
    async with profiled() as (profiling, _, _):
        with pytest.raises(InvalidRequest) as caught:
            await record(profiling, call)
        assert caught.value.field == field


def test_an_engine_that_differs_is_refused() -> None:
    llm = LLM.of(SETTINGS)
    log = profile_engine(llm, SystemClock(), steps=4, shapes=[(4, 2)], has_tokens=True).log
    with pytest.raises(UsageError, match="must equal those of the log"):
        replay(log, LLM.of(EngineSettings("tiny", dtype="float32", kv_memory=8 << 20, threads=1)).engine)
    log.has_tokens = False
    with pytest.raises(UsageError, match="has no tokens"):
        replay(log, llm.engine)
