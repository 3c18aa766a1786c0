import pytest
from harness.fakes.byte_model import byte_model

from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.serving import prompts


def fit(token_ids: list[int], context: int = 10, **sampling: object) -> SamplingParams:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return prompts.fit(byte_model(), token_ids, params, context, lambda: 99)


def test_max_tokens_is_clamped_to_the_room_that_is_left():
    assert fit([1] * 4, max_tokens=100).max_tokens == 6
    assert fit([1] * 4).max_tokens == 6
    assert fit([1] * 4, max_tokens=2).max_tokens == 2


def test_a_seed_is_drawn_only_when_none_came():
    assert fit([1]).seed == 99
    assert fit([1], seed=0).seed == 0


@pytest.mark.parametrize(
    ("token_ids", "sampling", "field", "words"),
    [
        ([], {}, "prompt", "empty"),
        ([1] * 10, {}, "prompt", "10 tokens > 9 maximum; .* is 10 tokens, .*at least 1 tokens"),
        ([1] * 13, {}, "prompt", "at least 4 tokens"),
        ([1, 258], {}, "prompt", "token id 258.*0 to 257"),
        ([1, -1], {}, "prompt", "token id -1"),
        ([1], {"stop_token_ids": (5, 300)}, "stop_token_ids", "300"),
        ([1], {"logit_bias": {400: 1.0}}, "logit_bias", "400"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens", r"min_tokens must be at most max_tokens \(2\), not 3"),
    ],
)
def test_requests_that_can_never_run_are_refused_with_their_numbers(token_ids, sampling, field, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        fit(token_ids, **sampling)
    assert caught.value.field == field


def test_only_the_served_model_is_accepted():
    prompts.check_model(byte_model(), "")
    prompts.check_model(byte_model(), "bytes")
    with pytest.raises(UnknownModel, match="'gpt-4' is not served here; use 'bytes'"):
        prompts.check_model(byte_model(), "gpt-4")


def test_a_text_longer_than_the_context_can_hold_is_refused_before_it_is_encoded():
    with pytest.raises(InvalidRequest, match=r"9 tokens > 7 maximum.*its 513 characters are 9 tokens or more"):
        prompts.encode_text(byte_model(8), "a" * 513)
    with pytest.raises(InvalidRequest, match="characters") as caught:
        prompts.encode_chat(byte_model(8), [{"role": "user", "content": "a" * 257}] * 2)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_the_number_of_messages_is_bounded():
    with pytest.raises(InvalidRequest, match="messages has 4097 messages; at most 4096 are accepted"):
        prompts.encode_chat(byte_model(), [{"role": "user", "content": ""}] * 4097)


def test_a_conversation_needs_messages_and_roles_of_the_template():
    with pytest.raises(InvalidRequest, match="messages is empty"):
        prompts.encode_chat(byte_model(), [])
    with pytest.raises(InvalidRequest, match="'robot'"):
        prompts.encode_chat(byte_model(), [{"role": "robot", "content": "x"}])
    ids = prompts.encode_chat(byte_model(), [{"role": "user", "content": "x"}])
    assert bytes(ids) == b"<user>x<assistant>"
