"""Tools of OpenAI's chat requests, and the choice among them."""

from collections.abc import Sequence
from typing import Any, Literal

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Choice, Tool, ToolUse
from kvferry.gateway.http.fields.strict import Strict


class FunctionDefinition(Strict):
    """The function of a tool that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """An item of `tools`; only tools of type function are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """The tool that `tool_choice` names."""

    name: str


class NamedChoice(Strict):
    """A `tool_choice` of a single tool."""

    type: Literal["function"]
    function: FunctionName


def tool_use(
    tools: Sequence[ToolDefinition] | None, choice: str | NamedChoice | None, is_parallel: bool | None
) -> ToolUse:
    """Return the tools of a request and how they may be used.

    Raises:
        InvalidRequest: see `ToolUse`; the choice is unknown.
    """
    offered = tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {},
            is_strict=bool(tool.function.strict),
        )
        for tool in tools or ()
    )
    name = ""
    wanted = Choice.AUTO
    if isinstance(choice, NamedChoice):
        wanted, name = Choice.REQUIRED, choice.function.name
    elif choice is not None:
        if choice not in tuple(Choice):
            raise InvalidRequest(
                f"tool_choice {shortened(choice)!r} is unknown; use {', '.join(Choice)}, or a tool's name as "
                '{"type": "function", "function": {"name": ...}}',
                field="tool_choice",
            )
        wanted = Choice(choice)
    return ToolUse(offered, wanted, name, is_parallel=is_parallel is not False)
