"""Parameters of prompts and bad words are converted to token ids, within bounds."""

import pytest
from harness.fakes.byte_model import ByteTokenizer

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import SamplingParams
from kvferry.model import tiny
from kvferry.text.requests.prompt_parameters import kept_prompt, token_fields, with_bad_word_tokens


def kept(limit: int | None, *, max_tokens: int | None = None, context: int = 8) -> list[int]:
    sampling = SamplingParams(truncate_prompt_tokens=limit, max_tokens=max_tokens)
    return list(kept_prompt(range(10), sampling, context))


def test_the_last_tokens_of_the_prompt_are_kept() -> None:
    assert kept(None) == list(range(10))
    assert kept(3) == [7, 8, 9]
    assert kept(10) == kept(11) == list(range(10))


def test_minus_one_fills_the_context_beside_the_output() -> None:
    assert kept(-1) == list(range(3, 10))
    assert kept(-1, max_tokens=6) == [8, 9]
    assert kept(-1, max_tokens=100) == [9]


def test_a_bad_word_is_banned_with_and_without_a_space_before_it() -> None:
    given = SamplingParams(bad_words=("ab", " c", "ab", "\n"), bad_word_token_ids=((5, 6),))
    made = with_bad_word_tokens(given, ByteTokenizer())
    assert made.bad_words == ()
    assert made.bad_word_token_ids == ((5, 6), (97, 98), (32, 97, 98), (99,), (32, 99), (10,))
    assert with_bad_word_tokens(made, ByteTokenizer()) is made


def test_words_that_cannot_be_encoded_and_too_many_sequences_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="a string of bad_words cannot be encoded") as caught:
        with_bad_word_tokens(SamplingParams(bad_words=("\ud800",)), tiny.tokenizer(tiny.config()))
    assert caught.value.field == "bad_words"
    many = SamplingParams(
        bad_words=tuple(f"w{n}" for n in range(64)), bad_word_token_ids=tuple((n,) for n in range(100))
    )
    with pytest.raises(InvalidRequest, match="have 228 sequences of tokens; at most 128"):
        with_bad_word_tokens(many, ByteTokenizer())


def test_every_field_with_token_ids_is_listed() -> None:
    sampling = SamplingParams(
        stop_token_ids=(1,), logit_bias={2: 0.5}, allowed_token_ids=(3,), bad_word_token_ids=((4, 5), (6,))
    )
    assert {name: list(ids) for name, ids in token_fields(sampling).items()} == {
        "stop_token_ids": [1],
        "logit_bias": [2],
        "allowed_token_ids": [3],
        "bad_word_token_ids": [4, 5, 6],
    }
