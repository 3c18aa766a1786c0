"""Keywords that are not of JSON Schema change nothing, also beside recursive references."""

import json
from typing import Any

import pytest

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.model import tiny
from kvferry.text.grammar.annotations import without_annotations
from kvferry.text.grammar.compiler import GrammarCompiler

COMPILER = GrammarCompiler(tiny.tokenizer(tiny.config()))


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "remark",
    [
        {"discriminator": {"propertyName": "k", "mapping": {"d": "#/$defs/Dog"}}},
        {"nullable": True},
        {"deprecated": True},
        {"readOnly": True},
        {"externalDocs": {"url": "x"}},
        {"markdownDescription": "x"},
        {"x-order": 1},
        {"title": "T", "description": "D", "examples": [1]},
    ],
    ids=lambda remark: next(iter(remark)),
)
def test_a_remark_beside_a_recursive_reference_is_ignored(remark: dict[str, Any]) -> None:
    pets = {"anyOf": [{"$ref": "#/$defs/Dog"}, {"$ref": "#/$defs/Cat"}], **remark}
    dog = closed(k={"const": "d"}, owner={"anyOf": [{"$ref": "#/$defs/Person"}, {"type": "null"}], **remark})
    person = closed(pet=pets)
    schema = {**person, "$defs": {"Dog": dog, "Cat": closed(k={"const": "c"}), "Person": person}}
    COMPILER.check(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (True, True),
        ({"properties": {"discriminator": {"xml": 1}}}, {"properties": {"discriminator": {}}}),
        ({"const": {"xml": 1}, "enum": [{"xml": 2}]}, {"const": {"xml": 1}, "enum": [{"xml": 2}]}),
        ({"x-guidance": {"whitespace_flexible": False}}, {"x-guidance": {"whitespace_flexible": False}}),
        ({"$defs": {"xml": {"xml": 1, "type": "null"}}}, {"$defs": {"xml": {"type": "null"}}}),
        ({"allOf": [{"xml": 1, "type": "null"}]}, {"allOf": [{"type": "null"}]}),
        ({"uniqueItems": True, "if": {}, "then": {}}, {"uniqueItems": True, "if": {}, "then": {}}),
        (
            {"$ref": "#/components/schemas/A~1b", "components": {"schemas": {"A/b": {"xml": 1}, "C": {}}}, "info": 1},
            {"$ref": "#/components/schemas/A~1b", "components": {"schemas": {"A/b": {}}}},
        ),
    ],
)
def test_names_values_and_referred_parts_are_kept(schema: Any, kept: Any) -> None:
    assert without_annotations(schema) == kept
