"""Properties of answers: the result does not depend on the split into pieces, no error, no text lost, bounded work."""

import json
import time

import pytest
from harness.fakes.answers import NAMES, split, written
from hypothesis import given
from hypothesis import strategies as st

from kvferry.text.answers.call_parser import MAX_HELD_CHARS
from kvferry.text.answers.calls import MAX_CALLS
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import CallFormat

MARKS = Marks.of({"[TOOL_CALLS]": 1, "<think>": 2})
FORMATS = st.sampled_from(list(CallFormat))
_FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", ";", "<think>"),
    *('{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '{"name": "x", "arguments": ', '{"arguments": '),
    *('{"a": "b"}', "{}", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", "=", "a", "f(", "[f(", "g(b=", "a="),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "f<｜tool▁sep｜>{",
        "function<｜tool▁sep｜>",
        "f\n```json\n",
        "```",
        "<|tool_call|>",
        "<|/tool_call|>",
        "[{",
        "}]",
    ),
    *("functools[", "<function_calls>", "</function_calls>", "f(a=1)", "g()"),
    *("<function=f>", "<function=", "</function>", "<parameter=a>", "</parameter>", "</param"),
    *("<start_function_call>", "<end_function_call>", "<escape>", "call:f{", "call:g{b:", "a:", "<esc", "{a:<escape>b"),
    *("1", "-", "0.5e", "true", "None", '"name": "f"', ", ", "\n", " ", "é", "\\u00", "</think>", "hello"),
    *MARKS.by_token.values(),
]
TEXTS = st.lists(st.sampled_from(_FRAGMENTS), max_size=24).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4)


def cut(text: str, data: st.DataObject) -> list[str]:
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(FORMATS, TEXTS, st.booleans(), st.booleans(), st.data())
def test_any_split_gives_the_same_answer(call_format, text, has_reasoning, is_open, data):
    options = {"has_reasoning": has_reasoning, "is_reasoning_open": is_open, "marks": MARKS}
    whole = split(call_format, [text], **options)
    assert split(call_format, list(text), **options) == whole
    assert split(call_format, cut(text, data), **options) == whole


@given(FORMATS, TEXTS)
def test_text_without_a_call_is_not_lost(call_format, text):
    content, _, calls = split(call_format, [text])
    if not calls:
        assert content == "".join(c for c in text if c not in MARKS.by_token.values())


@given(FORMATS, CALLS, st.data())
def test_calls_as_models_write_them_are_read_back(call_format, calls, data):
    content, _, found = split(call_format, cut(written(call_format, calls), data))
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert content == ""


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (CallFormat.HERMES, '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100_000),
        (CallFormat.HERMES, '<tool_call>{"arguments": ' + "[" * 100_000),
        (CallFormat.HERMES, "<tool_call>" * 50_000),
        (CallFormat.HERMES, '<tool_call>{"arguments": {"a": "' + "<tool_call>" * 50_000),
        (CallFormat.LLAMA3_JSON, '{"name": "f", "parameters": ' + '{"a": [' * 100_000),
        (CallFormat.MISTRAL, "[TOOL_CALLS]" + "f" * 100_000),
        (CallFormat.MISTRAL, "[TOOL_CALLS][" * 50_000),
        (CallFormat.PYTHONIC, "[f(a=" + "[" * 100_000),
        (CallFormat.PYTHONIC, "[" * 100_000),
        (CallFormat.PYTHONIC, "[f(" * 100_000),
        (CallFormat.PYTHONIC, "[" + "f(), " * 10_000),
        (CallFormat.DEEPSEEK_V3, "<｜tool▁call▁begin｜>" * 50_000),
        (CallFormat.DEEPSEEK_V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n" + "```json" * 50_000),
        (CallFormat.DEEPSEEK_V31, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + '{"a": ' * 100_000),
        (CallFormat.GRANITE, "<|tool_call|>[" * 50_000),
        (CallFormat.PHI4, "functools[" * 50_000),
        (CallFormat.OLMO3, "<function_calls>" + "f()\n" * 10_000),
        (CallFormat.FUNCTIONGEMMA, "<start_function_call>call:f{a:" + "[" * 100_000),
        (CallFormat.FUNCTIONGEMMA, "<start_function_call>call:f{a:<escape>" + "<" * 100_000),
        (CallFormat.FUNCTIONGEMMA, "<start_function_call>" * 30_000),
        (CallFormat.QWEN3_CODER, "<function=f><parameter=a>" + "<" * 100_000),
        (CallFormat.QWEN3_CODER, "<function=f><parameter=a>" + "[" * 100_000 + "</parameter></function>"),
        (CallFormat.QWEN3_CODER, "<function=f>" + "<function=" * 50_000),
        (CallFormat.QWEN3_CODER, "<function=f>" + "".join(f"<parameter=a{n}></parameter>" for n in range(5000))),
    ],
)
def test_hostile_text_takes_bounded_time(call_format, text):
    begun = time.perf_counter()
    content, _, calls = split(call_format, [text])
    assert time.perf_counter() - begun < 10
    assert len(calls) <= MAX_CALLS
    assert content or calls


def test_the_length_of_withheld_text_is_bounded():
    text = '<tool_call>{"arguments": {"a": "' + "x" * (2 * MAX_HELD_CHARS)
    content, _, calls = split(CallFormat.HERMES, [text])
    assert (content, calls) == (text, [])
