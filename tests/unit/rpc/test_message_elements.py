"""The number of elements of a message, counted before the message is parsed."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.rpc.message_elements import MAX_ELEMENTS, check_num_elements
from kvferry.v1.common_pb2 import SamplingParams, TokenIds
from kvferry.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest

_SHAPE = GenerateRequest.DESCRIPTOR


def _chat(num_messages: int, **fields: str) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=[ChatMessage(**fields)] * num_messages))


TOO_LARGE = {
    "empty messages": _chat(190_000),
    "messages": _chat(MAX_ELEMENTS // 3 + 1, role="user", content="a text that makes the message long enough"),
    "strings": GenerateRequest(text="x", sampling=SamplingParams(stop=["a"] * 50_000)),
    "a map": GenerateRequest(text="x", sampling=SamplingParams(logit_bias=dict.fromkeys(range(50_000), 1.0))),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_message_of_too_many_elements_is_refused(name):
    with pytest.raises(InvalidRequest, match=f"more than {MAX_ELEMENTS} fields and elements") as caught:
        check_num_elements(TOO_LARGE[name].SerializeToString(), _SHAPE)
    assert caught.value.reason == "TOO_MANY_ELEMENTS"


FITTING = {
    "a long text": GenerateRequest(text="1" * (4 << 20)),
    "a million token ids": GenerateRequest(tokens=TokenIds(ids=[1] * 1_000_000)),
    "the longest conversation": _chat(4096, role="user", content="a text that makes the message long enough"),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_large_message_of_few_elements_passes(name):
    check_num_elements(FITTING[name].SerializeToString(), _SHAPE)


def test_a_text_is_not_read_as_a_message():
    check_num_elements(GenerateRequest(text="\n\0" * 100_000).SerializeToString(), _SHAPE)


_SERIALIZED = TOO_LARGE["messages"].SerializeToString()


@given(st.binary(max_size=64), st.integers(0, 70_000))
def test_malformed_data_passes_or_is_refused_and_nothing_else(garbage, cut):
    data = _SERIALIZED
    for damaged in (data[:cut] + garbage + data[cut:], garbage + data[: 66_000 + cut]):
        with suppress(InvalidRequest):
            check_num_elements(damaged, _SHAPE)
