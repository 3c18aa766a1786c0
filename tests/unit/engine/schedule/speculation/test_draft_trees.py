"""Trees of draft tokens: the walk against all paths, the order of rows against an exhaustive search, and the requests
that keep chains.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.drafts.proposers import Silent
from harness.fakes.engines import a_request, an_engine, expected_tokens, next_token, run_until_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import UsageError
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.schedule.speculation.acceptance import Acceptance, SequenceAcceptance, support_of_confidence
from kvferry.engine.schedule.speculation.draft_lengths import PayingDrafts, WholeDrafts
from kvferry.engine.schedule.speculation.model_drafts import DraftRequest, ModelDraft
from kvferry.engine.schedule.speculation.row_prices import RowPrices
from kvferry.engine.schedule.speculation.sequence_drafts import SupportedDraft
from kvferry.engine.schedule.speculation.settings import parse_speculation
from kvferry.engine.schedule.speculation.speculation import Speculation
from kvferry.engine.schedule.speculation.trees.chains_only import CONSTRAINT, REJECTION, chain_reason
from kvferry.engine.schedule.speculation.trees.growing_tree import (
    GrowingTree,
    TreeRows,
    product_tree,
    ranked,
    values_of,
    without,
)
from kvferry.engine.schedule.step.draft_tree import children, depths, is_chain, moves, next_row, path_rows, paths
from kvferry.engine.schedule.step.step import ScheduledSequence, StepResult, accepted_path, rows_of

DOCS = Path(__file__).resolve().parents[5] / "docs" / "speculation.md"
GREEDY = SamplingParams(temperature=0.0)


@st.composite
def trees(draw: st.DrawFn, most: int = 10) -> tuple[int, ...]:
    return tuple(draw(st.integers(0, row)) for row in range(draw(st.integers(0, most))))


@given(trees())
def test_paths_and_depths_agree(parents: tuple[int, ...]) -> None:
    for row, (depth, bits) in enumerate(zip(depths(parents), paths(parents), strict=True)):
        above = path_rows(parents, row)
        assert len(above) == depth
        assert bits == 1 | sum(1 << other for other in above)
        assert above == sorted(above)
        assert not above or above[-1] == row
    assert is_chain(parents) == (depths(parents) == list(range(len(parents) + 1)))


@given(trees(), st.lists(st.integers(0, 2), min_size=11, max_size=11), st.lists(st.integers(0, 2), min_size=11))
def test_the_accepted_path_is_the_longest_one_that_was_drawn(
    parents: tuple[int, ...], tokens: list[int], drawn: list[int]
) -> None:
    """Siblings with the same token have the same results, and the first of them is taken."""
    drafts = tokens[: len(parents)]
    item = ScheduledSequence(
        RequestId("a"), [7, *drafts], 1, 0, 1 + len(parents), [], 1 + len(parents), GREEDY, 0, parents=parents
    )
    found = accepted_path(item, [SampledToken(token) for token in drawn])

    def is_drawn(path: list[int]) -> bool:
        return all(
            next_row(parents, drafts, above, drawn[above]) == row for above, row in itertools.pairwise([0, *path])
        )

    accepted = [path for row in range(len(parents) + 1) if is_drawn(path := path_rows(parents, row))]
    assert list(found) == max(accepted, key=len)
    if parents:
        result = StepResult.of([item], [SampledToken(token) for token in drawn[: 1 + len(parents)]])
        output = result.outputs[RequestId("a")]
        assert [one.token_id for one in output.tokens] == [drawn[row] for row in (0, *found)]
        assert output.accepted == 1 + len(found)


@given(trees())
def test_moves_put_a_path_in_order_without_losing_a_row(parents: tuple[int, ...]) -> None:
    for row in range(len(parents) + 1):
        slots, path = list(range(len(parents) + 1)), path_rows(parents, row)
        for source, target in moves(path):
            slots[target] = slots[source]
        assert slots[: len(path) + 1] == [0, *path]


@given(trees())
def test_a_row_is_sampled_with_the_tokens_of_its_path(parents: tuple[int, ...]) -> None:
    if not parents:
        return
    drafts = [100 + index for index in range(len(parents))]
    item = ScheduledSequence(
        RequestId("a"), [7, 8, *drafts], 1, 1, 1 + len(parents), [], 1 + len(parents), GREEDY, 0, parents=parents
    )
    for row, one in enumerate(rows_of(item)):
        assert list(one.token_ids) == [7, 8, *(drafts[above - 1] for above in path_rows(parents, row))]
        assert one.num_computed + one.num_scheduled == len(one.token_ids)


@given(trees(7), st.lists(st.floats(0.01, 1.0), min_size=7, max_size=7), st.integers(1, 7))
def test_the_first_rows_are_the_most_valuable_tree_of_their_number(
    parents: tuple[int, ...], shares: list[float], limit: int
) -> None:
    shares = shares[: len(parents)]
    draft = ranked(range(len(parents)), parents, shares, limit)
    values = values_of(parents, shares)
    assert len(draft.tokens) == min(limit, len(parents))
    chosen = draft.parents or tuple(range(len(draft.tokens)))
    for row, parent in enumerate(chosen, 1):
        assert parent < row
        original = parents[draft.tokens[row - 1]]
        assert original == (0 if parent == 0 else draft.tokens[parent - 1] + 1)
    for count in range(len(draft.tokens) + 1):
        best = max(
            sum(values[index] for index in some)
            for some in itertools.combinations(range(len(parents)), count)
            if all(parents[index] == 0 or parents[index] - 1 in some for index in some)
        )
        assert sum(values[index] for index in draft.tokens[:count]) == pytest.approx(best)


@given(st.lists(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 12))
def test_a_product_tree_has_the_most_valuable_nodes(shares: list[list[float]], limit: int) -> None:
    levels = [
        [(10 * depth + index, share) for index, share in enumerate(sorted(own, reverse=True))]
        for depth, own in enumerate(shares)
    ]
    draft = product_tree(levels, limit)
    paths_of_tokens = [
        combination for depth in range(len(levels)) for combination in itertools.product(*levels[: depth + 1])
    ]
    products = sorted((float_product(path) for path in paths_of_tokens), reverse=True)
    found = values_of(draft.parents, draft.probabilities)
    assert found == pytest.approx(products[: len(found)])
    assert len(found) == min(limit, len(products))


def float_product(path: tuple[tuple[int, float], ...]) -> float:
    total = 1.0
    for _, share in path:
        total *= share
    return total


def test_a_growing_tree_computes_the_best_nodes_of_a_level() -> None:
    tree = GrowingTree()
    tree.add_level([(0, [(5, 0.6), (6, 0.3)])])
    assert tree.frontier(1) == [1]
    assert tree.frontier(9) == [1, 2]
    tree.add_level([(1, [(7, 0.2), (8, 0.1)]), (2, [(9, 0.9)])])
    assert tree.frontier(2) == [3, 5]
    assert tree.draft(3) == TreeRows((5, 6, 9), (0, 0, 2), (0.6, 0.3, 0.9))
    assert tree.draft(1) == TreeRows((5,), (), (0.6,)), "a tree of one node is a chain"


@given(trees(), st.sets(st.integers(0, 9)))
def test_a_removed_node_takes_its_descendants_along(parents: tuple[int, ...], gone: set[int]) -> None:
    left, above = without(parents, gone)
    kept = [index for index in range(len(parents)) if not any(row - 1 in gone for row in path_rows(parents, index + 1))]
    assert left == kept
    for row in range(1, len(kept) + 1):
        path = [kept.index(other - 1) + 1 for other in path_rows(parents, kept[row - 1] + 1)]
        assert path_rows(above or tuple(range(len(kept))), row) == path


@settings(max_examples=50)
@given(trees(), st.integers(1, 4), st.floats(0.0, 1.0))
def test_rows_of_a_tree_are_taken_in_the_order_of_gain_and_none_if_they_do_not_pay(
    parents: tuple[int, ...], sequences: int, price: float
) -> None:
    acceptance = SequenceAcceptance(Acceptance())
    supports = tuple(support_of_confidence(0.1 + index / 12) for index in range(len(parents)))
    draft = SupportedDraft(tuple(range(len(parents))), supports, parents).best_first(acceptance, 6)
    gains = draft.gains(acceptance)
    assert gains == sorted(gains, reverse=True)
    prices = RowPrices()
    for _ in range(40):
        prices.observe(sequences, 1.0)
        prices.observe(sequences + 4, 1.0 + 4 * price)
    others: list[list[float]] = [[]] * (sequences - 1)
    (count, *_) = PayingDrafts().choose([gains, *others], sequences, prices)
    assert 0 <= count <= len(gains)
    if price >= 1.0 / sequences + 0.2:
        assert count == 0


def test_candidates_are_estimated_by_class_and_levels_by_whether_any_was_right() -> None:
    acceptance = SequenceAcceptance(Acceptance())
    likely, rare = support_of_confidence(0.75), support_of_confidence(0.15)
    before = acceptance.of_model
    for _ in range(40):
        SupportedDraft((1, 2, 3), (likely, rare, rare), (0, 0, 2)).compare([2, 9], acceptance)
    assert acceptance.probability(likely) < 0.2
    assert 0.3 < acceptance.probability(rare) < 0.7, "right in the first level, wrong in the second"
    assert 0.3 < acceptance.of_model < before
    assert SupportedDraft((1, 2, 3), (likely, rare, rare), (0, 0, 2)).is_right(2)
    assert not SupportedDraft((1, 2, 3), (likely, rare, rare), (0, 0, 2)).is_right(3)


def test_an_end_token_is_not_drafted() -> None:
    draft = SupportedDraft((1, 2, 3, 4), (5, 6, 7, 8), (0, 0, 2, 1))
    assert draft.before({2}) == SupportedDraft((1, 4), (5, 8), ())
    assert draft.before({9}, {4}) == SupportedDraft((1, 2, 3), (5, 6, 7), (0, 0, 2))
    assert SupportedDraft((1, 2, 3), (5, 6, 7)).before({2}) == SupportedDraft((1,), (5,))
    assert values_of((), []) == SupportedDraft().gains(SequenceAcceptance(Acceptance()))


def test_requests_that_keep_chains_are_those_that_the_page_lists() -> None:
    constrained = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a+"), seed=1)
    drawn = SamplingParams(temperature=1.0, seed=1, presence_penalty=1.0, logit_bias={3: 1.0}, logprobs=2)
    assert chain_reason(constrained, is_rejecting=False) == CONSTRAINT
    assert chain_reason(drawn, is_rejecting=True) == REJECTION
    assert chain_reason(drawn, is_rejecting=False) is None
    assert chain_reason(GREEDY, is_rejecting=True) is None
    text = " ".join(DOCS.read_text("utf-8").split())
    assert CONSTRAINT in text
    assert REJECTION in text


class OneTree:
    """`ModelDrafts` that propose the right tokens and a wrong one before each of them."""

    def __init__(self) -> None:
        self.prices, self.is_measured, self.is_idle = RowPrices(), False, True
        self.widths: list[int] = []

    def propose(self, requests: Sequence[DraftRequest], depth: int) -> dict[RequestId, ModelDraft]:
        found: dict[RequestId, ModelDraft] = {}
        for one in requests:
            self.widths.append(one.width)
            text, tokens, parents, last = list(one.tokens), list[int](), list[int](), 0
            for _ in range(min(depth, one.limit)):
                right = next_token(text)
                if one.width > 1:
                    tokens.append((right + 1) % 96)
                    parents.append(last)
                tokens.append(right)
                parents.append(last)
                text.append(right)
                last = len(tokens)
            supports = (support_of_confidence(0.5),) * len(tokens)
            found[one.request_id] = ModelDraft(
                tuple(tokens), supports, parents=() if one.width == 1 else tuple(parents)
            )
        return found

    def forget(self, request_id: RequestId) -> None:
        pass


def test_a_right_branch_saves_steps_and_its_siblings_leave_no_trace() -> None:
    speculation = Speculation(Silent(), WholeDrafts(), num_drafts=3, draft_model=OneTree(), width=2)
    engine, runner = an_engine(speculation=speculation)
    engine.add(a_request("a", [1, 2, 3], max_tokens=21))
    assert run_until_idle(engine) == {"a": expected_tokens([1, 2, 3], 21)}
    assert [plan.num_tokens for plan in runner.steps][:5] == [3, 7, 7, 7, 7]
    assert any(item.parents for plan in runner.steps for item in plan.scheduled)
    assert speculation.counts.num_accepted_tokens >= 13
    prompt = [1, 2, 3, *expected_tokens([1, 2, 3], 17)]
    engine.add(a_request("b", prompt, max_tokens=6))  # hits blocks of request a
    assert run_until_idle(engine)["b"] == expected_tokens(prompt, 6)


def test_a_tree_needs_no_slot_beyond_the_limit_of_tokens() -> None:
    for limit in range(1, 9):
        speculation = Speculation(Silent(), WholeDrafts(), num_drafts=8, draft_model=OneTree(), width=2)
        engine, runner = an_engine(speculation=speculation)
        engine.add(a_request("a", [1, 2], max_tokens=limit))
        assert run_until_idle(engine) == {"a": expected_tokens([1, 2], limit)}
        assert all(s.num_computed + s.num_scheduled <= 1 + limit for plan in runner.steps for s in plan.scheduled)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("eagle=x?width=0", "parameter width='0' of speculation 'eagle' must be a whole number from 1 to 8"),
        ("medusa=x?width=9", "parameter width='9' of speculation 'medusa' must be a whole number from 1 to 8"),
        ("eagle=x?width=wide", "must be a whole number from 1 to 8"),
        ("draft=x?width=2", "unknown parameter 'width' of speculation 'draft'"),
        ("suffix?width=2", "unknown parameter 'width' of speculation 'suffix'"),
    ],
)
def test_bad_widths_are_refused_by_name(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_speculation(setting)


def test_the_default_is_a_chain() -> None:
    assert parse_speculation("eagle=x").width == parse_speculation("medusa=x").width == 1
    assert parse_speculation("eagle=x?k=5&width=3").width == 3
    assert list(children((0, 0, 1), 0)) == [1, 2]
