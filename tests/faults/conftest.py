"""Fixtures of the fault tests: answers of one engine, and the file of result rows."""

from collections.abc import Callable

import pytest
from harness import machine
from harness.faults import page
from harness.faults.traffic import Question, questions
from harness.faults.trial import Row

from kvferry.engine import LLM


@pytest.fixture(scope="session")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kv_memory=16 << 20)


@pytest.fixture(scope="session")
def question_list(one_engine: LLM) -> list[Question]:
    return questions(one_engine)


@pytest.fixture(scope="session")
def keep() -> Callable[[Row], None]:
    """A function that records a row; the rows make docs/faults.md."""
    processor, commit = machine.cpu_name(), machine.commit()
    return lambda row: page.record(row, processor, commit)
