"""Which sampling parameters a beam search accepts."""

from dataclasses import fields
from typing import Any

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import SamplingParams
from kvferry.text.requests.beams import check_beam_sampling

OTHER: dict[str, Any] = {
    "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.5, "seed": 1,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0, "logit_bias": {1: 1.0},
    "stop": ("x",), "stop_token_ids": (1,), "ignore_eos": True, "logprobs": 0,
    "constraint": Constraint(ConstraintKind.REGEX, "a"), "typical_p": 0.5, "allowed_token_ids": (1,),
    "bad_words": ("x",), "bad_word_token_ids": ((1,),), "include_stop_str_in_output": True,
    "skip_special_tokens": False, "truncate_prompt_tokens": 2, "prompt_logprobs": 0, "speculation": False,
}  # fmt: skip
ACCEPTED = {"max_tokens", "ignore_eos", "skip_special_tokens", "truncate_prompt_tokens", "seed", "speculation"}


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams)])
def test_each_parameter_is_applied_or_refused_by_name(name: str) -> None:
    sampling = SamplingParams(**{name: OTHER[name]})
    assert sampling != SamplingParams()
    if name in ACCEPTED:
        check_beam_sampling(sampling)
        return
    with pytest.raises(InvalidRequest) as caught:
        check_beam_sampling(sampling)
    assert caught.value.field == name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_temperatures_that_keep_the_order_are_accepted(temperature: float) -> None:
    check_beam_sampling(SamplingParams(temperature=temperature))
