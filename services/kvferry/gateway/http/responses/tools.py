"""The tools of the Responses API: functions, custom tools, and the choice of a tool.

A custom tool has free text as its input; see `fields.custom_tools`.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from pydantic.json_schema import JsonSchemaValue

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import MAX_DESCRIPTION_CHARS, MAX_TOOLS, ToolUse
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.custom_tools import InputGrammar, described, input_schema, is_unenforced
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import MAX_NAME_CHARS, Strict, by_type, type_of
from kvferry.gateway.http.fields.tool_fields import (
    AllowedChoice,
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    NamedChoice,
    ToolDefinition,
    tool_use,
)

OTHER_TOOL: JsonSchemaValue = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"enum": ["function", "custom"]}}},
    "required": ["type"],
    "description": "Left out, unless tool_choice may force its call.",
}
"""Schema of the tools of other types."""
_OFFERED = ("function", "custom")
"""Types of tools that the model may call."""
_Definition = Annotated[str, Field(min_length=1, max_length=MAX_DESCRIPTION_CHARS)]


class FunctionTool(Strict):
    """A tool that the model may call."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_TOOL

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_function(self) -> FunctionDefinition:
        """Return the function of chat's tools."""
        return FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )


class InputFormat(Strict):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: _Definition | None = None


class CustomTool(Strict):
    """A tool whose input is free text."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_TOOL

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: InputFormat | None = None

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of the input; `None` for free text."""
        given = self.format
        if given is None or given.type != "grammar" or given.syntax is None or given.definition is None:
            return None
        return InputGrammar(given.syntax, given.definition)

    def check(self, where: str) -> None:
        """Check that a grammar is complete.

        Args:
            where: path of the tool.

        Raises:
            InvalidRequest: the grammar has no syntax or no definition, or its definition is not a whole pattern.
        """
        if self.format is None or self.format.type != "grammar":
            return
        for name in ("syntax", "definition"):
            if getattr(self.format, name) is None:
                raise InvalidRequest(f"{where}.format.{name} is missing", field=f"{where}.format.{name}")
        if self.grammar is not None:
            self.grammar.check(f"{where}.format.definition")

    def as_function(self) -> FunctionDefinition:
        """Return the function that represents the tool in the prompt."""
        grammar = self.grammar
        return FunctionDefinition(
            name=self.name,
            description=described(self.description, grammar),
            parameters=input_schema(grammar),
            strict=True,
        )


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    by_type("function", "custom"),
]


class FunctionChoice(Strict):
    """A `tool_choice` of a single tool."""

    type: Literal["function", "custom"]
    name: str


class AllowedFunctions(Strict):
    """A `tool_choice` of several tools; the others stay in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


FunctionChoices = Annotated[
    Annotated[FunctionChoice, Tag("<function>")] | Annotated[AllowedFunctions, Tag("<allowed_tools>")],
    Discriminator(lambda value: "<allowed_tools>" if type_of(value) == "allowed_tools" else "<function>"),
]


def use_of(tools: Sequence[OfferedTool], given: str | FunctionChoices | None, is_parallel: bool | None) -> ToolUse:
    """Return the tools of a request and how they may be used.

    Args:
        tools: the tools.
        given: the choice of a tool.
        is_parallel: whether an answer may have several calls; `None` for the default.

    Raises:
        InvalidRequest: the tools exceed a limit, or contradict the choice.
    """
    choice: str | NamedChoice | AllowedChoice | None
    match given:
        case FunctionChoice() as one:
            choice = _named(one)
        case AllowedFunctions() as several:
            allowed = AllowedTools(mode=several.mode, tools=[_named(one) for one in several.tools])
            choice = AllowedChoice(type="allowed_tools", allowed_tools=allowed)
        case other:
            choice = other
    offered = [ToolDefinition(type="function", function=tool.as_function()) for tool in tools]
    try:
        return tool_use(offered, choice, is_parallel)
    except InvalidRequest as error:
        raise without_function(error, tools) from None


def has_unenforced_format(tools: Sequence[OfferedTool], choice: str | FunctionChoices | None) -> bool:
    """Return whether a custom tool has a format that is only described: every one unless a call must be made."""
    must_call = choice == "required" or isinstance(choice, FunctionChoice)
    must_call = must_call or (isinstance(choice, AllowedFunctions) and choice.mode == "required")
    grammars = [tool.grammar for tool in tools if isinstance(tool, CustomTool)]
    return is_unenforced(grammars, must_call=must_call)


def take_other_tools(fields: dict[str, Any]) -> list[str]:
    """Remove the tools of other types, such as `web_search`, from a body; return the names of their types.

    Args:
        fields: the fields of a body, before they are validated.

    Raises:
        InvalidRequest: the model may be forced to call such a tool.
    """
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if not isinstance(tools, list):
        return []
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    others = [(number, kind) for number, kind in enumerate(kinds) if isinstance(kind, str) and kind not in _OFFERED]
    if others and choice not in (None, "auto", "none"):
        number, kind = others[0]
        raise InvalidRequest(
            f"tools.{number}.type {shortened(kind)!r} is not supported; use function or custom, or tool_choice auto, "
            "which leaves other tools out",
            field=f"tools.{number}.type",
        )
    if others:
        fields["tools"] = [tool for tool, kind in zip(tools, kinds, strict=True) if kind in (*_OFFERED, None)]
    return list(dict.fromkeys(f"tools.{kind[:MAX_NAME_CHARS]}" for _, kind in others))


_FUNCTION = re.compile(r"(tools\.(\d+))\.function\b")


def without_function(error: InvalidRequest, tools: Sequence[OfferedTool]) -> InvalidRequest:
    """Return an error about a tool with the path that it has in this API, where functions are not nested, and where a
    custom tool has a grammar instead of parameters."""
    found = None if error.field is None else _FUNCTION.match(error.field)
    if error.field is None or found is None:
        return error
    place, rest = int(found[2]), error.field[found.end() :]
    if rest == ".parameters" and place < len(tools) and isinstance(tools[place], CustomTool):
        rest = ".format.definition"
    field = found[1] + rest
    return InvalidRequest(error.message.replace(error.field, field, 1), field=field, reason=error.reason)


def _named(choice: FunctionChoice) -> NamedChoice:
    return NamedChoice(type="function", function=FunctionName(name=choice.name))
