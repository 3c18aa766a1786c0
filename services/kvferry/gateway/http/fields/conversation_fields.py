"""Messages and tools of OpenAI's chat requests: their fields, and their form for chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import Choice, Tool, ToolUse
from kvferry.gateway.http.fields.strict import Accepted, Strict
from kvferry.text.tools.history import MAX_CALLS, MAX_ID_CHARS, call_input


class TextPart(Strict):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function of a call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Number of the call in a stream, which clients copy into requests; no effect."""


class Message(Strict):
    """A message of a conversation."""

    NO_OPS: ClassVar[Accepted] = {
        "annotations": (None, []),
        "audio": (None, []),
        "function_call": (None, []),
        "refusal": (None, []),
    }
    """Fields of an assistant's message that clients copy from a response."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    reasoning_content: str | None = None
    """Reasoning of an assistant's message, as in responses."""

    def as_template_input(self, where: str) -> dict[str, object]:
        """Return the message in the form that chat templates expect.

        Args:
            where: path of the message, for errors.

        Raises:
            InvalidRequest: a field is missing, or does not belong to messages of this role.
        """
        self._check_fields(where)
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        # `developer` is OpenAI's newer name of the role `system`, which templates use.
        message: dict[str, object] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                call_input(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message

    def _check_fields(self, where: str) -> None:
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{where}.content is missing", field=f"{where}.content")
        if self.name is not None and self.role != "tool":
            raise InvalidRequest(f"{where}.name is not supported; leave it out", field=f"{where}.name")
        owners = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
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
