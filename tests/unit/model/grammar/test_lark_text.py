"""Schemas and control tokens inside grammars; everything else stays as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.model.grammar.lark_text import prepared_lark

IDS = {"<|im_start|>": 1, "<s>": 2}


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("start: <s> <|im_start|> <other>", "start: <[2]> <[1]> <other>"),
        ('start: "<s>" <s>', 'start: "<s>" <[2]>'),
        (r'start: "\"<s>" <s>', r'start: "\"<s>" <[2]>'),
        (r"start: /<s>\/<s>/ <s>", r"start: /<s>\/<s>/ <[2]>"),
        ("start: a // <s>\na: <s> # <s>", "start: a // <s>\na: <[2]> # <s>"),
        ('start: %json {"const": "<s>"} <s>', 'start: %json {"const": "<s>"} <[2]>'),
        ('start: %json\n{"type": "integer"}"x"', 'start: %json\n{"type": "integer"}"x"'),
        ('start: "%json {" <s>', 'start: "%json {" <[2]>'),
        ("start: %json {broken <s>", "start: %json {broken <[2]>"),
        (
            'start: %json {"type": "integer", "x-guidance": {"item_separator": ","}}',
            'start: %json {"type": "integer", "x-guidance": {"item_separator": ","}}',
        ),
    ],
)
def test_control_tokens_are_referred_to_by_id(given_text, expected) -> None:
    assert prepared_lark(given_text, IDS) == expected


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


@given(st.text('<s>"/\\#%json {}\n', max_size=40))
def test_without_control_tokens_and_schemas_the_text_stays(text) -> None:
    if "%json" not in text:
        assert prepared_lark(text, {}) == text
