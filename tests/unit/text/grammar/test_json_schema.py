"""Bounds of numbers are enforced exactly, or refused."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.json_schema import enforced, parsed_schema

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))
EOS = list(tiny.config().eos_token_ids)
_values = st.sampled_from([0, 1, 2, -1, -2, 0.5, -0.5, 0.1, 1.5, 2.25, 10, -10, 100, 0.01])


def accepts(schema: dict[str, Any], text: str) -> bool:
    state = COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).start()
    for byte in text.encode():
        if not state.allowed()[byte]:
            return False
        state.advance([byte])
    return bool(state.allowed()[EOS].all())


@settings(deadline=None, max_examples=150)
@given(
    _values, _values, st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])
)
def test_no_value_outside_of_the_bounds_is_accepted(low: float, high: float, lower: str, upper: str) -> None:
    schema = {"type": "number", lower: low, upper: high}
    if high - low < 0.001:
        return
    for bound, key in ((low, lower), (high, upper)):
        for text in {str(bound), f"{float(bound)}", f"{float(bound)}0", "-0" if bound == 0 else str(bound)}:
            if key.startswith("exclusive"):
                assert not accepts(schema, text), f"{text} of {schema}"
    middle = f"{(low + high) / 2:.4f}".rstrip("0").rstrip(".")
    assert accepts(schema, middle), f"{middle} of {schema}"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 10**30, "maximum": 10**31}, "minimum"),
        ({"type": "integer", "maximum": -(2**53) - 1}, "maximum"),
        ({"properties": {"a": {"anyOf": [{"multipleOf": 1e300}]}}}, "multipleOf"),
        ({"multipleOf": -3}, "multipleOf must be greater than 0, not -3"),
        ({"minimum": 1e-320}, "minimum is 1e-320; at most 60 decimal places"),
        (
            {"exclusiveMinimum": 0, "exclusiveMaximum": 1e-9},
            "the range of exclusiveMinimum 0, exclusiveMaximum 1e-09 is too narrow",
        ),
        ({"maximum": 2**53, "exclusiveMinimum": 2**53 - 1}, "is too narrow"),
        ({"$ref": "#/default", "default": {"const": 2**60 + 1}}, "'#/default' refers to a value of 'default'"),
        ({"$ref": "#/%64efault", "default": {}}, "refers to a value of 'default'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/examples/0"}}}, "refers to a value of 'examples'"),
        ({"$id": "http://x/y", "$ref": "http://x/y#/properties/b/enum/0"}, "refers to a value of 'enum'"),
        ({"$ref": "#/$defs", "$defs": {"const": 2**60 + 1}}, "refers to a value of '.defs'"),
        ({"$ref": "#/items/properties"}, "refers to a value of 'properties'"),
        ({"$ref": "#/$defs/const/const/a"}, "refers to a value of 'const'"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "x-guidance"),
    ],
)
def test_keywords_that_cannot_be_enforced_are_refused_by_name(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parsed_schema(json.dumps(schema))


def test_flags_of_draft_4_exclude_their_bounds() -> None:
    flagged = {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5, "exclusiveMaximum": False}
    assert parsed_schema(json.dumps(flagged)) == {"type": "number", "minimum": 1e-9, "maximum": 0.5}
    whole = {"type": "integer", "maximum": 3, "exclusiveMaximum": True}
    assert parsed_schema(json.dumps(whole)) == {"type": "integer", "exclusiveMaximum": 3}
    assert not accepts(flagged, "0")
    assert accepts(flagged, "0.25")


@pytest.mark.parametrize("pointer", ["#", "#/$defs/enum", "#/properties/default/items", "#name", "http://x/y"])
def test_references_to_schemas_stay(pointer: str) -> None:
    assert parsed_schema(json.dumps({"$ref": pointer})) == {"$ref": pointer}


@pytest.mark.parametrize("source", ['{"minimum": NaN}', "[1,", '{"items":' * 100_000])
def test_invalid_json_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="json_schema"):
        parsed_schema(source)


def test_values_and_names_that_look_like_bounds_stay() -> None:
    schema = {
        "properties": {"exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 0}, "const": {"type": "null"}},
        "additionalProperties": False,
        "enum": [{"exclusiveMinimum": 0}],
        "const": {"minimum": 10**15},
        "default": 10**30,
    }
    assert enforced(schema) == schema


@pytest.mark.parametrize("others", [None, True, {}, {"type": ["integer", "string"]}, {"type": "string"}])
def test_other_members_do_not_spell_the_name_of_a_known_one(others: Any) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    if others is not None:
        schema["additionalProperties"] = others
    assert accepts(schema, '{"a": 1}')
    for text in (r'{"a": 1, "\u0061": "x"}', '{"a": 1, "a": "x"}', r'{"\u0061": "x"}'):
        assert not accepts(schema, text)
    for name in ("b", "aa", "é", r"q\"r", r"\n", ""):
        assert accepts(schema, f'{{"a": 1, "{name}": "x"}}'), name
    assert accepts(schema, '{"a": 1, "b": 2}') == (others != {"type": "string"})


@pytest.mark.parametrize("name", ["\n", "\t", "a\nb", "\x7f", "\x0b"])
def test_a_control_character_of_a_known_name_has_one_spelling(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    code = f"\\u00{ord(name[-1] if len(name) == 1 else name[1]):02x}"
    escaped = json.dumps(name, ensure_ascii=False)
    spelled = escaped.replace("\\n", "\\u000a").replace("\\t", "\\u0009").replace("\x7f", "\\u007f")
    assert accepts(schema, f'{{{escaped}: 1, "b": "x"}}')
    for other in {spelled, spelled.replace(code, code.upper().replace("U", "u")), escaped}:
        assert not accepts(schema, f'{{{escaped}: 1, {other}: "x"}}'), other


def test_objects_with_schemas_of_other_members_are_not_combined() -> None:
    parts = [
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": kind}}
        for kind in ("null", "string")
    ]
    with pytest.raises(InvalidRequest, match="allOf combines objects that allow members besides those"):
        accepts({"allOf": [parts[0], {**parts[1], "properties": {"b": {}}}]}, "{}")


def test_unique_items_of_false_has_no_effect() -> None:
    assert accepts({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"patternProperties": {"^a": {}}, "additionalProperties": True},
            "patternProperties with other members cannot be enforced; set additional",
        ),
        (
            {"patternProperties": {"^a": {}}, "required": ["b"]},
            "patternProperties with other members cannot be enforced; set additional",
        ),
        ({"minProperties": 2}, "minProperties is 2; more members than `required` names cannot be enforced"),
        ({"minProperties": 3, "required": ["a", "b", "a"]}, "minProperties is 3"),
        ({"properties": {"a" * 62: {}}, "additionalProperties": {"type": "null"}}, "names of more than 61 characters"),
        ({"properties": {"a\x1f": {}}}, r"with the control character U\+001F, cannot be enforced; set additionalProp"),
    ],
)
def test_members_that_cannot_be_distinguished_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parsed_schema(json.dumps(schema))


def test_an_object_with_patterns_of_names_has_no_other_members() -> None:
    schema = {"type": "object", "patternProperties": {"^x_": {"type": "null"}}}
    assert accepts(schema, '{"x_a":null}')
    assert accepts(schema, "{}")
    assert not accepts(schema, '{"b":null}')


def test_names_of_members_may_be_those_of_a_definition() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Color"},
        "additionalProperties": {"type": "integer"},
        "$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}},
    }
    assert accepts(schema, '{"red":1,"blue":2}')
    assert not accepts(schema, '{"green":1}')


@pytest.mark.parametrize("number", [2**53, -(2**53), 0, 0.5, 1e15, 123456789.25, 1e-22, -0.0, 0.1, 100000000000000.5])
def test_a_constant_that_the_compiler_reads_exactly_is_accepted(number) -> None:
    for schema in ({"const": number}, {"enum": [{"a": [number]}]}):
        assert enforced(schema) == schema


@pytest.mark.parametrize(
    "number", [2**53 + 1, -(2**64), 1146789012345678901, 101702.88206495787, 4.429196913570163e16, 5e-324, 1e300]
)
def test_a_constant_that_the_compiler_would_change_is_refused(number) -> None:
    for schema in ({"const": number}, {"properties": {"a": {"enum": ["x", {"b": [number]}]}}}):
        with pytest.raises(InvalidRequest, match="only numbers of at most 15 digits"):
            enforced(schema)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-10, 10, places=6).map(float))
def test_an_accepted_constant_is_the_only_output(number) -> None:
    try:
        made = enforced({"const": number})
    except InvalidRequest:
        return
    state = COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(made))).start()
    output = bytearray()
    while not (allowed := state.allowed())[EOS].all():
        output.append(int(allowed.argmax()))
        state.advance([output[-1]])
    assert json.loads(output) == number


def test_the_tighter_bound_is_kept() -> None:
    assert enforced({"exclusiveMinimum": 0, "minimum": 5}) == {"minimum": 5}
    assert enforced({"exclusiveMaximum": 1, "maximum": 5})["maximum"] < 1


def test_a_grammar_without_texts_is_named_as_such() -> None:
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.check(Constraint(ConstraintKind.REGEX, r"[^\s\S]"))
    assert caught.value.reason == "CONSTRAINT_DEAD_END"


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(?=a)b", "allOf": 5},
        {"patternProperties": {"a": {}}, "required": 5},
        {"oneOf": [5, {"properties": {}}]},
        {"propertyNames": {"enum": 5}, "additionalProperties": {}},
    ],
)
def test_a_keyword_with_a_value_of_a_wrong_type_is_no_failure_of_the_server(schema) -> None:
    with suppress(InvalidRequest):
        enforced(schema)


def test_names_of_an_object_are_bounded_if_others_have_a_schema() -> None:
    names = {f"{number:060}": True for number in range(140)}
    assert enforced({"properties": names})
    with pytest.raises(
        InvalidRequest, match=r"names of more than 8192 characters .* set additionalProperties to false"
    ):
        enforced({"properties": names, "additionalProperties": {"type": "integer"}})
