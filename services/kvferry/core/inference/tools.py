"""Tools that a request offers to the model, and which of them it must call; checked against limits."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.errors import InvalidRequest, shortened

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 16_384
MAX_PARAMETERS_CHARS = 1 << 17
"""Maximum number of characters of the parameter schemas of all tools together, as JSON."""
MAX_DEPTH = 32
"""Maximum nesting depth of objects and arrays in a parameter schema."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class ToolMode(StrEnum):
    """Whether the model may, must not or must call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call: a function, the only type of tool supported."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON schema of the arguments, which is of type object; empty for a tool without arguments."""
    is_strict: bool = False
    """Whether the arguments must match the schema. Enforced if a call is required; no effect otherwise."""

    def as_template_input(self) -> dict[str, object]:
        """Return the tool in the form that chat templates expect."""
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}

    @property
    def schema(self) -> Mapping[str, object]:
        """The schema of the arguments; by default, an object without properties."""
        return self.parameters or {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a request offers, and how they may be used."""

    tools: tuple[Tool, ...] = ()
    choice: ToolMode = ToolMode.AUTO
    function: str = ""
    """Name of the tool that must be called, in which case `choice` is `required`; empty for any tool."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; the others are in the prompt only. `None` for all tools."""

    def __post_init__(self) -> None:
        """Check the tools and the choice.

        Raises:
            InvalidRequest: there are too many tools, two have the same name, one is too large, or the choice
                contradicts them.
        """
        _check_tools(self.tools)
        if self.choice is ToolMode.REQUIRED and not self.tools:
            raise InvalidRequest("tool_choice needs tools; set tools, or leave tool_choice out", field="tool_choice")
        named = {self.function} if self.function else self.allowed or frozenset[str]()
        for name in sorted(named - {tool.name for tool in self.tools}):
            raise InvalidRequest(
                f"tool_choice is {shortened(name)!r}, which is not in tools; use the name of one of the tools",
                field="tool_choice",
            )

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools in the prompt."""
        return () if self.choice is ToolMode.NONE else self.tools

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools whose calls are returned."""
        return tuple(
            tool
            for tool in self.offered
            if self.function in ("", tool.name) and (self.allowed is None or tool.name in self.allowed)
        )

    @property
    def max_calls(self) -> int | None:
        """Maximum number of calls in an answer; `None` for no limit. A tool that tool_choice names is called once, as
        in OpenAI's API."""
        return None if self.is_parallel and not self.function else 1


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} items; at most {MAX_TOOLS} are accepted", field="tools")
    names: set[str] = set()
    size = 0
    for number, tool in enumerate(tools):
        where = f"tools.{number}.function"
        if not NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"{where}.name must have 1 to {MAX_NAME_CHARS} letters, digits, underscores and hyphens, not be "
                f"{shortened(tool.name)!r}",
                field=f"{where}.name",
            )
        if tool.name in names:
            raise InvalidRequest(
                f"{where}.name {shortened(tool.name)!r} is also the name of an earlier tool; use unique names",
                field=f"{where}.name",
            )
        names.add(tool.name)
        if len(tool.description) > MAX_DESCRIPTION_CHARS:
            raise InvalidRequest(
                f"{where}.description has {len(tool.description)} characters; at most {MAX_DESCRIPTION_CHARS} are "
                "accepted",
                field=f"{where}.description",
            )
        _check_schema(tool.parameters, f"{where}.parameters")
        size += len(json.dumps(tool.parameters, ensure_ascii=False))
        if size > MAX_PARAMETERS_CHARS:
            raise InvalidRequest(
                f"the parameters of tools.0 to tools.{number} have more than {MAX_PARAMETERS_CHARS} characters; use "
                "fewer tools or shorter schemas",
                field="tools",
            )


def _check_schema(schema: Mapping[str, object], where: str) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where} must be a JSON schema, not {shortened(repr(schema))}", field=where)
    if depth_of(schema) > MAX_DEPTH:
        raise InvalidRequest(
            f"{where} has more than {MAX_DEPTH} nested objects and arrays; flatten the schema, or use $defs",
            field=where,
        )
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"{where} must be a JSON schema of type object, since arguments are passed by name",
            field=f"{where}.type",
        )


def depth_of(value: object) -> int:
    """Return the nesting depth of objects and arrays, without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        part, depth = left.pop()
        if isinstance(part, Mapping | list):
            deepest = max(deepest, depth)
            inner = part.values() if isinstance(part, Mapping) else part
            left += [(item, depth + 1) for item in inner if isinstance(item, Mapping | list)]
    return deepest


def size_of(tools: Sequence[Tool]) -> int:
    """Return the number of characters of the tools as JSON."""
    return sum(len(json.dumps(tool.as_template_input(), ensure_ascii=False)) for tool in tools)
