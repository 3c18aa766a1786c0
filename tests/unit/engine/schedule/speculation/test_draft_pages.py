"""Pages of a draft model: valid KV after a step, and the choice of the sequence that loses its pages."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.speculation.draft_pages import DraftedSequence, DraftPages


def test_kv_stays_valid_up_to_the_first_token_that_differs() -> None:
    sequence = DraftedSequence([1, 2, 3, 7, 8], num_known=3, num_computed=5)
    sequence.follow([1, 2, 3, 7, 9, 4])
    assert (sequence.tokens, sequence.num_computed) == ([1, 2, 3, 7, 9, 4], 4)
    sequence.num_computed = 6
    sequence.follow([1, 2, 3, 7, 9, 4])
    assert sequence.num_computed == 5, "the last token is computed again for its logits"


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    draft=st.lists(st.integers(0, 2), max_size=6),
    more=st.lists(st.integers(0, 2), max_size=6),
)
def test_computed_tokens_are_a_prefix_of_the_tokens(tokens: list[int], draft: list[int], more: list[int]) -> None:
    sequence = DraftedSequence([*tokens, *draft], num_known=len(tokens), num_computed=len(tokens) + len(draft))
    before = list(sequence.tokens)
    actual = [*tokens, *more]
    sequence.follow(actual)
    assert sequence.tokens == actual
    assert 0 <= sequence.num_computed < len(actual)
    assert before[: sequence.num_computed] == actual[: sequence.num_computed]
    expected = next((i for i, (a, b) in enumerate(zip(before, actual, strict=False)) if a != b), len(before))
    assert sequence.num_computed == min(expected, len(actual) - 1)


def test_the_least_recently_used_sequence_loses_its_pages() -> None:
    pages = DraftPages(4, 4)
    old, new, next_one = (RequestId(name) for name in "abc")
    assert pages.grow(pages.sequence(old), 8, {old})
    assert pages.grow(pages.sequence(new), 8, {new})
    assert pages.grow(pages.sequence(next_one), 5, {new, next_one})
    assert pages.sequence(old).blocks == []
    assert len(pages.sequence(new).blocks) == len(pages.sequence(next_one).blocks) == 2
    assert not pages.grow(pages.sequence(new), 9, {new, next_one}), "sequences of the current step keep their pages"
    for name in (old, new, next_one, next_one):
        pages.forget(name)
    assert pages.is_idle
