"""Fields of OpenAI's and vLLM's requests that are objects: messages, and constraints of the output.

response_format       OpenAI: text, json_object, json_schema; vLLM: structural_tag
structured_outputs    vLLM: one of json, json_object, regex, choice, grammar, structural_tag
guided_json, ...      vLLM's older names
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.cache_fields import CacheBreakpoint, CacheControl
from kvferry.gateway.http.fields.custom_tools import arguments_of
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import Strict, by_type
from kvferry.text.grammar.grammar_text import MAX_CHOICES
from kvferry.text.tools.conversations import MAX_CALLS, MAX_ID_CHARS, call_input

_TOOL_RULE = re.compile(r"\(rule (?:arguments|call)_(\d+)")
"""Rule of a tool's arguments in the error of a grammar of calls; see `kvferry.text.tools.grammars`."""
Schema = dict[str, Any] | str
"""A JSON Schema, as an object or as its JSON text."""
MAX_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]
"""Texts that a client attaches to an object."""
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class TextPart(Strict):
    """A text part of a message's content."""

    RULES: ClassVar[Rules] = field_policy.PART

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(Strict):
    """A part of an assistant's message in which the model refuses to answer: its text."""

    RULES: ClassVar[Rules] = field_policy.PART

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], by_type("text", "refusal")
]


class CalledFunction(Strict):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(Strict):
    """A call in an assistant's message."""

    RULES: ClassVar[Rules] = field_policy.TOOL_CALL

    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_input(self) -> dict[str, object]:
        """Return the call in the form that chat templates expect."""
        return call_input(self.id, self.function.name, self.function.arguments)


class CalledCustomTool(Strict):
    """The custom tool of a call, with its input."""

    name: str
    input: str


class CustomToolCall(Strict):
    """A call of a custom tool in an assistant's message."""

    RULES: ClassVar[Rules] = field_policy.TOOL_CALL

    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    type: Literal["custom"]
    custom: CalledCustomTool

    def as_template_input(self) -> dict[str, object]:
        """Return the call of the function that represents the tool in the prompt."""
        return call_input(self.id, self.custom.name, arguments_of(self.custom.input))


MessageCall = Annotated[
    Annotated[MessageToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")],
    by_type("function", "custom"),
]


class Message(Strict):
    """A message of a conversation."""

    RULES: ClassVar[Rules] = field_policy.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    refusal: str | None = None
    """Text of an assistant's message that has no content."""
    reasoning: str | None = None
    """Reasoning of an assistant's message, as in responses."""
    reasoning_content: str | None = None
    """Older name of `reasoning`."""
    thinking: str | None = None
    """Further name of `reasoning`, as in templates of gpt-oss."""
    cache_control: CacheControl | None = None

    @property
    def cache_marks(self) -> list[CacheControl | CacheBreakpoint | None]:
        """Marks of the message and its parts that ask the cache to keep the prompt."""
        parts = [part for part in self.content if isinstance(part, TextPart)] if isinstance(self.content, list) else []
        of_parts = [mark for part in parts for mark in (part.cache_control, part.prompt_cache_breakpoint)]
        return [self.cache_control, *of_parts]

    def as_template_input(self, where: str) -> dict[str, object]:
        """Return the message in the form that chat templates expect.

        Args:
            where: path of the message, for errors.

        Raises:
            InvalidRequest: a field is missing, or does not belong to messages of this role.
        """
        self._check_fields(where)
        content = self.refusal if self.content is None else self.content
        parts = content if isinstance(content, list) else []
        text = content if isinstance(content, str) else "".join(part.text for part in parts)
        # `developer` is OpenAI's newer name of the role `system`, which templates use.
        message: dict[str, object] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        reasoning = self.reasoning or self.reasoning_content or self.thinking
        if reasoning:
            message["reasoning_content"] = reasoning
        return message

    def _check_fields(self, where: str) -> None:
        if self.content is None and not self.tool_calls and not self.refusal:
            raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")
        of_assistants = ("tool_calls", "refusal", "reasoning", "reasoning_content", "thinking")
        owners = {**dict.fromkeys(of_assistants, "assistant"), "tool_call_id": "tool"}
        for name, owner in owners.items():
            if getattr(self, name) and self.role != owner:
                raise InvalidRequest(
                    f"{where}.{name} belongs to messages of role {owner}; leave it out", field=f"{where}.{name}"
                )
        if self.role == "tool" and not self.tool_call_id:
            raise InvalidRequest(
                f"{where}.tool_call_id is missing; set it to the id of the call that the message answers",
                field=f"{where}.tool_call_id",
            )


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
    format: dict[str, Any] | None = None
    """The format of a structural tag, as in xgrammar 0.2 and vLLM 0.32."""


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: exactly one field is set."""

    RULES: ClassVar[Rules] = field_policy.STRUCTURED

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


@contextmanager
def overflow_in(field: str) -> Iterator[None]:
    """Name a request field in the errors of the `with` block about a prompt that is too long.

    Args:
        field: name of the field with the prompt, for example `messages`.

    Raises:
        InvalidRequest: raised in the block.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.reason != CONTEXT_LENGTH_EXCEEDED:
            raise
        # Clients recognize the error by its first words, which do not contain the field.
        message = error.message.replace(f"shorten the {error.field}", f"shorten the {field}", 1)
        raise InvalidRequest(message, field=field, reason=error.reason) from None


def in_field(error: InvalidRequest, field: str) -> InvalidRequest:
    """Return a constraint's error with the name of the request field that sets the constraint. In the grammar of tool
    calls, the name of the rule shows which tool's schema is invalid.

    Args:
        error: error about `constraint`; other errors are returned unchanged.
        field: name of the request field, for example `response_format`.
    """
    if error.field != "constraint":
        return error
    # A request's own grammar may have rules of these names.
    tool = None if field.endswith("grammar") else _TOOL_RULE.search(error.message)
    if tool is not None:
        field = f"tools.{tool[1]}.function.parameters"
    return InvalidRequest(f"{field}: {error.message}", field=field, reason=error.reason)


def _of_format(given: ResponseFormat) -> tuple[ConstraintKind, object]:
    extra = {
        "json_schema": given.json_schema,
        "structures": given.structures,
        "triggers": given.triggers,
        "format": given.format,
    }
    tag = ("format",) if given.format is not None else ("structures", "triggers")
    wanted: Mapping[str, tuple[str, ...]] = {"json_schema": ("json_schema",), "structural_tag": tag}
    for name, value in extra.items():
        if (value is not None) != (name in wanted.get(given.type, ())):
            state = "needs" if value is None else "does not take"
            other = " beside format" if given.type == "structural_tag" and given.format is not None else ""
            hint = ", or format" if value is None and given.type == "structural_tag" else ""
            raise InvalidRequest(
                f"response_format of type {given.type} {state} {name}{hint}{other}", field="response_format"
            )
    if given.type == "json_object":
        return ConstraintKind.JSON_OBJECT, True
    if given.json_schema is not None:
        if given.json_schema.body is None:
            raise InvalidRequest("response_format.json_schema needs schema", field="response_format.json_schema")
        return ConstraintKind.JSON_SCHEMA, given.json_schema.body
    if given.format is not None:
        return ConstraintKind.STRUCTURAL_TAG, {"format": given.format}
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
