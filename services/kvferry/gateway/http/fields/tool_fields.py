"""Fields of OpenAI's chat requests about tools: functions, custom tools, and the choice of a tool."""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import MAX_DESCRIPTION_CHARS, MAX_TOOLS, Tool, ToolMode, ToolUse
from kvferry.gateway.http.fields.cache_fields import CacheControl
from kvferry.gateway.http.fields.custom_tools import InputGrammar, described, input_schema, is_unenforced
from kvferry.gateway.http.fields.strict import Strict, by_type

_FUNCTION_FIELD = re.compile(r"tools\.(\d+)\.function\.(\w+)")


class FunctionDefinition(Strict):
    """The function of a tool that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """A function among `tools`."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = None

    def as_function(self, where: str) -> FunctionDefinition:
        """Return the function. `where`: path of the tool."""
        return self.function


class GrammarDefinition(Strict):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_DESCRIPTION_CHARS)]


class CustomInputFormat(Strict):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None


class CustomDefinition(Strict):
    """A tool whose input is free text."""

    name: str
    description: str | None = None
    format: CustomInputFormat | None = None


class CustomToolDefinition(Strict):
    """A custom tool among `tools`; see `custom_tools`."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: CacheControl | None = None

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of the input; `None` for free text."""
        given = None if self.custom.format is None else self.custom.format.grammar
        return None if given is None else InputGrammar(given.syntax, given.definition)

    def as_function(self, where: str) -> FunctionDefinition:
        """Return the function that represents the tool in the prompt.

        Args:
            where: path of the tool.

        Raises:
            InvalidRequest: the format is incomplete or contradictory, or the grammar is not one of the whole input.
        """
        form, grammar = self.custom.format, self.grammar
        if form is not None and (form.type == "grammar") != (grammar is not None):
            state = "belongs to type grammar; leave it out"
            if grammar is None:
                state = 'is missing; set it to an object with "syntax" and "definition"'
            field = f"{where}.custom.format.grammar"
            raise InvalidRequest(f"{field} {state}", field=field)
        if grammar is not None:
            grammar.check(f"{where}.custom.format.grammar.definition")
        return FunctionDefinition(
            name=self.custom.name,
            description=described(self.custom.description, grammar),
            parameters=input_schema(grammar),
            strict=True,
        )


ChatTool = Annotated[
    Annotated[ToolDefinition, Tag("<function>")] | Annotated[CustomToolDefinition, Tag("<custom>")],
    by_type("function", "custom"),
]


class FunctionName(Strict):
    """The tool that `tool_choice` names."""

    name: str


class NamedChoice(Strict):
    """A `tool_choice` of a single function."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.function.name


class NamedCustomChoice(Strict):
    """A `tool_choice` of a single custom tool."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.custom.name


OneTool = Annotated[
    Annotated[NamedChoice, Tag("<function>")] | Annotated[NamedCustomChoice, Tag("<custom>")],
    by_type("function", "custom"),
]


class AllowedTools(Strict):
    """The tools of an `AllowedChoice`, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[OneTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Strict):
    """A `tool_choice` of several tools; the others stay in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    str
    | Annotated[
        Annotated[NamedChoice, Tag("<function>")]
        | Annotated[NamedCustomChoice, Tag("<custom>")]
        | Annotated[AllowedChoice, Tag("<allowed_tools>")],
        by_type("function", "custom", "allowed_tools"),
    ]
)


def tool_use(
    tools: Sequence[ToolDefinition | CustomToolDefinition] | None,
    choice: str | NamedChoice | NamedCustomChoice | AllowedChoice | None,
    is_parallel: bool | None,
) -> ToolUse:
    """Return the tools of a request and how they may be used.

    Raises:
        InvalidRequest: see `ToolUse`; the choice is unknown, or the format of a custom tool is not valid.
    """
    functions = [tool.as_function(f"tools.{number}") for number, tool in enumerate(tools or ())]
    offered = tuple(
        Tool(function.name, function.description or "", function.parameters or {}, is_strict=bool(function.strict))
        for function in functions
    )
    name = ""
    wanted = ToolMode.AUTO
    allowed: frozenset[str] | None = None
    for one in choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else [choice]:
        if isinstance(one, NamedChoice | NamedCustomChoice):
            _check_kind(one, tools or ())
    if isinstance(choice, NamedChoice | NamedCustomChoice):
        wanted, name = ToolMode.REQUIRED, choice.name
    elif isinstance(choice, AllowedChoice):
        wanted = ToolMode(choice.allowed_tools.mode)
        allowed = frozenset(tool.name for tool in choice.allowed_tools.tools)
    elif choice is not None:
        if choice not in tuple(ToolMode):
            raise InvalidRequest(
                f"tool_choice {shortened(choice)!r} is unknown; use {', '.join(ToolMode)}, or a tool's name as "
                '{"type": "function", "function": {"name": ...}}',
                field="tool_choice",
            )
        wanted = ToolMode(choice)
    return ToolUse(offered, wanted, name, is_parallel=is_parallel is not False, allowed=allowed)


def custom_places(tools: Sequence[ToolDefinition | CustomToolDefinition] | None) -> frozenset[int]:
    """Return the places of the custom tools among all tools."""
    return frozenset(place for place, tool in enumerate(tools or ()) if isinstance(tool, CustomToolDefinition))


def in_custom_tools(error: InvalidRequest, places: Collection[int]) -> InvalidRequest:
    """Return an error about the function of a custom tool with the path of the tool's own field; other errors are
    returned unchanged.

    Args:
        error: an error about a request.
        places: places of the custom tools among all tools.
    """
    found = _FUNCTION_FIELD.fullmatch(error.field or "")
    if found is None or int(found[1]) not in places:
        return error
    name = "format.grammar.definition" if found[2] == "parameters" else found[2]
    field = f"tools.{found[1]}.custom.{name}"
    return InvalidRequest(error.message.replace(found[0], field), field=field, reason=error.reason)


def _check_kind(
    choice: NamedChoice | NamedCustomChoice, tools: Sequence[ToolDefinition | CustomToolDefinition]
) -> None:
    """Check that a choice names a tool of its type.

    Raises:
        InvalidRequest: a function is named as a custom tool, or the other way round.
    """
    is_custom, customs = isinstance(choice, NamedCustomChoice), custom_names(tools)
    functions = {tool.function.name for tool in tools if isinstance(tool, ToolDefinition)}
    if choice.name in (functions - customs if is_custom else customs - functions):
        wanted = "function" if is_custom else "custom"
        raise InvalidRequest(
            f"tool_choice names {shortened(choice.name)!r} as a tool of type {choice.type}, but its type is {wanted}",
            field="tool_choice",
        )


def custom_names(tools: Sequence[ToolDefinition | CustomToolDefinition] | None) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool.custom.name for tool in tools or () if isinstance(tool, CustomToolDefinition))


def has_described_format(
    tools: Sequence[ToolDefinition | CustomToolDefinition] | None,
    choice: str | NamedChoice | NamedCustomChoice | AllowedChoice | None,
) -> bool:
    """Return whether a custom tool has a grammar that is described to the model, but not enforced."""
    must_call = choice == "required" or isinstance(choice, NamedChoice | NamedCustomChoice)
    must_call = must_call or (isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required")
    grammars = [tool.grammar for tool in tools or () if isinstance(tool, CustomToolDefinition)]
    return is_unenforced(grammars, must_call=must_call)
