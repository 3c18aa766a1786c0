"""The text process: real processes; a job that misbehaves fails alone, and the next one is served."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from harness.fakes.byte_model import BOS, byte_model

from kvferry.core.errors import InvalidRequest, Overloaded, Unavailable
from kvferry.serving import text_process
from kvferry.serving.prompts import encode_text
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import JobEndedProcess, TextLimits, TextProcess

LIMITS = TextLimits(job_seconds=1.0, memory_bytes=512 << 20, max_waiting=3)


async def run(process: TextProcess, job: Any, *args: Any) -> Any:
    return await process.run("", 0, job, *args)


@asynccontextmanager
async def opened(**limits: Any) -> AsyncIterator[TextProcess]:
    process = TextProcess(partial(byte_model, 64), replace(LIMITS, **limits))
    process.start()
    async with asyncio.timeout(120):
        yield process
        await process.stop()


@pytest.fixture
async def process() -> AsyncIterator[TextProcess]:
    async with opened() as process:
        yield process


def pid(_model: TextModel) -> int:
    return os.getpid()


def loop_for_ever(_model: TextModel) -> None:
    while True:
        pass


def fill_memory(_model: TextModel) -> int:
    return len(bytearray(4 << 30))


def wait(_model: TextModel) -> None:
    signal.pause()


def crash(_model: TextModel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def overflow(_model: TextModel) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def divide(_model: TextModel) -> float:
    return 1 / 0


async def test_jobs_run_in_one_other_process_with_its_own_model(process: TextProcess) -> None:
    first, second = await run(process, pid), await run(process, pid)
    assert first == second != os.getpid()
    assert await run(process, encode_text, "hi") == [BOS, 104, 105]


async def test_errors_keep_their_reason_and_field(process: TextProcess) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await run(process, encode_text, "x" * 5000)
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
    with pytest.raises(InvalidRequest, match="cannot be processed: ZeroDivisionError"):
        await run(process, divide)


@pytest.mark.parametrize("job", [loop_for_ever, fill_memory, crash])
async def test_a_job_that_ends_the_process_fails_alone(process: TextProcess, job) -> None:
    before = await run(process, pid)
    bad, good = await asyncio.gather(run(process, job), run(process, encode_text, "hi"), return_exceptions=True)
    assert isinstance(bad, InvalidRequest)
    assert bad.reason == "PROMPT_TOO_COSTLY"
    assert good == [BOS, 104, 105]
    assert await run(process, pid) != before


@pytest.mark.parametrize(
    ("job", "cause", "was_killed"),
    [
        (loop_for_ever, r"more than 1 s of processor time;", False),
        (fill_memory, r"or 512 MiB;", False),
        (crash, r"or 512 MiB;", True),
        (overflow, r"ended the process that reads it \(SIGSEGV\);", False),
    ],
)
async def test_the_error_has_the_cause_of_the_end(process: TextProcess, job, cause: str, was_killed: bool) -> None:
    with pytest.raises(JobEndedProcess, match=cause) as caught:
        await run(process, job)
    assert caught.value.was_killed is was_killed


async def test_waiting_jobs_are_bounded(process: TextProcess) -> None:
    results = await asyncio.gather(*(run(process, encode_text, "hi") for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [list] * 3 + [Overloaded] * 2


async def test_a_caller_that_leaves_does_not_leave_its_job_to_the_next(process: TextProcess) -> None:
    leaving = asyncio.create_task(run(process, loop_for_ever))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await run(process, encode_text, "hi") == [BOS, 104, 105]


async def test_a_process_that_was_killed_between_jobs_costs_no_request(process: TextProcess) -> None:
    number = await run(process, pid)
    os.kill(number, signal.SIGKILL)
    assert await run(process, encode_text, "hi") == [BOS, 104, 105]
    assert await run(process, pid) != number


async def test_a_stopped_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(wall_seconds=1.0) as process:
        number = await run(process, pid)
        monkeypatch.setattr(text_process, "_START_SECONDS", 0.0)
        os.kill(number, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="did not respond"):
            await run(process, encode_text, "hi")
        monkeypatch.undo()
        assert await run(process, encode_text, "hi") == [BOS, 104, 105]


async def test_a_job_that_gets_no_processor_time_is_not_called_costly() -> None:
    async with opened(wall_seconds=0.5) as process:
        await run(process, pid)
        with pytest.raises(Overloaded, match="too busy to check the prompt"):
            await run(process, wait)


async def test_a_spare_process_takes_over_after_a_second_job_has_ended_one() -> None:
    async with opened() as process:
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await run(process, loop_for_ever)
        spares = {child.pid for child in multiprocessing.active_children()}
        with pytest.raises(InvalidRequest):
            await run(process, loop_for_ever)
        assert await run(process, pid) in spares


async def test_owners_take_turns_and_small_jobs_are_first() -> None:
    order: list[tuple[str, int]] = []

    async def measured(owner: str, size: int) -> None:
        await process.run(owner, size, pid)
        order.append((owner, size))

    async with opened(max_waiting=16) as process:
        await run(process, pid)
        await asyncio.gather(measured("a", 3), measured("a", 2), measured("a", 1), measured("b", 9))
    assert order == [("a", 3), ("b", 9), ("a", 1), ("a", 2)]


async def test_a_caller_that_leaves_while_it_waits_leaves_no_job(process: TextProcess) -> None:
    first = asyncio.create_task(run(process, pid))
    waiting = [asyncio.create_task(run(process, loop_for_ever)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await run(process, pid) == await first, "a cancelled job must not run, since it would end the process"


async def test_stop_waits_for_no_job_and_leaves_no_process() -> None:
    process = TextProcess(byte_model, LIMITS)
    number = await run(process, pid)
    running = asyncio.create_task(run(process, loop_for_ever))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await process.stop()
    with pytest.raises((asyncio.CancelledError, InvalidRequest)):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
