"""The engine's thread and its streams: after disconnects, failures and stops, every stream ends and no page leaks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from harness.engines.held_runner import HeldRunner
from harness.fakes.engines import a_request, an_engine, expected_tokens
from harness.idle import assert_idle
from harness.waiting import eventually

from kvferry.core.errors import STEP_FAILED, InvalidRequest, InvariantBroken, KvferryError, Overloaded, Unavailable
from kvferry.core.sampling import FinishReason
from kvferry.engine.engine import Engine
from kvferry.engine.loop.engine_loop import CommandQueue, EngineLoop
from kvferry.engine.loop.engine_stream import EngineStream, StreamItem
from kvferry.engine.schedule.blocks.prefix_index import CacheChange
from kvferry.engine.schedule.step.step import StepPlan, StepResult

SECONDS = 30.0


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[tuple[EngineLoop, list[BaseException]]]:
    """Run the engine on its thread; yield the loop and its failures. Without a failure, the engine must be idle after
    the stop.
    """
    failures: list[BaseException] = []
    loop = EngineLoop(engine, CommandQueue(), name="engine under test", on_failure=failures.append)
    loop.start()
    try:
        yield loop, failures
    finally:
        await loop.stop()
    if not failures:
        assert_idle(engine)


async def everything(stream: EngineStream) -> list[StreamItem]:
    return [item async for item in stream]


async def tokens_of(stream: EngineStream) -> list[int]:
    return [t.token_id for item in await everything(stream) if item.update is not None for t in item.update.tokens]


async def test_each_stream_gets_its_own_tokens_in_order_and_then_ends() -> None:
    engine, _ = an_engine()
    async with running(engine) as (loop, failures):
        prompts = {f"r{i}": [i, i + 1] for i in range(6)}
        streams = [loop.submit(a_request(name, prompt, max_tokens=9)) for name, prompt in prompts.items()]
        outputs = await asyncio.gather(*map(everything, streams))
        for stream, prompt, items in zip(streams, prompts.values(), outputs, strict=True):
            updates = [item.update for item in items if item.update is not None]
            assert [t.token_id for u in updates for t in u.tokens] == expected_tokens(prompt, 9)
            assert [u.finish_reason for u in updates] == [None] * 8 + [FinishReason.LENGTH]
            assert stream.finished
            loop.close(stream)
        assert failures == []


async def test_streams_in_parts_have_all_tokens() -> None:
    engine, _ = an_engine()
    loop = EngineLoop(engine, CommandQueue(), name="engine", on_failure=lambda _: None, stream_interval=4)
    loop.start()
    try:
        prompts = {f"r{i}": [i, i + 1] for i in range(3)}
        streams = [loop.submit(a_request(name, prompt, max_tokens=10)) for name, prompt in prompts.items()]
        outputs = await asyncio.gather(*map(everything, streams))
        for stream, prompt, items in zip(streams, prompts.values(), outputs, strict=True):
            tokens = [t.token_id for item in items if item.update is not None for t in item.update.tokens]
            assert tokens == expected_tokens(prompt, 10)
            loop.close(stream)
        cut = loop.submit(a_request("cut", [7], max_tokens=100))
        while (await anext(cut)).update is None:
            pass
        loop.close(cut)
        await eventually(lambda: loop._interval.num_open == 0)
    finally:
        await loop.stop()
    assert_idle(engine)


async def test_a_reset_of_the_cache_is_confirmed_and_published() -> None:
    engine, _ = an_engine()
    published: list[CacheChange] = []
    loop = EngineLoop(
        engine, CommandQueue(), name="engine", on_failure=lambda _: None, on_cache_changes=published.extend
    )
    loop.start()
    try:
        stream = loop.submit(a_request("a", list(range(9)), max_tokens=1))
        await everything(stream)
        assert await asyncio.wait_for(loop.reset_prefix_cache(), SECONDS) == 2
        loop.close(stream)
        assert await asyncio.wait_for(loop.reset_prefix_cache(), SECONDS) == 0
        await eventually(lambda: len(published) == 4)
        assert [change.stored is None for change in published] == [False, False, True, True]
    finally:
        await loop.stop()
    with pytest.raises(Unavailable):
        await loop.reset_prefix_cache()


@pytest.mark.parametrize("bad", [[], [9999], [1] * 200], ids=["empty", "unknown token", "too long"])
async def test_errors_of_intake_arrive_through_the_stream_and_affect_no_other(bad: list[int]) -> None:
    engine, _ = an_engine()
    async with running(engine) as (loop, failures):
        with loop.submit(a_request("bad", bad)) as refused, loop.submit(a_request("good", [1, 2])) as good:
            with pytest.raises(InvalidRequest):
                await everything(refused)
            assert await everything(refused) == [], "an error ends the stream"
            assert await tokens_of(good) == expected_tokens([1, 2], 4)
        assert failures == []


async def test_a_full_queue_is_an_error_of_one_stream() -> None:
    engine, runner = an_engine()
    engine._max_waiting = 1
    held = runner.run = HeldRunner(runner)  # type: ignore[method-assign, assignment]
    async with running(engine) as (loop, _):
        with loop.submit(a_request("runs", [1])) as first:
            await held.wait_reached()
            with loop.submit(a_request("waits", [2])) as second, loop.submit(a_request("refused", [3])) as third:
                held.go.set()
                with pytest.raises(Overloaded):
                    await everything(third)
                assert await tokens_of(first) == expected_tokens([1], 4)
                assert await tokens_of(second) == expected_tokens([2], 4)


async def test_a_stream_closed_during_the_step_of_its_export_releases_the_pages() -> None:
    engine, runner = an_engine()
    held = runner.run = HeldRunner(runner)  # type: ignore[method-assign, assignment]
    async with running(engine) as (loop, _):
        with loop.submit(a_request("leaves", [1] * 10, exports=True)):
            await held.wait_reached()
        held.go.set()  # the step ends; its export has no reader
        with loop.submit(a_request("after", [2])) as after:
            await everything(after)  # results are delivered in step order, so the exporting step has ended
    assert engine.load().exports == 0


async def test_a_stream_closed_with_an_untaken_export_releases_its_pages() -> None:
    engine, _ = an_engine()
    async with running(engine) as (loop, _), asyncio.timeout(SECONDS):
        with loop.submit(a_request("leaves", [1] * 10, exports=True)) as stream:
            with loop.submit(a_request("beside", [2], max_tokens=9)) as beside:
                await everything(beside)
            assert stream.finished, "the export is in the stream and has not been read"
    assert engine.load().exports == 0


async def test_an_export_that_was_taken_stays_until_it_is_released() -> None:
    engine, _ = an_engine()
    async with running(engine) as (loop, _):
        with loop.submit(a_request("prompt", [1] * 10, exports=True)) as stream:
            started, item = await everything(stream)
            assert started.is_started
            assert item.export is not None
        with loop.submit(a_request("after", [2])) as after:
            await everything(after)
        assert loop.load.exports == 1
        loop.release_export(item.export)
        loop.release_export(item.export)


async def test_a_closed_stream_aborts_its_request() -> None:
    engine, runner = an_engine()
    held = runner.run = HeldRunner(runner, first=3)  # type: ignore[method-assign, assignment]
    async with running(engine) as (loop, _):
        with loop.submit(a_request("long", [1], max_tokens=100)) as stream:
            assert (await anext(stream)).is_started
            assert (await anext(stream)).update is not None
            await held.wait_reached()
        held.go.set()
        with loop.submit(a_request("after", [2], max_tokens=2)) as after:
            await everything(after)
    assert held.steps <= 6, "the remaining tokens were not computed"


async def test_ready_items_are_taken_without_waiting_and_an_error_stays_for_the_next_read() -> None:
    engine, _ = an_engine()
    stream = EngineLoop(engine, CommandQueue(), name="never started", on_failure=lambda _: None).submit(
        a_request("a", [1])
    )
    assert stream.take_ready() == []
    stream.put(StreamItem(export=1))
    stream.put(StreamItem(export=2))
    stream.put(Unavailable("gone"))
    assert [item.export for item in stream.take_ready()] == [1, 2]
    assert stream.take_ready() == []
    with pytest.raises(Unavailable, match="gone"):
        await anext(stream)


async def test_an_engine_failure_reaches_every_stream_and_the_failure_callback() -> None:
    engine, runner = an_engine()
    held = runner.run = HeldRunner(runner)  # type: ignore[method-assign, assignment]
    broken = ZeroDivisionError("a kernel broke")

    def fail(plan: StepPlan) -> StepResult:
        raise broken

    held._run = fail
    async with running(engine) as (loop, failures), asyncio.timeout(SECONDS):
        streams = [loop.submit(a_request(name, [1, 2])) for name in ("a", "b")]
        await held.wait_reached()
        streams.append(loop.submit(a_request("meanwhile", [3])))
        held.go.set()
        for stream in streams[:2]:  # these requests were in the failed step, so either may be the cause
            with stream, pytest.raises(InvariantBroken) as caught:
                await everything(stream)
            assert caught.value.reason == STEP_FAILED
        with streams[2], pytest.raises(Unavailable, match="the engine has stopped"):
            await everything(streams[2])
        assert failures == [broken]
        with pytest.raises(Unavailable, match="the engine has stopped"):
            loop.submit(a_request("late", [1]))


async def test_a_broken_invariant_at_intake_stops_the_engine_too() -> None:
    engine, runner = an_engine()
    held = runner.run = HeldRunner(runner)  # type: ignore[method-assign, assignment]
    async with running(engine) as (loop, failures), asyncio.timeout(SECONDS):
        loop.submit(a_request("twice", [1]))
        await held.wait_reached()
        again = loop.submit(a_request("twice", [1]))
        held.go.set()
        with pytest.raises(KvferryError):
            await everything(again)
        assert "added twice" in str(failures[0])


async def test_stop_ends_open_streams_after_the_step_in_progress() -> None:
    engine, runner = an_engine()
    held = runner.run = HeldRunner(runner, first=2)  # type: ignore[method-assign, assignment]
    loop = EngineLoop(engine, CommandQueue(), name="engine under test", on_failure=lambda _: None)
    loop.start()
    stream = loop.submit(a_request("open", [1], max_tokens=100))
    await held.wait_reached()
    stopping = asyncio.create_task(loop.stop())
    await asyncio.sleep(0)  # lets `stop` post its command
    held.go.set()
    await stopping
    assert len([item for item in stream.take_ready() if item.update is not None]) <= 2
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(stream)
    assert held.steps == 2
    loop.close(stream)


async def test_no_request_is_accepted_after_stop() -> None:
    engine, _ = an_engine()
    async with running(engine) as (loop, _):
        pass
    with pytest.raises(Unavailable):  # the stream would never end
        loop.submit(a_request("late", [1]))
    await loop.stop()
