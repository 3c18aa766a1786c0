"""Errors name the field of the request, also where it has another name in the engine."""

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.fields.parsing import parse_fields
from kvferry.gateway.http.openai.schema import ChatRequest

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
