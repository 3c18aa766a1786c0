"""The record of the blocks of earlier prompts: exact for the last ones, within a bound."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import BlockHash
from kvferry.gateway.decide.cache_map.seen_blocks import SeenBlocks

Prompts = list[list[int]]


def names_of(prompt: list[int]) -> list[BlockHash]:
    """Return names that stand for the whole prefix, as those of real blocks."""
    return [BlockHash(repr(prompt[: end + 1]).encode()) for end in range(len(prompt))]


def leading(prompt: list[int], earlier: Prompts) -> int:
    """Return the length of the longest common prefix with an earlier prompt."""
    return max((next((i for i in range(len(prompt)) if prompt[:i + 1] != one[:i + 1]), len(prompt)) for one in earlier),
               default=0)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=30))
def test_without_a_bound_every_earlier_prompt_counts(prompts: Prompts) -> None:
    seen = SeenBlocks()
    for number, prompt in enumerate(prompts):
        assert seen.note(names_of(prompt)) == leading(prompt, prompts[:number])
    assert seen.is_exact


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=30))
def test_within_a_bound_the_answer_is_never_too_large(capacity: int, prompts: Prompts) -> None:
    seen = SeenBlocks(capacity)
    for number, prompt in enumerate(prompts):
        was_exact, expected = seen.is_exact, leading(prompt, prompts[:number])
        found = seen.note(names_of(prompt))
        assert found == expected if was_exact else found <= expected
        assert len(seen) <= 2 * (capacity + 5)


def test_the_last_names_survive_a_change_of_the_generations() -> None:
    seen = SeenBlocks(4)
    for number in range(40):
        seen.note(names_of([number]))
    assert not seen.is_exact
    assert seen.note(names_of([39])) == 1
    assert seen.note(names_of([0])) == 0
