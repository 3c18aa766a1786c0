"""The fields that constrain the output: their constraints, and errors that name the field."""

import json
from typing import Any

import pytest

from kvferry.core.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.fields.request_fields import in_field
from kvferry.gateway.http.openai.schema import ChatRequest, CompletionRequest, parse

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ö"}}}
SOURCE = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(ConstraintKind.JSON_OBJECT, "")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Constraint(ConstraintKind.JSON_SCHEMA, SOURCE),
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG)),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint(ConstraintKind.JSON_SCHEMA, SOURCE)),
        ({"structured_outputs": {"json": SOURCE}}, Constraint(ConstraintKind.JSON_SCHEMA, SOURCE)),
        ({"structured_outputs": {"json_object": True}}, Constraint(ConstraintKind.JSON_OBJECT, "")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["ö", "b"]}}, Constraint(ConstraintKind.CHOICE, '["ö", "b"]')),
        ({"structured_outputs": {"grammar": "start: x"}}, Constraint(ConstraintKind.GRAMMAR, "start: x")),
        ({"structured_outputs": {"structural_tag": "{}"}}, Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            Constraint(ConstraintKind.STRUCTURAL_TAG, '{"format": {"type": "any_text"}}'),
        ),
        ({"guided_json": SCHEMA}, Constraint(ConstraintKind.JSON_SCHEMA, SOURCE)),
        ({"guided_regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"guided_choice": ["a"]}, Constraint(ConstraintKind.CHOICE, '["a"]')),
        ({"guided_grammar": "start: x"}, Constraint(ConstraintKind.GRAMMAR, "start: x")),
    ],
)
def test_each_field_makes_its_constraint(fields: dict[str, Any], expected: Constraint | None) -> None:
    assert parse(ChatRequest, body(**fields)).to_sampling().constraint == expected
    completion = json.dumps({"prompt": "x", **fields}).encode()
    assert parse(CompletionRequest, completion).to_sampling().constraint == expected


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml|json"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format", "not take"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
            "needs schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs structures, or format"),
        ({"response_format": {"type": "structural_tag", "format": {}, **TAG}}, "response_format", "beside format"),
        ({"response_format": {"type": "text", "format": {}}}, "response_format", "does not take format"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "set only one"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "set only one"),
        ({"guided_regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "guided_regex", str(MAX_CONSTRAINT_BYTES)),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"guided_choice": []}, "guided_choice", "at least one item"),
        ({"guided_choice": [1]}, "guided_choice.0", "string"),
        ({"guided_json": 5}, "guided_json", "5"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(ChatRequest, body(**fields)).to_sampling()
    assert caught.value.field == field


def test_the_error_of_a_tools_schema_names_the_tool() -> None:
    cause = "grammar cannot be used: at 4(14): failed to compile JSON schema (rule arguments_1)"
    error = in_field(InvalidRequest(cause, field="constraint", reason="CONSTRAINT_INVALID"), "tools")
    assert (error.field, error.reason) == ("tools.1.function.parameters", "CONSTRAINT_INVALID")
    assert in_field(InvalidRequest(cause, field="constraint"), "guided_grammar").field == "guided_grammar"
