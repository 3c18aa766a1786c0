"""Masks: computed on threads, awaited for a bounded time, and failing only their own sequence."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import GenerationFailed, InvalidRequest
from kvferry.engine.grammar.grammar_masks import GrammarMasks
from kvferry.engine.plan.token_mask import Bits, unpacked
from kvferry.model import tiny
from kvferry.model.grammar.grammar import Grammar
from kvferry.model.grammar.vocabulary import GrammarVocabulary

CHOICE = Constraint(ConstraintKind.CHOICE, '["yes", "yet"]')
SECONDS = 30.0


class HeldVocabulary(GrammarVocabulary):
    """A vocabulary whose compilations wait until the test releases them, or fail."""

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
def vocabulary() -> HeldVocabulary:
    return HeldVocabulary()


def masks(vocabulary: GrammarVocabulary, notify: Callable[[], None] = lambda: None) -> GrammarMasks:
    return GrammarMasks(vocabulary, late_seconds=0.0, notify=notify)


def patient(vocabulary: GrammarVocabulary) -> GrammarMasks:
    return GrammarMasks(vocabulary, late_seconds=SECONDS)


def ids(allowed: Bits | None) -> set[int]:
    """Return the tokens of a mask, which must be ready."""
    assert allowed is not None
    return set(np.flatnonzero(unpacked(allowed, tiny.config().vocab_size)).tolist())


def test_masks_follow_the_tokens(vocabulary: HeldVocabulary) -> None:
    vocabulary.go.set()
    mask = patient(vocabulary).begin(CHOICE, [])
    for byte, following in ((b"y", b"e"), (b"e", b"st")):
        assert byte[0] in ids(mask.wait())
        mask = mask.after(list(byte))
        assert ids(mask.wait()) == set(following)


def test_a_mask_is_rebuilt_from_generated_tokens(vocabulary: HeldVocabulary) -> None:
    vocabulary.go.set()
    assert ids(patient(vocabulary).begin(CHOICE, list(b"ye")).wait()) == set(b"st")


def test_a_late_mask_is_announced_when_it_is_ready(vocabulary: HeldVocabulary) -> None:
    announced = threading.Event()
    mask = masks(vocabulary, announced.set).begin(CHOICE, [])
    assert mask.wait() is None
    assert not mask.is_ready
    vocabulary.go.set()
    assert announced.wait(SECONDS)
    assert mask.is_ready
    assert ids(mask.wait()) == set(b"y")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(InvalidRequest("bad", field="constraint"), InvalidRequest), (RuntimeError("of the library"), GenerationFailed)],
)
def test_an_error_is_that_of_its_sequence(
    vocabulary: HeldVocabulary, raised: Exception, expected: type[Exception]
) -> None:
    vocabulary.fails = raised
    vocabulary.go.set()
    owner = patient(vocabulary)
    mask = owner.begin(CHOICE, [])
    with pytest.raises(expected):
        mask.wait()
    vocabulary.fails = None
    assert ids(owner.begin(CHOICE, []).wait()) == set(b"y")
