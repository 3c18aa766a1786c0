"""The grammar of calls whose arguments are text: exactly the texts that are read as valid values."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from harness.fakes.answers import split
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import CallFormat
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.grammar import GrammarState
from kvferry.text.tokenizing.byte_level import CHARACTER_OF
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.text.tools.grammars import calls_grammar

EOS = 256


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    def make() -> tokenizers.Tokenizer:
        fast = tokenizers.Tokenizer(models.BPE(vocab={CHARACTER_OF[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken("<|eos|>", special=True, normalized=False)])
        return fast

    return GrammarCompiler(Tokenizer(make, vocab_size=257, eos_token_ids=(EOS,)))


def started(compiler: GrammarCompiler, schema: dict[str, Any]) -> GrammarState:
    tool = Tool("f", "", {"type": "object", **schema})
    grammar = calls_grammar(CallFormat.QWEN3_CODER, [tool], Marks(), is_single=True)
    return compiler.compile(Constraint(ConstraintKind.GRAMMAR, grammar)).start()


def accepts(compiler: GrammarCompiler, schema: dict[str, Any], arguments: dict[str, str]) -> bool:
    elements = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    text = f"<tool_call>\n<function=f>\n{elements}</function>\n</tool_call>".encode()
    state = started(compiler, schema)
    is_accepted = state.num_allowed(list(text)) == len(text)
    if is_accepted:
        state.advance(list(text))
    return is_accepted and state.is_accepting


def of_value(schema: Any, **shared: Any) -> dict[str, Any]:
    return {"properties": {"a": schema}, "required": ["a"], **shared}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"type": "string"}, ["", "a\n\n", '"', "null", "é\x01 </p", "x" * 3000], ["a</parameter>b", "</parameter>"]),
        ({"type": "string", "maxLength": 2}, ["", "éé", "\n\n"], ["abc"]),
        ({"type": "string", "minLength": 2, "maxLength": 20_000}, ["ab", "x" * 20_000], ["a", "x" * 20_001]),
        ({"type": "string", "pattern": "^[0-9a-c]{3}$"}, ["0a9"], ["0a9x", "0d9", '"0a9"', "&&]"]),
        ({"type": "string", "pattern": "b+"}, ["b", "abc", "a\nbb\n"], ["", "a"]),
        ({"type": "string", "pattern": "^/a[^/]*/%json$"}, ["/ab/%json"], ["/a//%json"]),
        ({"type": "string", "pattern": "^(x|y)", "maxLength": 2}, ["x", "yz"], ["z", "xyz"]),
        ({"enum": ['a"', "b/%\n", "é", "<tag>"]}, ['a"', "b/%\n", "é", "<tag>"], ["a", "", '"a\\""']),
        ({"const": "only"}, ["only"], ['"only"', "", "onlyx"]),
        ({"type": "string", "enum": ["ab", "c", 1], "minLength": 2}, ["ab"], ["c", "1"]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc", "None"]),
        ({"type": ["string", "null"]}, ["ab", "null", ""], ["</parameter>"]),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, ["", "a", "null"], ["ab"]),
        ({"type": "string", "anyOf": [{"type": "null"}, {"maxLength": 1}]}, ["a"], ["null"]),
        ({"enum": ["a", None]}, ["a", "null"], ["b"]),
        ({"$ref": "#/$defs/color"}, ["red"], ["blue"]),
        ({"allOf": [{"$ref": "#/$defs/color"}], "description": "d"}, ["red"], ["blue"]),
        ({"type": "string", "format": "date"}, ["2024-02-29", "2023-12-31"], ["2023-02-29", "2023-04-31", "now"]),
        ({"type": "string", "format": "date-time"}, ["2024-01-01T10:00:00Z"], ["2024-01-01"]),
        ({"type": "string", "format": "uri"}, ["https://a.b/c?d=%20#e"], ["a b", "https://%zz"]),
        ({"type": "string", "format": "email"}, ["a.b@c.org"], ["a@", "@b"]),
        ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["256.0.0.1"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
        ({"type": "string", "format": "path"}, ["/x"], []),
        ({"type": "integer", "minimum": 3, "maximum": 5}, ["3"], ["6", '"3"', "three", ""]),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"type": ["string", "integer"], "maximum": 5}, ['"a"', "5"], ["a", "6"]),
        ({"type": "object", "properties": {"k": {"type": "integer"}}}, ['{"k": 1}', "{}"], ['{"l": 1}', '{"k":1}']),
        ({"type": "array", "items": {"$ref": "#/$defs/color"}}, ['["red"]'], ["red", '["blue"]']),
        ({}, ["1", '"a"', "null"], ["a"]),
    ],
)
def test_a_value_fits_its_schema(compiler, schema, texts, others) -> None:
    whole = of_value(schema, **{"$defs": {"color": {"type": "string", "enum": ["red", "green"]}}})
    for text in texts:
        assert accepts(compiler, whole, {"a": text}), text
        arguments = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
        ((_, _, found),) = split(CallFormat.QWEN3_CODER, [arguments], schemas={"f": whole})[2]
        jsonschema.validate(json.loads(found), whole)
    for text in others:
        assert not accepts(compiler, whole, {"a": text}), text


def test_arguments_are_optional_according_to_the_schema(compiler) -> None:
    schema = {"properties": {name: {"type": "integer"} for name in "abc"}, "required": ["b"]}
    assert accepts(compiler, schema, {"b": "1"})
    assert accepts(compiler, schema, {"a": "1", "b": "1", "c": "1"})
    assert accepts(compiler, schema, {"b": "1", "c": "1"})
    assert not accepts(compiler, schema, {"a": "1", "c": "1"})
    assert not accepts(compiler, schema, {"b": "1", "a": "1"})
    assert not accepts(compiler, schema, {"b": "1", "d": "1"})


def test_names_of_arguments_may_have_any_characters(compiler) -> None:
    name = 'a "%json" é-\\'
    assert accepts(compiler, {"properties": {name: {"type": "integer"}}}, {name: "1"})


@pytest.mark.parametrize("seed", range(6))
def test_random_texts_are_read_as_valid_arguments(compiler, seed) -> None:
    properties = {
        "s": {"type": "string", "maxLength": 12},
        "p": {"type": "string", "pattern": "^[<a-b/]{1,9}$"},
        "m": {"type": ["string", "null"], "maxLength": 5},
        "n": {"type": ["number", "null"]},
        "u": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}, {"type": "null"}]},
        "l": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "d": {"type": "string", "format": "date"},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    state, dice, made = started(compiler, schema), random.Random(seed), list[int]()
    while not state.is_accepting:
        allowed = np.flatnonzero(state.allowed()).tolist()
        plain = [token for token in allowed if token < 128] or allowed
        closing = [token for token in plain if token in b'"}]\n']
        made.append(dice.choice(closing if closing and dice.random() < 0.3 else plain))
        state.advance(made[-1:])
        assert len(made) < 3000
    content, _, ((_, _, arguments),) = split(CallFormat.QWEN3_CODER, [bytes(made).decode()], schemas={"f": schema})
    assert content == ""
    jsonschema.validate(json.loads(arguments), schema)


LOOP = {"loop": {"type": "string", "anyOf": [{"$ref": "#/$defs/loop"}]}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{}]}, "'anyOf'"),
        ({"properties": {"a>": {}}}, "angle bracket"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "has 'not'"),
        ({"properties": {"a": {"type": "string", "maxLength": "1}/"}}}, "whole numbers"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "beside or inside"),
        ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "beside or inside"),
        ({"properties": {"a": {"type": "string", "allOf": [True]}}}, "no object"),
        ({"properties": {"a": {"type": "string", "allOf": [{"$ref": "#/$defs/x"}]}}}, "no object"),
        ({"properties": {"a": {"type": "string", "$ref": "#/$defs/loop"}}, "$defs": LOOP}, "refers to itself"),
    ],
)
def test_schemas_that_cannot_be_text_are_refused(schema, words) -> None:
    with pytest.raises(InvalidRequest, match="writes each argument as text") as caught:
        calls_grammar(CallFormat.QWEN3_CODER, [Tool("f", "", {"type": "object", **schema})], Marks())
    assert words in caught.value.message
    assert caught.value.field == "tools"
