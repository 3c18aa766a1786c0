"""Constraints are checked in another process; a schema that never compiles ends only that process."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.serving import constraint_check
from kvferry.serving.constraint_check import CHECK_SECONDS, ConstraintCheck
from kvferry.serving.model_text import open_text_model
from kvferry.serving.text_process import JobEndedProcess
from kvferry.text.grammar.compiler import MAX_GRAMMAR_BYTES

GOOD = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')


def multiple_of(number: int) -> Constraint:
    """Return a constraint of a few bytes whose automaton has a state for each remainder."""
    return Constraint(ConstraintKind.JSON_SCHEMA, f'{{"type": "integer", "multipleOf": {number}}}')


@pytest.fixture
async def check() -> AsyncIterator[ConstraintCheck]:
    opened = ConstraintCheck(partial(open_text_model, "tiny"))
    async with asyncio.timeout(120):
        yield opened
        await opened.stop()


async def test_the_memory_of_a_constraint_is_measured_and_bounded(check: ConstraintCheck) -> None:
    small, large = await check.check(GOOD, ""), await check.check(multiple_of(4999), "")
    assert 10_000 < small < 1 << 20
    assert small + (1 << 20) < large < MAX_GRAMMAR_BYTES
    assert await check.check(multiple_of(4999), "") == large, "the verdict is kept"
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"takes \d+ MiB of memory .* at most 32 MiB") as caught:
            await check.check(multiple_of(99_991), "")
        assert (caught.value.field, caught.value.reason) == ("constraint", "CONSTRAINT_TOO_COSTLY")
    assert await check.check(GOOD, "") == small, "the process has not ended"


async def test_a_good_constraint_passes_and_a_bad_one_is_rejected(check: ConstraintCheck) -> None:
    await check.check(GOOD, "")
    for _ in range(2):  # computed first, and cached afterwards
        with pytest.raises(InvalidRequest, match="frob") as caught:
            await check.check(Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "frob"}'), "")
        assert (caught.value.field, caught.value.reason) == ("constraint", "CONSTRAINT_INVALID")


async def test_a_constraint_that_never_compiles_is_rejected_in_time_and_remembered(check: ConstraintCheck) -> None:
    endless = multiple_of(99_999_999)
    await check.check(GOOD, "")  # starts the process
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="simplify") as caught:
        await check.check(endless, "")
    assert (caught.value.field, caught.value.reason) == ("constraint", "CONSTRAINT_TOO_COSTLY")
    assert time.monotonic() - begun >= CHECK_SECONDS / 2, "the constraint was not compiled"
    begun = time.monotonic()
    with pytest.raises(InvalidRequest):
        await check.check(endless, "")
    assert time.monotonic() - begun < CHECK_SECONDS / 2, "the constraint was compiled again"
    await check.check(Constraint(ConstraintKind.CHOICE, '["another"]'), "")


@pytest.mark.parametrize("was_killed", [False, True])
async def test_a_crash_is_remembered_unless_somebody_killed_the_process(
    check: ConstraintCheck, monkeypatch: pytest.MonkeyPatch, was_killed: bool
) -> None:
    ended = JobEndedProcess("the process ended", field="constraint", reason="CONSTRAINT_TOO_COSTLY")
    ended.was_killed = was_killed
    calls = []

    async def run(*given: object) -> None:
        calls.append(given)
        raise ended

    monkeypatch.setattr(check._process, "run", run)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="the process ended"):
            await check.check(GOOD, "")
    assert len(calls) == (3 if was_killed else 1)


async def test_verdicts_are_bounded(check: ConstraintCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_check, "MAX_VERDICTS", 2)
    for number in range(4):
        await check.check(Constraint(ConstraintKind.CHOICE, f'["{number}"]'), "")
    assert len(check._verdicts) == 2


class Held:
    """Stands for the process: a check ends when it is released."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.go = asyncio.Event()
        self.error: InvalidRequest | None = None

    async def run(self, *_: object) -> None:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error


async def test_requests_with_the_same_constraint_wait_for_one_check(
    check: ConstraintCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setattr(check, "_process", held)
    held.error = InvalidRequest("no")
    waiting = [asyncio.create_task(check.check(GOOD, "")) for _ in range(200)]
    waiting.append(asyncio.create_task(check.check(GOOD, "another tenant")))
    await asyncio.sleep(0)
    waiting[0].cancel()  # the first request, which began the check
    await asyncio.sleep(0)
    held.go.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert {type(result) for result in results[1:]} == {InvalidRequest}
    assert (held.begun, held.cancelled, check._running) == (2, 0, {}), "one for each tenant"


async def test_a_check_that_no_request_waits_for_is_cancelled(
    check: ConstraintCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    monkeypatch.setattr(check, "_process", held)
    waiting = [asyncio.create_task(check.check(GOOD, "")) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert (held.begun, held.cancelled, check._running) == (1, 1, {})
    held.go.set()
    await check.check(GOOD, "")
    assert held.begun == 2
