"""What the tests of `kvferry.testing.faults` share: one engine's answers, and where their rows go."""

from collections.abc import Callable

import pytest

from kvferry.engine import LLM
from kvferry.testing import machine
from kvferry.testing.faults import page
from kvferry.testing.faults.traffic import Question, questions
from kvferry.testing.faults.trial import Row


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
