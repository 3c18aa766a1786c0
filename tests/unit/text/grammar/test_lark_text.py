"""Schemas and control tokens inside grammars; everything else stays as it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.json_schema import WHITESPACE
from kvferry.text.grammar.lark_text import NamedTokens, prepared_lark

IDS = NamedTokens({"<|im_start|>": 1, "<s>": 2})
TIGHT = '"x-guidance": {"whitespace_flexible": false}'


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("start: <s> <|im_start|> <other>", "start: <[2]> <[1]> <other>"),
        ('start: "<s>" <s>', 'start: "<s>" <[2]>'),
        (r'start: "\"<s>" <s>', r'start: "\"<s>" <[2]>'),
        (r"start: /<s>\/<s>/ <s>", r"start: /<s>\/<s>/ <[2]>"),
        ("start: a // <s>\na: <s> # <s>", "start: a // <s>\na: <[2]> # <s>"),
        (f'start: %json {{"const": "<s>", {TIGHT}}} <s>', f'start: %json {{"const": "<s>", {TIGHT}}} <[2]>'),
        (f'start: %json\n{{"type": "integer", {TIGHT}}}"x"', f'start: %json\n{{"type": "integer", {TIGHT}}}"x"'),
        ("start: %json true <s>", "start: %json true <[2]>"),
    ],
)
def test_control_tokens_are_referred_to_by_id(given_text, expected) -> None:
    assert prepared_lark(given_text, IDS) == expected


def test_a_schema_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="%json is not followed by a valid JSON schema"):
        prepared_lark("start: %json {broken <s>", IDS)


@pytest.mark.parametrize("text", ['start: "a', r'start: "a\"', "start: /a", r"start: /a\/"])
def test_the_compiler_rejects_a_literal_that_is_not_closed(text) -> None:
    compiler = GrammarCompiler(tiny.tokenizer(tiny.config()))
    with pytest.raises(InvalidRequest, match="lexer"):
        compiler.compile(Constraint(ConstraintKind.GRAMMAR, text))


def test_the_patterns_of_an_embedded_schema_are_made_enforceable() -> None:
    prepared = prepared_lark(r'start: x %json {"pattern": "^[\\x00-\\x1f]$"} "x"', IDS)
    assert prepared.startswith("start: x %json {")
    assert prepared.endswith('} "x"')
    assert r"&&[^\\x1f]" in prepared


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"minimum": 9007199254740993}', "minimum is 9007199254740993; only bounds between"),
        ('{"items": {"const": 9007199254740993}}', "const has 9007199254740993; only numbers"),
        ('{"x-guidance": {"lenient": true}}', "x-guidance must be an object with item_separator"),
        ('{"x-guidance": 1}', "x-guidance must be an object"),
    ],
)
def test_an_embedded_schema_that_cannot_be_enforced_is_refused(schema, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        prepared_lark(f"start: %json {schema}", IDS)


@pytest.mark.parametrize("hiding", ['/x\n"/', '/a/i // "\n', '"\\"/" /y\\/\n/', "# '\n"])
def test_no_text_before_a_schema_hides_it(hiding) -> None:
    with pytest.raises(InvalidRequest, match="minimum is 9007199254740993"):
        prepared_lark(f'start: {hiding} %json {{"minimum": 9007199254740993}} "z" /"/', IDS)


@pytest.mark.parametrize(
    "text", ['start: "%json {}"', "start: /a%json {}/", "start: a // %json {}", "# %json\nstart: a"]
)
def test_a_schema_within_another_token_is_refused(text) -> None:
    with pytest.raises(InvalidRequest, match=r"write \\x25json"):
        prepared_lark(text, IDS)


@pytest.mark.parametrize(
    "attributes",
    ["[temperature=0.5]", " [temperature = 0.5]", '[stop="]", temperature=0.5]', "[capture,\ntemperature=1]"],
)
def test_the_temperature_of_a_rule_is_refused(attributes) -> None:
    with pytest.raises(InvalidRequest, match="set the request's temperature"):
        prepared_lark(f"start: a\na{attributes}: /x+/", IDS)


def test_a_rule_may_be_named_temperature() -> None:
    text = 'start: temperature "temperature=1" /temperature=2/\ntemperature: "x"'
    assert prepared_lark(text, IDS) == text


@pytest.mark.parametrize("options", ["", ', "x-guidance": {"item_separator": ","}'])
def test_whitespace_of_an_embedded_schema_is_limited(options) -> None:
    assert f'"whitespace_pattern": {json.dumps(WHITESPACE)}' in prepared_lark(
        f'start: %json {{"type": "object"{options}}}', IDS
    )


@given(st.text('<s>"/\\#%json {}\n', max_size=40))
def test_without_control_tokens_and_schemas_the_text_stays(text) -> None:
    if "%json" not in text:
        assert prepared_lark(text, NamedTokens()) == text


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ('start: "<call>"', 'start: ((<[7]> | "<call>"))'),
        ('start: "a<call>b\\n" "c"', 'start: ("a" (<[7]> | "<call>") "b\\n") "c"'),
        ('start: x\nx: "<call>" | "y"', 'start: x\nx: ((<[7]> | "<call>")) | "y"'),
        ('start: T\nT: "<call>"', 'start: T\nT: "<call>"'),  # a terminal cannot refer to tokens
        ('start: x\nx[suffix="<call>"]: /.*/', 'start: x\nx[suffix="<call>"]: /.*/'),
        ('start: "\\<call>"', 'start: "\\<call>"'),
        ('start: "<im_start>"', 'start: "<im_start>"'),
    ],
)
def test_an_ordinary_marker_may_be_its_token_or_its_text(given_text, expected) -> None:
    assert prepared_lark(given_text, NamedTokens({"<call>": 7, "<im_start>": 1}, ("<call>",))) == expected
