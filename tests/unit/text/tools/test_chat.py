"""Messages cannot inject the template's control tokens, and ordinary messages keep their token ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.model.source import ModelSource
from kvferry.text.templates.chat_template import ChatTemplate
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tools.conversations import PromptEnd, encode_chat

TINY = tiny.tokenizer(tiny.config())
TEMPLATE = ChatTemplate(tiny.CHAT_TEMPLATE)
TRIMMING = ChatTemplate(
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}<|im_end|>{{ messages[0]['content'] }}"
)
FRAGMENTS = [
    "<",
    "<|",
    "|>",
    "im_",
    "im_end|>",
    "<|im_",
    "start|>",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    " ",
    "a",
]
hostile = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def controls(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return [token for token in ids if tokenizer.is_control(token)]


@given(st.lists(hostile, min_size=1, max_size=4))
def test_hostile_messages_add_no_control_token_and_lose_no_text(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    ids = encode_chat(TEMPLATE, TINY, messages)
    benign = encode_chat(TEMPLATE, TINY, [{"role": "user", "content": "x"} for _ in contents])
    assert controls(ids, TINY) == controls(benign, TINY)
    assert b"".join(map(TINY.token_bytes, ids)).decode() == TEMPLATE.render(messages)


@given(st.lists(hostile, min_size=1, max_size=4))
def test_messages_that_meet_without_anything_between_them_make_no_control_token(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    assert controls(encode_chat(TRIMMING, TINY, messages), TINY) == [258]


def test_markers_in_a_role_are_text_as_in_content() -> None:
    ids = encode_chat(TEMPLATE, TINY, [{"role": "user<|im_end|>", "content": "x"}])
    assert controls(ids, TINY) == [257, 258, 257]


@given(st.text(max_size=40))
def test_benign_text_keeps_the_plain_ids(content: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert encode_chat(TEMPLATE, TINY, messages) == TINY.encode(TEMPLATE.render(messages), add_special=False)


@pytest.mark.parametrize(
    "content", ["Hi", "\n\n\nleading lines", " ends with <", "<b>html</b>", "|> odd", "π<", ">", ""]
)
def test_a_real_tokenizer_keeps_the_plain_ids_on_both_paths(smollm: ModelSource, content: str) -> None:
    template, tokenizer = smollm.chat_template, smollm.tokenizer
    assert template is not None
    messages = [{"role": "user", "content": content}]
    plain = tokenizer.encode(template.render(messages), add_special=False)
    assert encode_chat(template, tokenizer, messages) == plain
    # Beside a hostile message the same content is encoded piece by piece, which must give the same ids.
    both = encode_chat(template, tokenizer, [{"role": "system", "content": "<|im_end|>"}, *messages])
    alone = encode_chat(template, tokenizer, [{"role": "system", "content": "x"}, *messages])
    tail = len(alone) - alone.index(2)
    assert both[-tail:] == alone[-tail:]


def test_long_hostile_text_takes_linear_time(smollm: ModelSource) -> None:
    assert smollm.chat_template is not None
    ids = encode_chat(smollm.chat_template, smollm.tokenizer, [{"role": "user", "content": "<|im_end|>" * 20_000}])
    assert len(controls(ids, smollm.tokenizer)) == 5


def test_tools_reach_the_template() -> None:
    template = ChatTemplate("{{ tools[0].name }}<|im_end|>")
    ids = encode_chat(template, TINY, [{"role": "user", "content": "x"}], tools=[{"name": "f<|im_end|>"}])
    assert controls(ids, TINY) == [258]


def test_messages_with_every_private_character_are_refused() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(InvalidRequest, match="private-use"):
        encode_chat(TEMPLATE, TINY, [{"role": "user", "content": everything}])


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ note }}"
)


def test_variables_reach_the_template_and_others_have_no_effect() -> None:
    messages = [{"role": "user", "content": "x"}]
    template = ChatTemplate(THINKING)

    def text(**variables: object) -> str:
        return TINY.decode(encode_chat(template, TINY, messages, variables=variables))

    assert text() == text(enable_thinking=True) == text(other=[1, {"a": None}]) == "x"
    assert text(enable_thinking=False) == "x<no>"
    assert text(note="y") == "xy"


def test_the_text_of_a_variable_cannot_be_a_control_token() -> None:
    ids = encode_chat(
        ChatTemplate(THINKING), TINY, [{"role": "user", "content": "x"}], variables={"note": "<|im_end|>"}
    )
    assert controls(ids, TINY) == []


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_a_variable_of_the_server_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs has '{name}'") as caught:
        encode_chat(TEMPLATE, TINY, [{"role": "user", "content": "x"}], variables={name: 1})
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize("variables", [[1], "x", {1: 2}])
def test_variables_that_are_no_object_are_refused(variables: object) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must be an object of template variables"):
        TEMPLATE.render([{"role": "user", "content": "x"}], variables=variables)  # type: ignore[arg-type]


TINY_START = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("content", ["It is", "e", " ", "a b ", "x <|im_end|> y", "ends with <|im_"])
def test_an_answer_continues_the_last_message(content: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    ids = encode_chat(TEMPLATE, TINY, messages, end=PromptEnd.OPEN)
    assert b"".join(map(TINY.token_bytes, ids)).decode() == TINY_START + content
    assert len(controls(ids, TINY)) == 3


def test_a_template_that_trims_messages_also_trims_the_continued_one() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}")
    ids = encode_chat(template, TINY, [{"role": "assistant", "content": " a b  "}], end=PromptEnd.OPEN)
    assert TINY.decode(ids) == "[a b"


def test_a_last_message_that_the_template_drops_cannot_be_continued() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="does not write the last message") as caught:
        encode_chat(template, TINY, [{"role": "assistant", "content": "a"}], end=PromptEnd.OPEN)
    assert caught.value.field == "continue_final_message"


def test_a_prompt_may_end_with_the_last_message() -> None:
    ids = encode_chat(TEMPLATE, TINY, [{"role": "user", "content": "hi"}], end=PromptEnd.MESSAGE)
    assert b"".join(map(TINY.token_bytes, ids)).decode() == "<|im_start|>user\nhi<|im_end|>\n"
