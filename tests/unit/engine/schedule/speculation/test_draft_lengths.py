"""Draft lengths against an exhaustive search, learned prices and probabilities, and the setting."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.engine.schedule.speculation.acceptance import FORCED, Acceptance, SequenceAcceptance, support_of_match
from kvferry.engine.schedule.speculation.draft_lengths import MAX_DRAFT_ROWS, MIN_ADVANTAGE, draft_lengths
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.speculation.settings import SpeculationSettings, parse_speculation
from kvferry.engine.schedule.speculation.trees.growing_tree import values_of

_PROBABILITIES = st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=3)


@given(_PROBABILITIES, st.integers(1, 4), st.floats(0.0, 1.0))
def test_the_lengths_have_the_best_expected_rate(own: list[list[float]], more: int, slope: float) -> None:
    rows = len(own) + more
    gains = [values_of((), each) for each in own]

    def seconds(count: int) -> float:
        return 1.0 + slope * (count - rows)

    def rate(lengths: tuple[int, ...] | list[int]) -> float:
        gained = sum(sum(each[:length]) for each, length in zip(gains, lengths, strict=True))
        return (len(own) + gained) / seconds(rows + sum(lengths))

    best = max(map(rate, itertools.product(*(range(len(each) + 1) for each in gains))))
    chosen = draft_lengths(gains, rows, seconds)
    assert rate(chosen) == pytest.approx(best) or (sum(chosen) == 0 and best <= MIN_ADVANTAGE * rate(chosen) + 1e-9)


def test_no_draft_where_each_row_costs_as_much_as_the_first() -> None:
    assert draft_lengths([values_of((), [0.99] * 8)] * 3, 3, lambda rows: float(rows)) == [0, 0, 0]


def test_rows_of_drafts_are_bounded() -> None:
    assert sum(draft_lengths([values_of((), [1.0] * 32)] * 8, 8, lambda _: 1.0)) == MAX_DRAFT_ROWS


def test_the_more_probable_draft_gets_the_rows() -> None:
    assert draft_lengths([values_of((), [0.2, 0.2]), values_of((), [0.9, 0.9])], 2, lambda rows: 10.0 + rows) == [0, 2]


def test_a_further_row_is_assumed_to_cost_less_than_the_first() -> None:
    prices = RowPrices()
    assert prices.seconds(1) == 1.0
    assert 1.0 < prices.seconds(5) < 5.0
    prices.observe(1, 0.010)
    assert prices.seconds(1) == pytest.approx(0.010)
    assert prices.seconds(5) == pytest.approx(0.010 * (1 + 0.5 * 4 / 4))


def test_prices_follow_the_measured_line() -> None:
    prices = RowPrices()
    for _ in range(30):
        for rows in (1, 4, 9):
            prices.observe(rows, 0.010 + 0.004 * rows)
    for rows in (1, 2, 4, 6, 9, 12):
        assert prices.seconds(rows) == pytest.approx(0.010 + 0.004 * rows, rel=0.02)
    for _ in range(200):  # the steps became twice as fast
        for rows in (1, 4, 9):
            prices.observe(rows, 0.005 + 0.002 * rows)
    assert prices.seconds(6) == pytest.approx(0.017, rel=0.02)


def test_a_number_of_rows_may_depart_from_the_line() -> None:
    prices = RowPrices()
    measured = {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0, 5: 20.0, 6: 21.0}
    for _ in range(60):
        for rows, seconds in measured.items():
            prices.observe(rows, seconds)
    assert prices.seconds(4) == pytest.approx(13.0, rel=0.08)
    assert prices.seconds(5) == pytest.approx(20.0, rel=0.08)


def test_one_delayed_step_does_not_raise_the_price_of_its_number_of_rows_for_ever() -> None:
    prices = RowPrices()
    for _ in range(30):
        prices.observe(1, 0.010)
    prices.observe(8, 1.0)
    assert prices.seconds(8) > 0.020
    for _ in range(300):
        prices.observe(1, 0.010)
    assert prices.seconds(8) < 0.022, "back to the assumed price"


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (5000, 1.0), (1, 0.0), (1, -1.0)])
def test_an_invalid_measurement_is_dropped(rows: int, seconds: float) -> None:
    prices = RowPrices()
    prices.observe(rows, seconds)
    assert prices.seconds(1) == 1.0


def test_a_delayed_step_does_not_count_in_full() -> None:
    prices = RowPrices()
    prices.observe(1, 0.010)
    prices.observe(1, 100.0)
    assert prices.seconds(1) <= 0.030


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 10.0)), min_size=1), st.integers(1, 4096))
def test_a_price_is_positive_whatever_was_measured(measured: list[tuple[int, float]], rows: int) -> None:
    prices = RowPrices()
    for each in measured:
        prices.observe(*each)
    assert prices.seconds(rows) > 0.0


def test_a_sequence_whose_drafts_fail_has_a_probability_of_its_own() -> None:
    common = Acceptance()
    good, bad = SequenceAcceptance(common), SequenceAcceptance(common)
    for _ in range(30):
        good.add(support_of_match(5), True)
        bad.add(support_of_match(5), False)
    assert good.probability(support_of_match(5)) > 0.8
    assert bad.probability(support_of_match(5)) < 0.2
    assert 0.3 < SequenceAcceptance(common).probability(support_of_match(5)) < 0.7, (
        "the probability of a new sequence comes from all sequences"
    )


def test_forced_tokens_have_a_class_of_their_own() -> None:
    acceptance = SequenceAcceptance(Acceptance())
    for _ in range(30):
        acceptance.add(support_of_match(3), False)
    assert acceptance.probability(FORCED) > 0.9


def test_longer_matches_are_expected_to_be_right_more_often() -> None:
    acceptance = Acceptance()
    found = [acceptance.probability(support_of_match(match)) for match in (1, 2, 4, 8, 16, 32)]
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", SpeculationSettings("off")),
        ("auto", SpeculationSettings("auto", 16)),
        ("suffix?k=4", SpeculationSettings("suffix", 4)),
        ("ngram", SpeculationSettings("ngram", 5)),
        ("ngram?k=3&min=3&max=4", SpeculationSettings("ngram", 3, 3, 4)),
        ("eagle=/heads/a", SpeculationSettings("eagle", 6, draft_model="/heads/a")),
        ("medusa=b?k=2&fixed=1", SpeculationSettings("medusa", 2, draft_model="b", is_fixed=True)),
    ],
)
def test_the_setting_is_parsed(text: str, expected: SpeculationSettings) -> None:
    assert parse_speculation(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "speculation 'fast' is not valid; expected off, auto, suffix, ngram?k=5, draft=MODEL, eagle="),
        ("", "speculation '' is not valid"),
        ("ngram?k=0", "k='0' of speculation 'ngram' must be a whole number from 1 to 32"),
        ("ngram?k=33", "must be a whole number from 1 to 32"),
        ("ngram?k=", "must be a whole number"),
        ("ngram?k=²", "must be a whole number"),
        ("ngram?n=3", "unknown parameter 'n' of speculation 'ngram'; known: k, min, max"),
        ("suffix?min=3", "unknown parameter 'min' of speculation 'suffix'; known: k"),
        ("suffix?k=4&k=8", "'suffix?k=4&k=8' has a parameter twice"),
        ("off?k=1", "unknown parameter 'k' of speculation 'off'; known: none"),
        ("ngram?min=5&max=3", "min=5 of speculation 'ngram' is above max=3"),
        ("draft", "speculation 'draft' is not valid; expected"),
        ("draft=", "speculation 'draft' needs a value: draft=MODEL, where MODEL is"),
        ("eagle=?k=3", "speculation 'eagle' needs a value: eagle=FOLDER, where FOLDER contains"),
        ("medusa", "speculation 'medusa' is not valid; expected"),
        ("suffix=tiny", "speculation 'suffix=tiny' is not valid"),
        ("draft=tiny?fixed=2", "fixed='2' of speculation 'draft' must be a whole number from 0 to 1"),
        ("draft=tiny?min=2", "unknown parameter 'min' of speculation 'draft'; known: k, fixed"),
        ("eagle=folder?min=2", "unknown parameter 'min' of speculation 'eagle'; known: k, fixed"),
        ("medusa=folder?k=40", "k='40' of speculation 'medusa' must be a whole number from 1 to 32"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parse_speculation(text)
    assert caught.value.field == "speculation"
