"""The search for the longest suffix that occurs earlier, against a search of all lengths and positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.schedule.speculation.matches import SEARCHED_TOKENS, TokenArray, longest_matches
from kvferry.engine.schedule.speculation.proposers import NO_DRAFT, NgramProposer, SuffixProposer


def array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def searched(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """Return the length of the longest suffix with an earlier occurrence, and the end of each occurrence."""
    for length in range(min(most, len(tokens) - 1), 0, -1):
        suffix = tokens[-length:]
        ends = [end for end in range(length - 1, len(tokens) - 1) if tokens[end - length + 1 : end + 1] == suffix]
        if ends:
            return length, ends
    return 0, []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(4, 12))
def test_all_occurrences_of_the_longest_suffix_are_found(tokens: list[int], least: int, most: int) -> None:
    found = longest_matches(array(tokens), min_length=least, max_length=most)
    length, ends = searched(tokens, most)
    if length < least:
        assert found is None
    else:
        assert found is not None
        assert (found.length, found.ends.tolist()) == (length, ends)


def test_only_the_last_tokens_are_searched() -> None:
    tokens = np.arange(SEARCHED_TOKENS + 10, dtype=np.int32)
    tokens[-2:] = tokens[:2]
    assert longest_matches(tokens, min_length=1, max_length=8) is None


@given(st.lists(st.lists(st.integers(0, 9), max_size=900), max_size=6))
def test_an_array_of_tokens_holds_all_that_was_appended(parts: list[list[int]]) -> None:
    tokens = TokenArray()
    for part in parts:
        tokens.extend(part)
    assert tokens.view().tolist() == [token for part in parts for token in part]
    assert len(tokens) == sum(map(len, parts))


def test_the_first_of_equally_long_matches_is_continued() -> None:
    text = array([1, 2, 3, 4, 9, 1, 2, 5, 6, 9, 1, 2])
    assert NgramProposer(min_length=2, max_length=2).propose(text, 3) == ((3, 4, 9), 2)
    assert NgramProposer(min_length=3, max_length=5).propose(text, 3) == ((5, 6, 9), 3), (
        "the suffix 9 1 2 is longer than 1 2"
    )
    assert NgramProposer(min_length=4, max_length=5).propose(text, 3) == NO_DRAFT


def test_a_continuation_beyond_the_text_is_periodic() -> None:
    text = array([7, 1, 2, 3, 1, 2, 3])
    assert NgramProposer(min_length=2, max_length=5).propose(text, 8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)
    assert SuffixProposer(factor=8.0).propose(text, 8).tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_the_most_frequent_continuation_wins_then_the_latest() -> None:
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 3, 1, 2]
    assert SuffixProposer(min_length=2).propose(array(text), 1).tokens == (6,), "1 2 precedes 6 twice and 5 once"
    assert SuffixProposer(min_length=2).propose(array([*text[4:]]), 2).tokens == (6, 3), (
        "after 2 6, tokens 0 and 3 occur once each, token 3 later"
    )
    assert SuffixProposer(min_length=2, factor=0.5).propose(array(text), 9).tokens == (6,), (
        "at most half as many tokens as the match has"
    )


def test_a_draft_ends_where_continuations_differ_too_much() -> None:
    spread = [token for last in (3, 4, 5, 6) for token in (1, 2, last)]
    assert SuffixProposer(min_length=2).propose(array([*spread, 1, 2]), 4) == ((), 2)
