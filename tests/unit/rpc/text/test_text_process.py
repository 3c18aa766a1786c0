"""The text process: real processes; a job that misbehaves fails alone, and the next one is served."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial

import pytest
from harness.fakes.byte_model import BOS, byte_model

from kvferry.core.errors import InvalidRequest, Overloaded, Unavailable
from kvferry.rpc.text import text_process
from kvferry.rpc.text.prompts import encode_text
from kvferry.rpc.text.text_model import TextModel
from kvferry.rpc.text.text_process import TextLimits, TextProcess

LIMITS = TextLimits(job_seconds=1.0, memory_bytes=512 << 20, max_waiting=3)


@pytest.fixture
async def process() -> AsyncIterator[TextProcess]:
    opened = TextProcess(partial(byte_model, 64), LIMITS)
    opened.start()
    async with asyncio.timeout(60):
        yield opened
        await opened.stop()


def pid(_model: TextModel) -> int:
    return os.getpid()


def loop_for_ever(_model: TextModel) -> None:
    while True:
        pass


def fill_memory(_model: TextModel) -> int:
    return len(bytearray(4 << 30))


def crash(_model: TextModel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide(_model: TextModel) -> float:
    return 1 / 0


async def test_jobs_run_in_one_other_process_with_its_own_model(process: TextProcess) -> None:
    first, second = await process.run(pid), await process.run(pid)
    assert first == second != os.getpid()
    assert await process.run(encode_text, "hi") == [BOS, 104, 105]


async def test_errors_keep_their_reason_and_field(process: TextProcess) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await process.run(encode_text, "x" * 5000)
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
    with pytest.raises(InvalidRequest, match="cannot be processed: ZeroDivisionError"):
        await process.run(divide)


@pytest.mark.parametrize("job", [loop_for_ever, fill_memory, crash])
async def test_a_job_that_ends_the_process_fails_alone(process: TextProcess, job) -> None:
    before = await process.run(pid)
    bad, good = await asyncio.gather(process.run(job), process.run(encode_text, "hi"), return_exceptions=True)
    assert isinstance(bad, InvalidRequest)
    assert bad.reason == "PROMPT_TOO_COSTLY"
    assert good == [BOS, 104, 105]
    assert await process.run(pid) != before


async def test_waiting_jobs_are_bounded(process: TextProcess) -> None:
    results = await asyncio.gather(*(process.run(encode_text, "hi") for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [list] * 3 + [Overloaded] * 2


async def test_a_caller_that_leaves_does_not_leave_its_job_to_the_next(process: TextProcess) -> None:
    leaving = asyncio.create_task(process.run(loop_for_ever))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await process.run(encode_text, "hi") == [BOS, 104, 105]


async def test_a_process_that_was_killed_between_jobs_costs_no_request(process: TextProcess) -> None:
    number = await process.run(pid)
    os.kill(number, signal.SIGKILL)
    assert await process.run(encode_text, "hi") == [BOS, 104, 105]
    assert await process.run(pid) != number


async def test_a_stopped_process_is_replaced(monkeypatch: pytest.MonkeyPatch, process: TextProcess) -> None:
    number = await process.run(pid)
    monkeypatch.setattr(text_process, "_START_SECONDS", 0.0)
    os.kill(number, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="did not respond"):
        await process.run(encode_text, "hi")
    monkeypatch.undo()
    assert await process.run(encode_text, "hi") == [BOS, 104, 105]


async def test_a_caller_that_leaves_while_it_waits_leaves_no_job(process: TextProcess) -> None:
    first = asyncio.create_task(process.run(pid))
    waiting = [asyncio.create_task(process.run(loop_for_ever)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await process.run(pid) == await first, "a cancelled job must not run, since it would end the process"


async def test_stop_waits_for_no_job_and_leaves_no_process() -> None:
    process = TextProcess(byte_model, LIMITS)
    number = await process.run(pid)
    running = asyncio.create_task(process.run(loop_for_ever))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await process.stop()
    with pytest.raises((asyncio.CancelledError, InvalidRequest)):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
