"""Masks: computed on threads, awaited for a bounded time, and failing only their own sequence."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.engine.execute.grammar.grammar_masks import GrammarMasks
from kvferry.engine.schedule.step.token_mask import Bits, unpacked
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.grammar import Grammar

CHOICE = Constraint(ConstraintKind.CHOICE, '["yes", "yet"]')
SECONDS = 30.0


class HeldCompiler(GrammarCompiler):
    """A compiler whose compilations wait until the test releases them, or fail."""

    def __init__(self) -> None:
        super().__init__(tiny.tokenizer(tiny.config()))
        self.go = threading.Event()
        self.fails: Exception | None = None

    def compile(self, constraint: Constraint) -> Grammar:
        assert self.go.wait(SECONDS)
        if self.fails is not None:
            raise self.fails
        return super().compile(constraint)


@pytest.fixture
def compiler() -> HeldCompiler:
    return HeldCompiler()


def masks(compiler: GrammarCompiler, notify: Callable[[], None] = lambda: None) -> GrammarMasks:
    return GrammarMasks(compiler, late_seconds=0.0, notify=notify)


def patient(compiler: GrammarCompiler) -> GrammarMasks:
    return GrammarMasks(compiler, late_seconds=SECONDS)


def ids(allowed: Bits | None) -> set[int]:
    """Return the tokens of a mask, which must be ready."""
    assert allowed is not None
    return set(np.flatnonzero(unpacked(allowed, tiny.config().vocab_size)).tolist())


def test_masks_follow_the_tokens(compiler: HeldCompiler) -> None:
    compiler.go.set()
    mask = patient(compiler).begin(CHOICE, [])
    for byte, following in ((b"y", b"e"), (b"e", b"st")):
        assert byte[0] in ids(mask.wait())
        mask = mask.after(list(byte))
        assert ids(mask.wait()) == set(following)


def test_a_mask_is_rebuilt_from_generated_tokens(compiler: HeldCompiler) -> None:
    compiler.go.set()
    assert ids(patient(compiler).begin(CHOICE, list(b"ye")).wait()) == set(b"st")


def test_a_late_mask_is_announced_when_it_is_ready(compiler: HeldCompiler) -> None:
    announced = threading.Event()
    mask = masks(compiler, announced.set).begin(CHOICE, [])
    assert mask.wait() is None
    assert not mask.is_ready
    compiler.go.set()
    assert announced.wait(SECONDS)
    assert mask.is_ready
    assert ids(mask.wait()) == set(b"y")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(InvalidRequest("bad", field="constraint"), InvalidRequest), (RuntimeError("of the library"), InvalidRequest)],
)
def test_an_error_is_that_of_its_sequence(compiler: HeldCompiler, raised: Exception, expected: type[Exception]) -> None:
    compiler.fails = raised
    compiler.go.set()
    owner = patient(compiler)
    mask = owner.begin(CHOICE, [])
    with pytest.raises(expected):
        mask.wait()
    compiler.fails = None
    assert ids(owner.begin(CHOICE, []).wait()) == set(b"y")
