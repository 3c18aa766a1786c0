"""Messages of OpenAI's chat requests: their fields, and their form for chat templates."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvferry.core.errors import InvalidRequest
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
