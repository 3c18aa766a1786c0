"""The fields of OpenAI's and vLLM's requests that constrain the output, and their conversion to a constraint.

response_format       OpenAI: text, json_object, json_schema; vLLM: structural_tag
structured_outputs    vLLM: one of json, json_object, regex, choice, grammar, structural_tag
guided_json, ...      vLLM's older names
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.gateway.http.fields.strict import Strict
from kvferry.text.grammar.grammar_text import MAX_CHOICES

_TOOL_RULE = re.compile(r"\(rule (?:arguments|call)_(\d+)")
"""Rule of a tool's arguments in the error of a grammar of calls; see `kvferry.text.tools.grammars`."""

Schema = dict[str, Any] | str
"""A JSON Schema, as an object or as its JSON text."""
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchemaFormat(Strict):
    """OpenAI's `response_format.json_schema`."""

    name: str
    description: str | None = None
    body: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """No effect: the output always follows the schema."""


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    triggers: Annotated[list[str], Field(fail_fast=True)] | None = None


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: exactly one field is set."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class ConstraintFields(Strict):
    """The fields that constrain the output; at most one of them is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def constraint(self) -> tuple[str, Constraint | None]:
        """Return the name of the field that constrains the output and the constraint; `None` if the output is free.

        Raises:
            InvalidRequest: several fields constrain the output, or one of them is inconsistent or too large.
        """
        found = [(field, kind, value) for field, kind, value in self._given() if value is not None]
        if not found:
            return "", None
        if len(found) > 1:
            names = " and ".join(field for field, _, _ in found)
            raise InvalidRequest(f"{names} cannot be combined; set only one", field=found[1][0])
        field, kind, value = found[0]
        try:
            return field, Constraint(kind, _source(kind, value))
        except InvalidRequest as error:
            raise in_field(error, field) from None

    def _given(self) -> "Iterator[tuple[str, ConstraintKind, object]]":
        if self.response_format is not None:
            yield "response_format", *_of_format(self.response_format)
        if self.structured_outputs is not None:
            yield from _of_structured(self.structured_outputs)
        yield "guided_json", ConstraintKind.JSON_SCHEMA, self.guided_json
        yield "guided_regex", ConstraintKind.REGEX, self.guided_regex
        yield "guided_choice", ConstraintKind.CHOICE, self.guided_choice
        yield "guided_grammar", ConstraintKind.GRAMMAR, self.guided_grammar


def in_field(error: InvalidRequest, field: str) -> InvalidRequest:
    """Return a constraint's error with the name of the request field that sets the constraint. In the grammar of tool
    calls, the name of the rule shows which tool's schema is invalid.

    Args:
        error: error about `constraint`; other errors are returned unchanged.
        field: name of the request field, for example `response_format`.
    """
    if error.field != "constraint":
        return error
    tool = _TOOL_RULE.search(error.message) if field == "tools" else None
    if tool is not None:
        field = f"tools.{tool[1]}.function.parameters"
    return InvalidRequest(f"{field}: {error.message}", field=field, reason=error.reason)


def _of_format(given: ResponseFormat) -> tuple[ConstraintKind, object]:
    extra = {"json_schema": given.json_schema, "structures": given.structures, "triggers": given.triggers}
    wanted: Mapping[str, tuple[str, ...]] = {
        "json_schema": ("json_schema",),
        "structural_tag": ("structures", "triggers"),
    }
    for name, value in extra.items():
        if (value is not None) != (name in wanted.get(given.type, ())):
            state = "needs" if value is None else "does not take"
            raise InvalidRequest(f"response_format of type {given.type} {state} {name}", field="response_format")
    if given.type == "json_object":
        return ConstraintKind.JSON_OBJECT, True
    if given.json_schema is not None:
        if given.json_schema.body is None:
            raise InvalidRequest("response_format.json_schema needs schema", field="response_format.json_schema")
        return ConstraintKind.JSON_SCHEMA, given.json_schema.body
    if given.type == "structural_tag":
        return ConstraintKind.STRUCTURAL_TAG, {"structures": given.structures, "triggers": given.triggers}
    return ConstraintKind.JSON_OBJECT, None


def _of_structured(given: StructuredOutputs) -> "Iterator[tuple[str, ConstraintKind, object]]":
    fields: list[tuple[str, ConstraintKind, object]] = [
        ("json", ConstraintKind.JSON_SCHEMA, given.json_),
        ("json_object", ConstraintKind.JSON_OBJECT, given.json_object or None),
        ("regex", ConstraintKind.REGEX, given.regex),
        ("choice", ConstraintKind.CHOICE, given.choice),
        ("grammar", ConstraintKind.GRAMMAR, given.grammar),
        ("structural_tag", ConstraintKind.STRUCTURAL_TAG, given.structural_tag),
    ]
    if all(value is None for _, _, value in fields):
        names = ", ".join(name for name, _, _ in fields)
        raise InvalidRequest(f"structured_outputs is empty; set one of {names}", field="structured_outputs")
    for name, kind, value in fields:
        yield f"structured_outputs.{name}", kind, value


def _source(kind: ConstraintKind, value: object) -> str:
    if kind is ConstraintKind.JSON_OBJECT:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
