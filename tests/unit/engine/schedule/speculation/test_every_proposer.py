"""Random interleavings with every proposer; see `harness.drafts.walk`."""

import itertools
from collections import Counter

import numpy as np
import pytest
from harness.drafts.draft_models import medusa_drafts
from harness.drafts.walk import MODELS, TEXTS, WRONG, Walk
from harness.fakes.engines import FIRST_STATE, expected_tokens, state_after

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest


def walks(seeds: range) -> Counter[str]:
    """Run interleavings; return what occurred."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed)
        try:
            seen += walk.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {walk.text}, {walk.model}, {walk.quality}") from error
    return seen


def check_coverage(seen: Counter[str]) -> None:
    """Check that each pair of proposers had drafts, and that accepted, rejected, named and offered tokens occurred."""
    for text, model in itertools.product(TEXTS, MODELS):
        if (text, model) != ("none", "none"):
            assert seen[f"{text}, {model}: drafted"] > 0, (text, model, seen)
        if text == "oracle" or model != "none":
            assert seen[f"{text}, {model}: accepted"] > 0, (text, model, seen)
    for model in ("eagle", "medusa", "trees"):
        assert seen[f"{model}: trees"] > 0, (model, seen)
    for what in (*(f"{quality}: accepted" for quality in WRONG), "rejected", "named", "offered", "preempted"):
        assert seen[what] > 0, (what, seen)


def test_tokens_are_those_of_a_run_without_drafts() -> None:
    check_coverage(walks(range(300)))


@pytest.mark.long
def test_two_thousand_interleavings() -> None:
    check_coverage(walks(range(1000, 3000)))


def test_medusa_heads_wait_for_the_first_hidden_state() -> None:
    one = DraftRequest(RequestId("a"), [5], 3)
    drafts = medusa_drafts(lambda: False)
    assert drafts.propose([one], 3) == {}
    drafts.read(RequestId("a"), 0, np.array([[0, 5, state_after(FIRST_STATE, 5)]], np.float32))
    assert drafts.propose([one], 3) == {}, "the token after the hidden state is not known yet"
    tokens = [5, *expected_tokens([5], 4)]
    assert drafts.propose([DraftRequest(RequestId("a"), tokens[:2], 3)], 3)[RequestId("a")].tokens == tuple(tokens[2:5])
