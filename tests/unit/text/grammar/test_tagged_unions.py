"""Schemas as Pydantic and Zod write them: tagged unions, names of members, formats that are annotations."""

import json
from typing import Any

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.model import tiny
from kvferry.text.grammar.compiler import GrammarCompiler
from kvferry.text.grammar.tagged_unions import distinguished

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))


def accepts(schema: dict[str, Any], value: object) -> bool:
    state = COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))).start()
    try:
        state.advance([*json.dumps(value, ensure_ascii=False).encode()])
    except InvalidRequest:
        return False
    return state.is_accepting


def alternative(tag: dict[str, Any], member: str, required: list[str]) -> dict[str, Any]:
    members = {"t": tag, member: {"type": "integer"}}
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


NUMBERS = {"oneOf": [alternative({"const": 1}, "a", ["t", "a"]), alternative({"const": 2}, "b", ["t", "b"])]}
DEFAULTS = {
    "oneOf": [
        alternative({"const": "x", "default": "x"}, "a", ["a"]),
        alternative({"enum": ["y"], "default": "y"}, "b", ["b"]),
    ]
}
REFERENCES = {
    "properties": {
        "u": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator": {"propertyName": "t"}}
    },
    "type": "object",
    "required": ["u"],
    "additionalProperties": False,
    "$defs": {
        "A": alternative({"const": 1, "default": 1}, "a", []),
        "B": alternative({"const": 2, "default": 2}, "b", []),
    },
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (NUMBERS, [{"t": 1, "a": 5}, {"t": 2, "b": 5}], [{"t": 1, "b": 5}, {"t": 3, "a": 5}, {"a": 5}]),
        (DEFAULTS, [{"t": "x", "a": 5}, {"t": "y", "b": 5}], [{"t": "y", "a": 5}, {"a": 5}]),
        (REFERENCES, [{"u": {"t": 1, "a": 5}}, {"u": {"t": 2}}], [{"u": {"t": 1, "b": 5}}, {"u": {"a": 5}}]),
    ],
    ids=["numbers", "defaults", "references"],
)
def test_a_union_with_different_tags_can_be_enforced(schema, yes, no) -> None:
    assert all(accepts(schema, value) for value in yes)
    assert not any(accepts(schema, value) for value in no)


@pytest.mark.parametrize(
    "alternatives",
    [
        [alternative({"const": 1}, "a", ["t"]), alternative({"const": 1}, "b", ["t"])],
        [alternative({"const": 1}, "a", []), alternative({"const": 2}, "b", [])],  # a tag that may be left out
        [alternative({"type": "integer"}, "a", ["t"]), alternative({"const": 2}, "b", ["t"])],
        [{"type": "string"}, alternative({"const": 2}, "b", ["t"])],
        [],
    ],
    ids=["equal", "optional", "free", "not an object", "empty"],
)
def test_other_unions_stay(alternatives) -> None:
    assert distinguished({"oneOf": alternatives}) == {"oneOf": alternatives}
    assert distinguished({"const": NUMBERS}) == {"const": NUMBERS}


def test_tags_that_equal_in_python_are_different_in_json() -> None:
    schema = {"oneOf": [alternative({"const": 1}, "a", ["t"]), alternative({"const": True}, "b", ["t"])]}
    assert accepts(schema, {"t": True, "b": 5})
    assert not accepts(schema, {"t": True, "a": 5})


@pytest.mark.parametrize("form", ["path", "nanoid", "base64", "startsWith", "regex", "iri", 5])
def test_an_unknown_format_is_an_annotation(form) -> None:
    assert accepts({"type": "string", "format": form, "pattern": "^a$"}, "a")
    assert not accepts({"type": "string", "format": form, "pattern": "^a$"}, "b")


def test_a_known_format_is_enforced() -> None:
    assert not accepts({"type": "string", "format": "date"}, "tomorrow")
    assert accepts(
        {"type": "object", "properties": {"format": {"const": "path"}}, "required": ["format"]}, {"format": "path"}
    )


@pytest.mark.parametrize(
    ("names", "yes", "no"),
    [
        ({"type": "string"}, {"é": 1}, {"a": "x"}),
        (True, {"é": 1}, {"a": "x"}),
        ({"enum": ["a", "b"]}, {"b": 1}, {"c": 1}),
        ({"type": "string", "pattern": "^[ab]+$"}, {"ab": 1}, {"c": 1}),
        ({"type": "string", "minLength": 2}, {"ab": 1}, {"a": 1}),
        ({"maxLength": 2}, {"ab": 1}, {"abc": 1}),
    ],
)
def test_names_of_members_follow_their_schema(names, yes, no) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert accepts(schema, yes)
    assert not accepts(schema, no)


@pytest.mark.parametrize(
    "alternatives",
    [
        [alternative({"const": 1}, "a", ["t"]), alternative({"const": 1.0}, "b", ["t"])],
        [
            {**alternative({"const": 1}, "a", []), "required": 5},
            {**alternative({"const": 2}, "b", []), "required": None},
        ],
    ],
    ids=["equal in JSON Schema", "not a list"],
)
def test_a_damaged_or_ambiguous_union_stays(alternatives) -> None:
    assert distinguished({"oneOf": alternatives}) == {"oneOf": alternatives}


@pytest.mark.parametrize("names", [{"minLength": "1}"}, {"maxLength": [2]}, 7])
def test_names_that_no_keyword_can_express_are_refused(names) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    with pytest.raises(InvalidRequest, match="propertyNames"):
        COMPILER.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
