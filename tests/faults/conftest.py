"""Fixtures of the fault tests: one engine's answers, and the file of their rows."""

from collections.abc import Callable

import pytest
from harness import machine
from harness.faults import page
from harness.faults.traffic import Question, questions
from harness.faults.trial import Row

from kvferry.engine import LLM


@pytest.fixture(scope="session")
def one_engine() -> LLM:
    return LLM("tiny", dtype="float32", kv_bytes=16 << 20)


@pytest.fixture(scope="session")
def asked(one_engine: LLM) -> list[Question]:
    return questions(one_engine)


@pytest.fixture(scope="session")
def keep() -> Callable[[Row], None]:
    """Takes a row; they become docs/faults.md."""
    processor, commit = machine.cpu_name(), machine.commit()
    return lambda row: page.record(row, processor, commit)
