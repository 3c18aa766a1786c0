"""Sampling parameters: every bound from both sides, and non-numbers are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

WHOLE = {
    "max_tokens": (1, MAX_OUTPUT_TOKENS),
    "min_tokens": (0, MAX_OUTPUT_TOKENS),
    "top_k": (-1, 1 << 31),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
REAL = {  # low, high, whether the lower bound itself is allowed
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "typical_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.01, 100.0, True),
}
NO_NUMBER = [True, False, "1", math.nan, math.inf, -math.inf, [1], b"1"]


def refused(name: str, value: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert name in caught.value.message
    return caught.value


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_taken_up_to_both_bounds_and_not_beyond(name: str) -> None:
    low, high = WHOLE[name]
    for good in (low, high):
        taken = 0 if (name, good) == ("top_k", -1) else good
        assert getattr(SamplingParams(**{name: good}), name) == taken  # type: ignore[arg-type]
    for bad in (low - 1, high + 1, 1.0, *NO_NUMBER):
        assert f"from {low} to {high}" in refused(name, bad).message


@pytest.mark.parametrize("name", WHOLE)
def test_only_optional_fields_may_be_absent(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None  # type: ignore[arg-type]
    else:
        refused(name, None)


@pytest.mark.parametrize("name", REAL)
def test_real_numbers_are_taken_up_to_both_bounds_and_not_beyond(name: str) -> None:
    low, high, low_is_good = REAL[name]
    for good in (math.nextafter(low, high), high, 1, *([low] if low_is_good else [])):
        assert getattr(SamplingParams(**{name: good}), name) == good  # type: ignore[arg-type]
    for bad in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), None, *NO_NUMBER):
        bounds = f"from {low} to {high}" if low_is_good else f"greater than {low} and at most {high}"
        assert bounds in refused(name, bad).message
    if not low_is_good:
        refused(name, low)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("stop", ("x" * MAX_STOP_CHARS,), ("x" * (MAX_STOP_CHARS + 1),)),
        ("stop", ("é",), ("",)),
        ("stop", ("x",) * MAX_STOP_STRINGS, ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", (0,) * MAX_STOP_TOKEN_IDS, (0,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("stop_token_ids", (1 << 31,), ((1 << 31) + 1,)),
        ("stop_token_ids", (0,), (-1,)),
        ("stop_token_ids", (1,), (True,)),
        ("allowed_token_ids", (0,) * MAX_ALLOWED_TOKEN_IDS, (0,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("allowed_token_ids", (1 << 31,), (-1,)),
        ("bad_words", ("x" * MAX_BAD_WORD_CHARS,), ("x" * (MAX_BAD_WORD_CHARS + 1),)),
        ("bad_words", ("é",), ("",)),
        ("bad_words", ("é",), (1,)),
        ("bad_words", ("x",) * MAX_BAD_WORDS, ("x",) * (MAX_BAD_WORDS + 1)),
        ("bad_word_token_ids", ((0,) * MAX_BAD_WORD_TOKENS,), ((0,) * (MAX_BAD_WORD_TOKENS + 1),)),
        ("bad_word_token_ids", ((1,),) * MAX_BAD_WORD_SEQUENCES, ((1,),) * (MAX_BAD_WORD_SEQUENCES + 1)),
        ("bad_word_token_ids", ((1,),), ((),)),
        ("bad_word_token_ids", ((1,),), ((-1,),)),
        ("truncate_prompt_tokens", -1, 0),
        ("truncate_prompt_tokens", MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS + 1),
        ("truncate_prompt_tokens", None, -2),
        ("ignore_eos", True, 1),
        ("include_stop_str_in_output", True, "yes"),
        ("skip_special_tokens", False, None),
        ("speculation", False, "off"),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("logit_bias", {0: -100.0, 1: 100}, {0: -100.1}),
        ("logit_bias", {5: 0.0}, {5: math.nan}),
        ("logit_bias", {5: 0.0}, {-5: 0.0}),
        ("logit_bias", {5: 0.0}, {"5": 0.0}),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_collections_are_bounded_in_number_and_in_each_element(name: str, good: object, bad: object) -> None:
    assert getattr(SamplingParams(**{name: good}), name) == good  # type: ignore[arg-type]
    refused(name, bad)


@given(
    st.sampled_from([*WHOLE, *REAL]),
    st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3)),
)
def test_accepted_parameters_are_within_their_bounds(name: str, value: object) -> None:
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidRequest:
        return
    if value is None:
        assert name in OPTIONAL
        return
    assert isinstance(value, int if name in WHOLE else int | float)
    assert not isinstance(value, bool)
    low, high = WHOLE[name] if name in WHOLE else REAL[name][:2]
    assert low <= value <= high


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids", "bad_word_token_ids"])
def test_a_string_or_a_single_value_is_no_list(name: str) -> None:
    for bad in ("abc", None, 5):
        assert "must be a list of" in refused(name, bad).message


@pytest.mark.parametrize(("name", "bad"), [("logit_bias", None), ("logit_bias", [1]), ("constraint", "[a-z]+")])
def test_objects_of_another_type_are_refused(name: str, bad: object) -> None:
    assert "must be a" in refused(name, bad).message
