"""Errors name the field of the request, also where it has another name in the engine."""

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.fields.strict import parse_fields
from kvferry.gateway.http.openai.schema import ChatRequest
from kvferry.gateway.http.responses.body import ResponseRequest

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_completion_tokens": 0},
        {"max_tokens": 0},
        {"logprobs": True, "top_logprobs": 2**31},
        {"logprobs": True, "top_logprobs": -1},
    ],
)
def test_an_error_names_the_field_that_was_sent(fields) -> None:
    name = list(fields)[-1]
    with pytest.raises(InvalidRequest, match=f"^{name} ") as caught:
        parse_fields(ChatRequest, {"messages": MESSAGES, **fields}).to_sampling()
    assert caught.value.field == name


@pytest.mark.parametrize("value", [-1, 21])
def test_top_logprobs_of_a_response_is_checked_although_it_is_not_included(value: int) -> None:
    body = parse_fields(ResponseRequest, {"input": "x", "top_logprobs": value})
    with pytest.raises(InvalidRequest, match=r"^top_logprobs must be"):
        body.as_chat(MESSAGES)
