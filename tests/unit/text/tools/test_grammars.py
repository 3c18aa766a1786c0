"""Grammars of calls: llguidance accepts them; texts that they accept are parsed as calls and fit the schemas."""

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from harness.fakes.answers import split
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.marks import MARKERS, Marks
from kvferry.text.answers.registry import CallFormat
from kvferry.text.grammar.grammar_text import grammar_text
from kvferry.text.grammar.lark_text import NamedTokens
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tools.grammars import MAX_CALLS, calls_grammar, thought_rules

END = 256
CONTROL = {text: END + 1 + number for number, text in enumerate(MARKERS)}
NO_MARKS, ALL_MARKS = Marks(), Marks.of(CONTROL)

SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 'y"', "z::=z", "é"]}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "title": "T",
        "description": "start: <tool_call> \\ \" '",
        "properties": {
            "n": {"anyOf": [{"type": "null"}, {"type": "number"}]},
            "l": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3},
        },
        "required": ["l"],
        "additionalProperties": False,
        "$defs": {
            "item": {"type": "object", "properties": {"k": {"type": "string", "maxLength": 4}}, "required": ["k"]}
        },
    },
]
TOOLS = tuple(Tool(name, "", schema) for name, schema in zip(["f", "g", "h", "i-_9", "J"], SCHEMAS, strict=True))
BY_NAME = {tool.name: tool.schema for tool in TOOLS}


def made(controls: Iterable[str]) -> LLTokenizer:
    fast = Tokenizer(models.BPE(vocab={CHARACTER_OF[byte]: byte for byte in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|end|>", *controls)])
    return LLTokenizer(fast.to_str(), eos_token=END)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return made(())


@pytest.fixture(scope="module")
def marked() -> LLTokenizer:
    return made(CONTROL)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar as a request's constraint."""
    return LLMatcher(tokenizer, grammar_text(Constraint(ConstraintKind.GRAMMAR, grammar), NamedTokens()))


def drawn(tokenizer: LLTokenizer, grammar: str, marks: Marks, seed: int, most: int = 3000) -> str | None:
    """Return a random text that the grammar accepts, ended as soon as possible; `None` if it exceeds `most` tokens."""
    matcher = compiled(tokenizer, grammar)
    dice = random.Random(seed)
    mask = allocate_token_bitmask(1, tokenizer.vocab_size)
    tokens: list[int] = []
    while not matcher.is_accepting():
        assert not matcher.is_error(), matcher.get_error()
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
        closing = (
            [token for token in allowed.tolist() if token < 256 and chr(token) in '"}])'] if dice.random() < 0.3 else []
        )
        # Only ASCII bytes are drawn, so that any sequence of them is valid text.
        plain = [token for token in allowed.tolist() if token < 128 or token > END]
        token = dice.choice(closing or plain or allowed.tolist())
        matcher.consume_token(token)
        tokens.append(token)
        if len(tokens) > most:
            return None
    text, pending = "", b""
    for token in [*tokens, END]:
        if token < 256:
            pending += bytes([token])
        else:
            text += pending.decode() + marks.by_token.get(token, "")
            pending = b""
    return text


def check(calls: list[tuple[str, str, str]]) -> None:
    for _, name, arguments in calls:
        jsonschema.validate(json.loads(arguments), BY_NAME[name])


@pytest.mark.parametrize("marks", [NO_MARKS, ALL_MARKS], ids=["text", "control tokens"])
@pytest.mark.parametrize("call_format", list(CallFormat))
def test_texts_of_a_grammar_are_calls_that_fit(call_format, marks, tokenizer, marked):
    tokenizer = marked if marks is ALL_MARKS else tokenizer
    tools = tuple(tool for tool in TOOLS if call_format not in PYTHON or "-" not in tool.name)
    for thought in ("", thought_rules(marks, is_open=False), thought_rules(marks, is_open=True)):
        grammar = calls_grammar(call_format, tools, marks, thought=thought)
        assert compiled(tokenizer, grammar).get_error() == ""
    grammar = calls_grammar(call_format, tools, marks)
    seen: set[str] = set()
    for seed in range(60):
        text = drawn(tokenizer, grammar, marks, seed)
        if text is None:
            continue
        names = tuple(tool.name for tool in tools)
        content, _, calls = split(call_format, [text], names=names, marks=marks, schemas=BY_NAME)
        assert content == ""
        assert 0 < len(calls) <= MAX_CALLS
        check(calls)
        seen |= {name for _, name, _ in calls}
    assert len(seen) >= 3


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = compiled(tokenizer, grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


PYTHON = (CallFormat.PYTHONIC, CallFormat.OLMO3)
FIRST, LAST, CALL, STOP, SEP, *_ = MARKERS[8:]
FENCED = f"{CALL}function{SEP}{{}}\n```json\n{{}}\n```{STOP}"
ONE = {
    CallFormat.DEEPSEEK_V3: FIRST + FENCED.format("h", '{"city": "x"}') + LAST,
    CallFormat.DEEPSEEK_V31: f'{FIRST}{CALL}h{SEP}{{"city": "x"}}{STOP}{LAST}',
    CallFormat.GRANITE: '<|tool_call|>[{"name": "h", "arguments": {"city": "x"}}]',
    CallFormat.OLMO3: '<function_calls>h(city="x")</function_calls>',
    CallFormat.FUNCTIONGEMMA: "<start_function_call>call:h{city:<escape>x<escape>}<end_function_call>",
    CallFormat.PHI4: '<|tool_call|>[{"name": "h", "arguments": {"city": "x"}}]<|/tool_call|>',
    CallFormat.HERMES: '<tool_call>\n{"name": "h", "arguments": {"city": "x"}}\n</tool_call>',
    CallFormat.LLAMA3_JSON: '{"name": "h", "parameters": {"city": "x"}}',
    CallFormat.HARMONY: '<|channel|>commentary to=functions.h <|constrain|>json<|message|>{"city": "x"}',
    CallFormat.MISTRAL: '[TOOL_CALLS][{"name": "h", "arguments": {"city": "x"}}]',
    CallFormat.PYTHONIC: '[h(city="x")]',
    CallFormat.QWEN3_CODER: "<tool_call>\n<function=h>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>",
}
_LIST = '<|tool_call|>[{"name": "h", "arguments": {"city": "x"}}, {"name": "f", "arguments": {}}]'
TWO = {
    CallFormat.DEEPSEEK_V3: ONE[CallFormat.DEEPSEEK_V3].removesuffix(LAST) + "\n" + FENCED.format("f", "{}") + LAST,
    CallFormat.DEEPSEEK_V31: f"{ONE[CallFormat.DEEPSEEK_V31].removesuffix(LAST)}{CALL}f{SEP}{{}}{STOP}{LAST}",
    CallFormat.GRANITE: _LIST,
    CallFormat.OLMO3: '<function_calls>h(city="x")\nf()</function_calls>',
    CallFormat.FUNCTIONGEMMA: f"{ONE[CallFormat.FUNCTIONGEMMA]}<start_function_call>call:f{{}}<end_function_call>",
    CallFormat.PHI4: f"{_LIST}<|/tool_call|>",
    CallFormat.HERMES: f"{ONE[CallFormat.HERMES]}\n{ONE[CallFormat.HERMES]}",
    CallFormat.LLAMA3_JSON: f"{ONE[CallFormat.LLAMA3_JSON]}; {ONE[CallFormat.LLAMA3_JSON]}",
    CallFormat.MISTRAL: '[TOOL_CALLS][{"name": "h", "arguments": {"city": "x"}}, {"name": "f", "arguments": {}}]',
    CallFormat.PYTHONIC: '[h(city="x"), f()]',
    CallFormat.QWEN3_CODER: f"{ONE[CallFormat.QWEN3_CODER]}\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
    CallFormat.HARMONY: f"{ONE[CallFormat.HARMONY]}<|call|><|start|>assistant"
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
}


@pytest.mark.parametrize("call_format", list(CallFormat))
def test_one_call_or_several(call_format, tokenizer):
    tools = TOOLS[:3]
    several, single = (calls_grammar(call_format, tools, NO_MARKS, is_single=s) for s in (False, True))
    assert accepts(tokenizer, several, ONE[call_format])
    assert accepts(tokenizer, several, TWO[call_format])
    assert accepts(tokenizer, single, ONE[call_format])
    assert not accepts(tokenizer, single, TWO[call_format])
    assert not accepts(tokenizer, several, "no call")
    wrong = {
        CallFormat.QWEN3_CODER: ("\nx\n", f"\n{'x' * 9}\n"),
        CallFormat.FUNCTIONGEMMA: ("<escape>x<escape>", "1"),
    }.get(call_format, ('"x"', "1"))
    assert not accepts(tokenizer, several, ONE[call_format].replace(*wrong))
    assert not accepts(tokenizer, calls_grammar(call_format, tools[:2], NO_MARKS), ONE[call_format])
    assert len(split(call_format, [TWO[call_format]], names=("h", "f"))[2]) == 2


def test_the_number_of_calls_is_bounded(tokenizer):
    grammar = calls_grammar(CallFormat.LLAMA3_JSON, TOOLS[:3], NO_MARKS)
    assert accepts(tokenizer, grammar, "; ".join([ONE[CallFormat.LLAMA3_JSON]] * MAX_CALLS))
    assert not accepts(tokenizer, grammar, "; ".join([ONE[CallFormat.LLAMA3_JSON]] * (MAX_CALLS + 1)))


@pytest.mark.parametrize("call_format", list(CallFormat))
def test_reasoning_may_come_before_the_calls(call_format, tokenizer):
    free = calls_grammar(call_format, TOOLS[:3], NO_MARKS, thought=thought_rules(NO_MARKS, is_open=False))
    opened = calls_grammar(call_format, TOOLS[:3], NO_MARKS, thought=thought_rules(NO_MARKS, is_open=True))
    call = ONE[call_format]
    assert accepts(tokenizer, free, call)
    assert accepts(tokenizer, free, f"<think>\nwell <b>\n</think>\n\n{call}")
    assert accepts(tokenizer, opened, f"well\n</think>{call}")
    assert not accepts(tokenizer, free, f"<think>well{call}")
    assert not accepts(tokenizer, opened, "well</think>no")


def test_the_reasoning_of_harmony_is_a_message(tokenizer):
    thought = thought_rules(NO_MARKS, is_open=False, call_format=CallFormat.HARMONY)
    grammar = calls_grammar(CallFormat.HARMONY, TOOLS[:3], NO_MARKS, thought=thought)
    call = ONE[CallFormat.HARMONY]
    message = "<|channel|>analysis<|message|>well <|start| {}<|end|><|start|>assistant"
    assert accepts(tokenizer, grammar, call)
    assert accepts(tokenizer, grammar, message + call)
    assert not accepts(tokenizer, grammar, message)
    assert not accepts(tokenizer, grammar, f"<think>well</think>{call}")


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_python_keywords_are_optional_according_to_the_schema(tokenizer, data):
    names = ["a", "b", "c", "d"]
    required = data.draw(st.lists(st.sampled_from(names), unique=True))
    present = [name for name in names if data.draw(st.booleans())]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": required}
    grammar = calls_grammar(CallFormat.PYTHONIC, [Tool("f", "", schema)], NO_MARKS)
    text = f"[f({', '.join(f'{name}=1' for name in present)})]"
    assert accepts(tokenizer, grammar, text) == set(required).issubset(present)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{}]}, "'anyOf'"),
        ({"properties": {"a-b": {}}}, "'a-b' is not a name"),
        ({"properties": {"class": {}}}, "'class' is not a name"),
        ({"properties": {"a": 1}}, "no schema"),
        ({"properties": {}, "required": ["a"]}, "requires 'a'"),
        ({"properties": []}, "must be an object"),
        ({"properties": {"a": {"$ref": "#"}}}, "a $ref to '#'"),
        ({"properties": {"a": {"items": {"$ref": "#/properties/b"}}, "b": {}}}, "a $ref to '#/properties/b'"),
    ],
)
def test_schemas_that_are_no_keyword_arguments_are_refused(schema, words):
    with pytest.raises(InvalidRequest, match="Python keyword arguments") as caught:
        calls_grammar(CallFormat.PYTHONIC, [Tool("f", "", {"type": "object", **schema})], NO_MARKS)
    assert words in caught.value.message
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    "call_format", [each for each in CallFormat if each not in (CallFormat.QWEN3_CODER, CallFormat.FUNCTIONGEMMA)]
)
def test_patterns_and_members_are_enforced_exactly(call_format, tokenizer):
    inner = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
    properties = {"city": {"type": "string", "pattern": "^[0-9a-c]{3}$"}, "in": {"type": "array", "items": inner}}
    of_names = {"type": "object", "additionalProperties": {"type": "null"}, "properties": {"k": {"type": "integer"}}}
    if call_format in PYTHON:
        properties = {"city": properties["city"], "into": properties["in"]}
    schema = {"type": "object", "properties": {**properties, "more": of_names}, "required": ["city"]}
    grammar = calls_grammar(call_format, [Tool("h", "", schema)], NO_MARKS)

    def call(value, more=""):
        return ONE[call_format].replace('"x"', value + more)

    name, sign = ("into", "=") if call_format in PYTHON else ('"in"', ": ")
    assert accepts(tokenizer, grammar, call('"0a9"'))
    assert accepts(tokenizer, grammar, call('"0a9"', f', {name}{sign}[{{"k": 1}}]'))
    assert not accepts(tokenizer, grammar, call('"0d9"'))
    assert not accepts(tokenizer, grammar, call('"&&]"'))
    assert not accepts(tokenizer, grammar, call('"0a9"', f', {name}{sign}[{{"k": 1, "l": 1}}]'))
    more = name.replace("into", "more").replace("in", "more")
    assert accepts(tokenizer, grammar, call('"0a9"', f', {more}{sign}{{"k": 1, "b": null}}'))
    assert not accepts(tokenizer, grammar, call('"0a9"', f', {more}{sign}{{"k": 1, "b&&x]": 1}}'))
    if call_format not in PYTHON:
        assert not accepts(tokenizer, grammar, call('"0a9"', ', "other": 1'))


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"o": {"properties": {"a": {}}, "required": ["b"]}}}, '{"o": {"b": 1}}'),
        ({"properties": {"o": {"properties": {"k": {}}, "enum": [{"k": 1, "z": 2}]}}}, '{"o": {"k": 1, "z": 2}}'),
        (
            {
                "properties": {
                    "base": {"properties": {"x": {}}},
                    "ext": {"allOf": [{"$ref": "#/properties/base"}, {"properties": {"y": {}}, "required": ["y"]}]},
                }
            },
            '{"ext": {"x": 1, "y": 2}}',
        ),
        ({"properties": {"a\x1f": {"type": "null"}}}, '{"a\\u001f": null}'),
    ],
)
def test_objects_that_need_other_members_stay_open(schema, arguments, tokenizer):
    grammar = calls_grammar(CallFormat.HERMES, [Tool("h", "", {"type": "object", **schema})], NO_MARKS)
    assert accepts(tokenizer, grammar, ONE[CallFormat.HERMES].replace('{"city": "x"}', arguments))
    outside = arguments[:-1] + ', "other": 1}'
    assert not accepts(tokenizer, grammar, ONE[CallFormat.HERMES].replace('{"city": "x"}', outside))


def test_bounds_and_patterns_of_python_keywords_are_enforced_exactly(tokenizer):
    schema = {
        "properties": {"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1}, "s": {"pattern": '^[^"]$'}}
    }
    grammar = calls_grammar(CallFormat.PYTHONIC, [Tool("f", "", {"type": "object", **schema})], NO_MARKS)
    assert accepts(tokenizer, grammar, "[f(x=0.05)]")
    assert not accepts(tokenizer, grammar, "[f(x=0)]")
    assert not accepts(tokenizer, grammar, '[f(s="\\"")]')


@pytest.mark.parametrize("call_format", list(CallFormat))
@pytest.mark.parametrize("value", [5, "a", None, True, {"b": 1}, [5], [None], [["b"]], [{"b": 1}]], ids=repr)
def test_keywords_with_values_of_other_types_are_no_internal_errors(call_format: CallFormat, value: object) -> None:
    members = {"b": {"type": "null"}}
    for keyword in ("required", "enum", "type", "format", "properties", "items", "anyOf", "$ref", "maxLength"):
        for kind in ("string", "object", "array"):
            odd = {"type": kind, "properties": members, "items": members["b"], keyword: value}
            for schema in (odd, {"type": "object", "properties": {"a": odd}}):
                with suppress(InvalidRequest):  # the compiler refuses some of them
                    calls_grammar(call_format, [Tool("f", "", schema)], NO_MARKS)


@pytest.mark.parametrize("call_format", [CallFormat.PYTHONIC, CallFormat.QWEN3_CODER, CallFormat.FUNCTIONGEMMA])
def test_arguments_with_longer_names_than_are_read_are_refused(call_format: CallFormat) -> None:
    def grammar(size: int) -> str:
        schema = {"type": "object", "properties": {"k" * size: {"type": "null"}}}
        return calls_grammar(call_format, [Tool("f", "", schema)], NO_MARKS)

    assert grammar(256)
    with pytest.raises(InvalidRequest, match="more than 256 characters"):
        grammar(257)


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        calls_grammar(CallFormat.HERMES, [Tool("f", "", schema)], NO_MARKS)


@pytest.mark.parametrize("call_format", CallFormat)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_name_of_the_tool(call_format: CallFormat) -> None:
    tool = Tool("find", "", {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**53 + 1}}})
    with pytest.raises(InvalidRequest, match="the parameters of 'find' cannot be enforced: minimum is") as caught:
        calls_grammar(call_format, [tool], Marks({}))
    assert caught.value.field == "tools"
