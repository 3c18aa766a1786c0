"""Constraints are checked in another process; a schema that never compiles ends only that process."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.rpc.text import constraint_check
from kvferry.rpc.text.constraint_check import CHECK_SECONDS, ConstraintCheck
from kvferry.rpc.text.model_text import open_text_model

GOOD = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')
ENDLESS = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999999}')
"""The automaton of this schema has a state for each remainder."""


@pytest.fixture
async def check() -> AsyncIterator[ConstraintCheck]:
    opened = ConstraintCheck(partial(open_text_model, "tiny"))
    async with asyncio.timeout(120):
        yield opened
        await opened.stop()


async def test_a_good_constraint_passes_and_a_bad_one_is_rejected(check: ConstraintCheck) -> None:
    await check.check(GOOD)
    for _ in range(2):  # computed first, and cached afterwards
        with pytest.raises(InvalidRequest, match="frob") as caught:
            await check.check(Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "frob"}'))
        assert (caught.value.field, caught.value.reason) == ("constraint", "CONSTRAINT_INVALID")


async def test_a_constraint_that_never_compiles_is_rejected_in_time_and_remembered(check: ConstraintCheck) -> None:
    await check.check(GOOD)  # starts the process
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="simplify") as caught:
        await check.check(ENDLESS)
    assert (caught.value.field, caught.value.reason) == ("constraint", "CONSTRAINT_TOO_COSTLY")
    assert time.monotonic() - begun >= CHECK_SECONDS / 2, "the constraint was not compiled"
    begun = time.monotonic()
    with pytest.raises(InvalidRequest):
        await check.check(ENDLESS)
    assert time.monotonic() - begun < CHECK_SECONDS / 2, "the constraint was compiled again"
    await check.check(Constraint(ConstraintKind.CHOICE, '["another"]'))


async def test_verdicts_are_bounded(check: ConstraintCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_check, "MAX_VERDICTS", 2)
    for number in range(4):
        await check.check(Constraint(ConstraintKind.CHOICE, f'["{number}"]'))
    assert len(check._verdicts) == 2
