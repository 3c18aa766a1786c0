"""The grammar of FunctionGemma's calls: what it accepts, in text and with control tokens, and what it refuses."""

from typing import Any

import pytest
from unit.text.tools.test_grammars import ALL_MARKS, CONTROL, NO_MARKS, accepts, compiled, made

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tools import Tool
from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import CallFormat
from kvferry.text.tools.grammars import calls_grammar

FORMAT = CallFormat.FUNCTIONGEMMA
TOKENIZER = made(())


def grammar(properties: dict[str, Any], **more: Any) -> str:
    schema = {"type": "object", "properties": properties, **more}
    return calls_grammar(FORMAT, [Tool("f", "", schema)], NO_MARKS)


def takes(properties: dict[str, Any], members: str, **more: Any) -> bool:
    call = f"<start_function_call>call:f{{{members}}}<end_function_call>"
    return accepts(TOKENIZER, grammar(properties, **more), call)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["<escape><escape>", '<escape>a "b", {c}<escape>'], ["a", '"a"', "1"]),
        ({"type": "string", "pattern": "^[a-c]{2}$"}, ["<escape>ab<escape>"], ["<escape>ad<escape>"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["<escape>ab<escape>"], ["<escape>abcd<escape>"]),
        ({"enum": ["x", "y z", 3, None]}, ["<escape>y z<escape>", "3", "null"], ["<escape>z<escape>", "4"]),
        ({"const": {"a": ["b", 1]}}, ["{a:[<escape>b<escape>,1]}"], ["{}"]),
        ({"type": "integer", "minimum": 3}, ["3", "17"], ["2", "3.5", "<escape>3<escape>"]),
        ({"type": ["number", "null"]}, ["-0.5", "null"], ["true"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
        (
            {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            ["[]", "[<escape>a<escape>]", "[<escape>a<escape>,<escape>b<escape>]"],
            ["[1]", "[<escape>a<escape>,<escape>b<escape>,<escape>c<escape>]"],
        ),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ["[1]", "[1,2,3]"], ["[]", "[1,]"]),
        (
            {"type": "object", "properties": {"k": {"type": "integer"}, "l": {"type": "boolean"}}, "required": ["l"]},
            ["{k:1,l:true}", "{l:false}"],
            ["{}", "{k:1}", "{l:true,m:1}"],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, ["1", "<escape>a<escape>"], ["null"]),
        ({"enum": ["a", "bb"], "maxLength": 1}, ["<escape>a<escape>"], ["<escape>bb<escape>"]),
        ({"enum": ["a", "bb"], "pattern": "^b"}, ["<escape>bb<escape>"], ["<escape>a<escape>"]),
        ({"type": "string", "enum": ["a", 1]}, ["<escape>a<escape>"], ["1"]),
        ({"type": "integer", "enum": ["a", 1, 2.0, 0.5]}, ["1", "2.0"], ["<escape>a<escape>", "0.5"]),
        ({"type": "string", "anyOf": [{"type": "integer"}, {"maxLength": 1}]}, ["<escape>a<escape>"], ["1"]),
        ({"type": "integer", "allOf": [{"type": ["string", "integer"]}]}, ["1"], ["<escape>a<escape>"]),
        ({"oneOf": [{"type": "integer"}, {"const": "x"}, {"enum": ["y"]}]}, ["1", "<escape>y<escape>"], ["null"]),
        ({"const": '\0\x7f"%'}, ['<escape>\0\x7f"%<escape>'], ["<escape><escape>"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1}, ["[null]"], ["[]", "[null,null]"]),
    ],
)
def test_values_follow_their_schema(schema, good, bad):
    for text in good:
        assert takes({"a": schema}, f"a:{text}"), text
    for text in bad:
        assert not takes({"a": schema}, f"a:{text}"), text


def test_optional_members_may_be_left_out():
    properties = {name: {"type": "integer"} for name in "abc"}
    assert takes(properties, "", required=[])
    assert takes(properties, "b:1", required=["b"])
    assert takes(properties, "a:1,c:2")
    assert not takes(properties, "a:1", required=["b"])
    assert not takes(properties, "b:1,a:1")
    assert not takes(properties, ",a:1")


def test_a_schema_that_refers_to_itself_is_enforced():
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "l": {"$ref": "#/$defs/t"}}, "required": ["v"]}
    properties = {"t": {"$ref": "#/$defs/t"}}
    assert takes(properties, "t:{v:1,l:{v:2,l:{v:3}}}", **{"$defs": {"t": tree}})
    assert not takes(properties, "t:{v:1,l:{}}", **{"$defs": {"t": tree}})


@pytest.mark.parametrize("marks", [NO_MARKS, ALL_MARKS], ids=["text", "control tokens"])
def test_no_string_contains_its_delimiter(marks):
    text = calls_grammar(FORMAT, [Tool("f", "", {"properties": {"a": {"type": "string"}}})], marks)
    matcher = compiled(TOKENIZER if marks is NO_MARKS else made(CONTROL), text)
    if marks is NO_MARKS:
        head = "<start_function_call>call:f{a:<escape>x<escape>"
        assert matcher.try_consume_tokens(list(head.encode())) == len(head)
        assert matcher.try_consume_tokens(list(b"x")) == 0, "the string has ended"
    else:
        head = [CONTROL["<start_function_call>"], *b"call:f{a:", CONTROL["<escape>"], *b"a<escape>b"]
        assert matcher.try_consume_tokens(head) == len(head), "text that spells the token is text"
        assert matcher.try_consume_tokens([CONTROL["<escape>"], *b"}"]) == 2


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {}}}, "of any type"),
        ({"properties": {"a": True}}, "of any type"),
        ({"properties": {"a": {"type": "array"}}}, "an array without items"),
        ({"properties": {"a": {"type": "object", "additionalProperties": {"type": "null"}}}}, "does not name"),
        ({"properties": {"a:b": {"type": "integer"}}}, "'a:b' cannot be written"),
        ({"properties": {"a": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}}, "allOf with several"),
        ({"properties": {"a": {"const": "x<escape>y"}}}, "a constant contains"),
        ({"properties": {"a": {"enum": []}}}, "no possible type"),
        ({"properties": {"a": {"enum": 5}}}, "enum must be an array"),
        ({"properties": {"a": {"anyOf": []}}}, "no possible type"),
        ({"properties": {"a": {"type": []}}}, "no possible type"),
        ({"properties": {"a": {"type": "text"}}}, "no possible type"),
        ({"properties": {"a": {"type": "string", "const": 1}}}, "no possible type"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "oneOf needs"),
        ({"properties": {"a": {"oneOf": [{"const": "x"}, {"enum": ["y", "x"]}]}}}, "oneOf needs"),
        ({"properties": {"<a": {"type": "integer"}}}, "'<a' cannot be written"),
        ({"properties": {"k" * 257: {"type": "integer"}}}, "more than 256 characters"),
        (
            {"properties": {"a": {"type": "object", "properties": {"k" * 257: {"type": "integer"}}}}},
            "cannot be written",
        ),
        ({"properties": {"a": {"type": "null"}}, "required": [["a"]]}, "an array of strings"),
        ({"properties": {"a": {"type": "object", "properties": {}, "required": [{}]}}}, "an array of strings"),
        ({"anyOf": [{}]}, "'anyOf'"),
    ],
)
def test_schemas_that_the_format_cannot_express_are_refused(schema, words):
    with pytest.raises(InvalidRequest, match="writes strings without quotes") as caught:
        calls_grammar(FORMAT, [Tool("f", "", {"type": "object", **schema})], NO_MARKS)
    assert words in caught.value.message
    assert caught.value.field == "tools"


def test_no_string_contains_its_delimiter_if_its_token_is_not_distinguished():
    marks = Marks.of({}, CONTROL)
    text = calls_grammar(FORMAT, [Tool("f", "", {"properties": {"a": {"type": "string"}}})], marks)
    matcher = compiled(made(CONTROL), text)
    head = [CONTROL["<start_function_call>"], *b"call:f{a:", CONTROL["<escape>"], *b"a<escape"]
    assert matcher.try_consume_tokens(head) == len(head)
    assert matcher.try_consume_tokens(list(b">")) == 0, "a reader would take it for the end of the string"
    assert matcher.try_consume_tokens([CONTROL["<escape>"], *b"}"]) == 2


def test_many_constants_are_enforced():
    properties = {"a": {"enum": [f"v{n}" for n in range(3000)]}}
    assert takes(properties, "a:<escape>v2999<escape>")
    assert not takes(properties, "a:<escape>v3000<escape>")


def test_large_schemas_are_refused():
    properties = {f"p{n}": {"type": "array", "items": {"type": "boolean"}} for n in range(400)}
    with pytest.raises(InvalidRequest, match="more than 512 values"):
        calls_grammar(FORMAT, [Tool("f", "", {"type": "object", "properties": properties})], NO_MARKS)
