"""The choice among proposers against simulated acceptance: bounded regret, bounded probes, and changes of regime."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from harness.fakes.engines import a_request, an_engine, expected_tokens, next_token, run_until_idle
from harness.fakes.heads import eagle_drafts
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import SystemClock
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.speculation.acceptance import (
    Acceptance,
    SequenceAcceptance,
    support_of_confidence,
    support_of_match,
)
from kvferry.engine.schedule.speculation.draft_lengths import PayingDrafts
from kvferry.engine.schedule.speculation.matches import Tokens
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, ModelDraft
from kvferry.engine.schedule.speculation.proposer_choice import (
    FIRST_PAUSE,
    HYSTERESIS,
    MAX_PAUSE,
    ExpectedDraft,
    ProposerChoice,
    rate,
)
from kvferry.engine.schedule.speculation.proposers import Draft
from kvferry.engine.schedule.speculation.speculation import Speculation

TEXT, MODEL = 0, 1
SUPPORTS = {TEXT: support_of_match(3), MODEL: support_of_confidence(0.6)}
DEPTH = 4
MAX_REGRET, MEAN_REGRET = 0.2, 0.02
"""Bounds of the relative regret of 1,000 drafts, in each case and as the mean over cases: at most 1 / 17 of the drafts
are probes, the hysteresis is 1.05, and an estimate comes from about twenty tokens."""


@dataclass
class Simulated:
    """A request whose drafts of both proposers are accepted with given probabilities."""

    slope: float
    """Seconds of a further row, in steps of one row."""
    drafting: float
    """Seconds of a model's draft."""
    seed: int = 0
    choice: ProposerChoice = field(default_factory=ProposerChoice)
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._acceptance = SequenceAcceptance(Acceptance())

    def seconds(self, rows: int) -> float:
        return 1.0 + self.slope * (rows - 1)

    def drafts(self, shares: dict[int, float]) -> dict[int, ExpectedDraft]:
        """Return the drafts with given probabilities."""
        return {
            TEXT: ExpectedDraft([shares[TEXT]] * DEPTH),
            MODEL: ExpectedDraft([shares[MODEL]] * DEPTH, self.drafting),
        }

    def rate(self, number: int, shares: dict[int, float]) -> float:
        """Return the expected tokens per second of drafts of one proposer."""
        return rate(self.drafts(shares)[number], 1, 1, self.seconds)

    def draft(self, shares: dict[int, float]) -> int:
        """Make one draft with true probabilities; return its proposer."""
        estimates = {TEXT: self._acceptance.probability(SUPPORTS[TEXT]), MODEL: self._acceptance.of_model}
        number = self.choice.choose(self.drafts(estimates), 1, 1, self.seconds)
        for each in {TEXT, number}:  # the text's draft is compared in any case
            hits = [self._chance.random() < shares[each] for _ in range(DEPTH)]
            for hit in hits[: hits.index(False) + 1 if False in hits else DEPTH]:
                self._acceptance.add(SUPPORTS[each], hit)
            if each == MODEL:
                self.choice.compared(MODEL, is_right=hits[0])
        self.chosen.append(number)
        return number


def regret(request: Simulated, shares: dict[int, float]) -> float:
    """Return the relative loss of 1,000 drafts against the best single proposer."""
    rates = {number: request.rate(number, shares) for number in (TEXT, MODEL)}
    for _ in range(1000):
        request.draft(shares)
    return 1.0 - sum(rates[number] for number in request.chosen) / len(request.chosen) / max(rates.values())


SHARES = st.floats(0.02, 0.98)


@settings(deadline=None, max_examples=60)
@given(SHARES, SHARES, st.floats(0.01, 0.5), st.floats(0.01, 0.6), st.integers(0, 1000))
def test_the_regret_under_constant_acceptance_is_bounded(
    text: float, model: float, slope: float, drafting: float, seed: int
) -> None:
    assert regret(Simulated(slope, drafting, seed), {TEXT: text, MODEL: model}) <= MAX_REGRET


def test_the_mean_regret_is_small() -> None:
    draw = random.Random(7)
    cases = [
        (Simulated(draw.uniform(0.01, 0.5), draw.uniform(0.01, 0.6), seed), {TEXT: draw.random(), MODEL: draw.random()})
        for seed in range(60)
    ]
    assert sum(regret(*case) for case in cases) / len(cases) <= MEAN_REGRET


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SHARES, st.booleans()), min_size=1, max_size=300))
def test_probes_are_bounded_and_choices_depend_on_the_history_only(history: list[tuple[float, bool]]) -> None:
    def run() -> tuple[list[int], int]:
        choice, chosen, probes = ProposerChoice(), list[int](), 0
        for model, is_right in history:
            # The model's draft is never the better one.
            drafts = {
                TEXT: ExpectedDraft([0.9] * DEPTH),
                MODEL: ExpectedDraft([model * 0.5] * DEPTH, 0.2),
            }
            chosen.append(choice.choose(drafts, 1, 1, lambda rows: 1.0 + 0.1 * rows))
            if chosen[-1] == MODEL:
                probes += 1
                choice.compared(MODEL, is_right=is_right)
        return chosen, probes

    chosen, probes = run()
    assert probes <= len(history) // (FIRST_PAUSE + 1)
    assert run()[0] == chosen
    gaps = [number for number, each in enumerate(chosen) if each == MODEL]
    assert all(after - before > FIRST_PAUSE for before, after in itertools.pairwise(gaps))


@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_becomes_better_is_found(seed: int) -> None:
    request = Simulated(0.1, 0.15, seed)
    for _ in range(300):
        request.draft({TEXT: 0.5, MODEL: 0.05})
    assert request.chosen[100:].count(TEXT) > 190
    better = {TEXT: 0.5, MODEL: 0.95}
    within = MAX_PAUSE + MAX_PAUSE // 2 + 6 * FIRST_PAUSE
    for _ in range(within):
        request.draft(better)
    recent = [request.draft(better) for _ in range(50)]
    assert recent.count(MODEL) > 45


@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_becomes_worse_is_left_within_twenty_drafts(seed: int) -> None:
    request = Simulated(0.1, 0.15, seed)
    for _ in range(100):
        request.draft({TEXT: 0.3, MODEL: 0.95})
    assert request.chosen[50:].count(MODEL) > 45
    worse = {TEXT: 0.8, MODEL: 0.05}
    for _ in range(20):
        request.draft(worse)
    assert [request.draft(worse) for _ in range(20)].count(TEXT) >= 17, "a few are probes"


def test_rates_within_the_hysteresis_keep_the_current_proposer() -> None:
    choice = ProposerChoice()

    def chosen(text: float, model: float) -> int:
        drafts = {TEXT: ExpectedDraft([text]), MODEL: ExpectedDraft([model], 1e-9)}
        return choice.choose(drafts, 1, 1, lambda rows: 1.0)

    assert chosen(0.9, 0.5) == TEXT
    assert chosen(0.50, 0.55) == TEXT, "1.55 / 1.50 is less than the hysteresis"
    assert HYSTERESIS < 1.65 / 1.5
    assert chosen(0.50, 0.65) == MODEL
    assert chosen(0.55, 0.50) == MODEL


def test_a_price_counts_against_a_proposer() -> None:
    drafts = {TEXT: ExpectedDraft([0.6]), MODEL: ExpectedDraft([0.8], 0.5)}
    assert rate(drafts[MODEL], 1, 1, lambda rows: 1.0) == pytest.approx(1.8 / 1.5)
    assert ProposerChoice().choose(drafts, 1, 1, lambda rows: 1.0) == TEXT
    assert ProposerChoice().choose({**drafts, MODEL: ExpectedDraft([0.8], 0.01)}, 1, 1, lambda rows: 1.0) == MODEL


def test_the_rate_is_that_of_the_best_length() -> None:
    assert rate(ExpectedDraft([0.9, 0.9, 0.0]), 2, 2, lambda rows: 1.0 + 0.25 * (rows - 2)) == pytest.approx(3.71 / 1.5)
    assert rate(ExpectedDraft([0.1]), 2, 2, lambda rows: float(rows)) == pytest.approx(1.0)


# ---------------------------------------------------------------------- in an engine


class TickingClock(SystemClock):
    """A clock that advances by the same time at each reading."""

    def __init__(self, tick: float) -> None:
        self._now, self._tick = 0.0, tick

    def monotonic(self) -> float:
        self._now += self._tick
        return self._now


class Guesses:
    """Proposes the right continuation from a number of known tokens on, and wrong tokens before."""

    def __init__(self, right_from: int) -> None:
        self._right_from = right_from

    def propose(self, tokens: Tokens, limit: int) -> Draft:
        known, draft = tokens.tolist(), list[int]()
        wrong = int(len(known) < self._right_from)
        for _ in range(limit):
            draft.append((next_token([*known, *draft]) + wrong) % 96)
        return Draft(tuple(draft), 3)


@pytest.mark.parametrize(("right_from", "head_is_right"), [(0, False), (1000, True), (0, True), (120, True)])
def test_an_engine_uses_the_proposer_that_is_right_and_cheap(right_from: int, head_is_right: bool) -> None:
    head = eagle_drafts(lambda: not head_is_right, 60)
    head._clock = TickingClock(0.0001)
    speculation = Speculation(Guesses(right_from), PayingDrafts(), num_drafts=4, draft_model=head)
    engine, runner = an_engine(num_blocks=128, max_model_tokens=400, speculation=speculation, clock=TickingClock(0.001))
    runner.has_head = True
    engine.add(a_request("a", [1, 2, 3], max_tokens=380))
    calls: list[int] = []
    propose = head.propose

    def watched(requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        calls.append(len(requests[0].tokens))
        return propose(requests, depth)

    head.propose = watched  # type: ignore[method-assign]
    assert run_until_idle(engine) == {"a": expected_tokens([1, 2, 3], 380)}
    counts = speculation.counts
    assert counts.num_accepted_tokens > 0.8 * counts.num_draft_tokens
    assert counts.num_accepted_tokens > 240
    late = [call for call in calls if call > 200]
    if right_from < 1000:
        assert len(late) <= 180 / 5 / FIRST_PAUSE + 1, "the text is right and costs nothing: the head drafts in probes"
    else:
        assert len(late) >= 180 / 5
