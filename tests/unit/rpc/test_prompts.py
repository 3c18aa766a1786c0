import pytest

from kvferry.core.errors import InvalidRequest, UnknownModel
from kvferry.core.sampling import SamplingParams
from kvferry.rpc import prompts
from kvferry.testing.byte_model import BOS, byte_model


def fit(token_ids: list[int], context: int = 10, **sampling: object) -> SamplingParams:
    wishes = SamplingParams(**sampling)  # type: ignore[arg-type]
    return prompts.fit(byte_model(), token_ids, wishes, context, lambda: 99)


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
        ([1] * 10, {}, "prompt", "10 tokens and the context holds 10.*at least 1 tokens"),
        ([1] * 13, {}, "prompt", "at least 4 tokens"),
        ([1, 258], {}, "prompt", "token id 258.*0 to 257"),
        ([1, -1], {}, "prompt", "token id -1"),
        ([1], {"stop_token_ids": (5, 300)}, "stop_token_ids", "300"),
        ([1], {"logit_bias": {400: 1.0}}, "logit_bias", "400"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "above max_tokens 2"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(token_ids, sampling, field, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        fit(token_ids, **sampling)
    assert caught.value.field == field


def test_only_the_served_model_is_accepted():
    prompts.check_model(byte_model(), "")
    prompts.check_model(byte_model(), "bytes")
    with pytest.raises(UnknownModel, match="'gpt-4' is not served here; this is 'bytes'"):
        prompts.check_model(byte_model(), "gpt-4")


async def test_long_text_gives_the_same_ids_as_short_text():
    text = "ab" * 20_000
    assert await prompts.encode_text(byte_model(), text) == [BOS, *text.encode()]


async def test_a_conversation_needs_messages_and_roles_that_the_template_knows():
    with pytest.raises(InvalidRequest, match="messages is empty"):
        await prompts.encode_chat(byte_model(), [])
    with pytest.raises(InvalidRequest, match="'robot'"):
        await prompts.encode_chat(byte_model(), [{"role": "robot", "content": "x"}])
    ids = await prompts.encode_chat(byte_model(), [{"role": "user", "content": "x"}])
    assert bytes(ids) == b"<user>x<assistant>"
