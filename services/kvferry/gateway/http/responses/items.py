"""The input items of the Responses API, and their conversion to messages for the chat template."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.http.fields import field_policy
from kvferry.gateway.http.fields.custom_tools import arguments_of
from kvferry.gateway.http.fields.field_policy import Rules
from kvferry.gateway.http.fields.strict import Strict
from kvferry.gateway.http.responses.carrier import MAX_CARRIED_CHARS, MAX_CARRIER_CHARS, Carried, CarrierKey
from kvferry.text.tools.conversations import MAX_ID_CHARS

MAX_ITEMS = 4096
SUMMARY_TITLE = "Summary of the conversation so far:\n\n"
"""Text before a summary in the prompt."""
_Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
_Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """A part of a message or of a tool's result."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_PART

    type: Literal["input_text", "output_text", "text"]
    text: str


Content = str | Annotated[list[InputText], Field(fail_fast=True)]


class InputMessage(Strict):
    """A message, possibly from an earlier response's output."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_MESSAGE

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: _Id | None = None
    status: _Status | None = None


class FunctionCall(Strict):
    """A tool call by the model."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_CALL

    type: Literal["function_call"]
    call_id: _Id
    name: str
    arguments: str
    id: _Id | None = None
    status: _Status | None = None


class FunctionResult(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: Content
    id: _Id | None = None
    status: _Status | None = None


class CustomCall(Strict):
    """A call of a custom tool by the model."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_CALL

    type: Literal["custom_tool_call"]
    call_id: _Id
    name: str
    input: str
    id: _Id | None = None
    status: _Status | None = None


class CustomResult(Strict):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: _Id
    output: Content
    id: _Id | None = None
    status: _Status | None = None


class ReasoningText(Strict):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningInput(Strict):
    """Reasoning from an earlier response's output; it precedes the message or calls that it led to."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[str, Field(max_length=MAX_CARRIER_CHARS)] | None = None
    """Carrier of the text, used if the item has none; a carrier of another server has no effect."""
    id: _Id | None = None
    status: _Status | None = None


class Compaction(Strict):
    """A summary of the conversation before it, from POST /v1/responses/compact."""

    RULES: ClassVar[Rules] = field_policy.RESPONSE_COMPACTION

    type: Literal["compaction"]
    encrypted_content: Annotated[str, Field(max_length=MAX_CARRIER_CHARS)]
    """Carrier of the summary; `with_carried` puts the text in its place."""
    id: _Id | None = None


def with_carried(items: Sequence[Any], paths: Sequence[str], key: CarrierKey) -> tuple[list[Any], bool]:
    """Return items with the text that only their carriers have, and whether a carrier of reasoning could not be opened.

    Args:
        items: valid items (`Item`).
        paths: path of each item in the request.
        key: key of the tenant's carriers.

    Raises:
        InvalidRequest: the carrier of a summary could not be opened: the conversation before it would be missing. Or
            the carriers have too much text together: it is deflated, so that a small request could have any amount.
    """
    found: list[Any] = []
    is_lost = False
    room = MAX_CARRIED_CHARS

    def take(text: str, path: str) -> str:
        nonlocal room
        room -= len(text)
        if room < 0:
            where = f"{path}.encrypted_content"
            raise InvalidRequest(
                f"{where} and those before it have more than {MAX_CARRIED_CHARS} characters of text; send fewer items",
                field=where,
            )
        return text

    for item, path in zip(items, paths, strict=True):
        if isinstance(item, Compaction):
            summary = key.opened(item.encrypted_content, Carried.SUMMARY)
            if summary is None:
                where = f"{path}.encrypted_content"
                raise InvalidRequest(
                    f"{where} is not a summary that this pool made for this tenant; send the conversation's items, or "
                    "an item of POST /v1/responses/compact",
                    field=where,
                )
            found.append(item.model_copy(update={"encrypted_content": take(summary, path)}))
            continue
        if not isinstance(item, ReasoningInput) or not item.encrypted_content or item.content or item.summary:
            found.append(item)
            continue
        text = key.opened(item.encrypted_content)
        is_lost = is_lost or text is None
        content = None if text is None else [ReasoningText(type="reasoning_text", text=take(text, path))]
        found.append(item.model_copy(update={"content": content, "encrypted_content": None}))
    return found, is_lost


def _tag(value: Any) -> str:
    found = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return f"<{found}>"


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionResult, Tag("<function_call_output>")]
    | Annotated[CustomCall, Tag("<custom_tool_call>")]
    | Annotated[CustomResult, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningInput, Tag("<reasoning>")]
    | Annotated[Compaction, Tag("<compaction>")],
    Discriminator(_tag),
]
KINDS: Mapping[str, type[Strict]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionResult,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": CustomResult,
    "reasoning": ReasoningInput,
    "compaction": Compaction,
}


def check_kinds(field: str, items: Sequence[object]) -> None:
    """Refuse items and parts of unsupported types; the error names the type.

    Args:
        field: name of the list, for error messages.
        items: the items.

    Raises:
        InvalidRequest: an item or a part has another type, such as an image.
    """
    if not items:
        raise InvalidRequest(f"{field} is empty; send at least one item", field=field)
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"{field} has {len(items)} items; at most {MAX_ITEMS} are accepted", field=field)
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidRequest(f"{field}.{number} must be an object", field=f"{field}.{number}")
        _check_kind(f"{field}.{number}", item.get("type", "message"), KINDS)
        for name, known in (("content", ("input_text", "output_text", "text", "reasoning_text", "summary_text")),):
            parts = item.get(name)
            for index, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and "type" in part:
                    _check_kind(f"{field}.{number}.{name}.{index}", part["type"], known)


def _check_kind(where: str, kind: object, known: Sequence[str] | Mapping[str, object]) -> None:
    if isinstance(kind, str) and kind not in known:
        raise InvalidRequest(
            f"{where}.type {shortened(kind)!r} is not supported; use one of: {', '.join(known)}", field=f"{where}.type"
        )


class _Turn:
    """The items that form one assistant message: reasoning, text, calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: str | None = None
        self.calls: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        return not self.reasoning and self.text is None and not self.calls

    def message(self) -> dict[str, Any]:
        # Reasoning without text or calls, as in an answer that was cut off, gets empty text.
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.text is None and not self.calls:
            message["content"] = ""
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return message


def messages_of(items: Sequence[Any], paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Convert items to messages; return them and, for each, the path of its first item, for errors.

    Consecutive reasoning, assistant messages and calls become one message, and so do a summary and the user's messages
    around it, since templates may expect that user and assistant take turns.

    Args:
        items: valid items (`Item`).
        paths: path of each item in the request.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    turn, begun = _Turn(), ""
    summaries: set[int] = set()
    """Numbers of the messages that are summaries."""

    def flush() -> None:
        nonlocal turn
        if not turn.is_empty:
            messages.append(turn.message())
            places.append(begun)
            turn = _Turn()

    for item, path in zip(items, paths, strict=True):
        match item:
            case Compaction():
                flush()
                summaries.add(len(messages))
                messages.append({"role": "user", "content": SUMMARY_TITLE + item.encrypted_content})
                places.append(path)
            case ReasoningInput():
                if turn.text is not None or turn.calls:
                    flush()
                begun = begun if not turn.is_empty else path
                turn.reasoning += [part.text for part in item.content or item.summary]
            case InputMessage(role="assistant"):
                if turn.text is not None or turn.calls:
                    flush()
                begun = begun if not turn.is_empty else path
                turn.text = _text(item.content)
            case FunctionCall() | CustomCall():
                begun = begun if not turn.is_empty else path
                arguments = arguments_of(item.input) if isinstance(item, CustomCall) else item.arguments
                called = {"name": item.name, "arguments": arguments}
                turn.calls.append({"id": item.call_id, "type": "function", "function": called})
            case FunctionResult() | CustomResult():
                flush()
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
                places.append(path)
            case InputMessage():
                flush()
                messages.append({"role": item.role, "content": _text(item.content)})
                places.append(path)
    flush()
    return _joined(messages, places, summaries) if summaries else (messages, places)


def _joined(
    messages: list[dict[str, Any]], places: list[str], summaries: set[int]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Make one message of consecutive messages of the user that have a summary among them."""
    made: list[dict[str, Any]] = []
    firsts: list[int] = []
    for is_user, run in groupby(range(len(messages)), key=lambda number: bool(messages[number]["role"] == "user")):
        numbers = list(run)
        if is_user and not summaries.isdisjoint(numbers):
            made.append({"role": "user", "content": "\n\n".join(messages[number]["content"] for number in numbers)})
            firsts.append(numbers[0])
        else:
            made += [messages[number] for number in numbers]
            firsts += numbers
    return made, [places[number] for number in firsts]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


_PLACE = re.compile(r"messages\.(\d+)(\.tool_call_id)?")


def in_items(error: InvalidRequest, places: Sequence[str]) -> InvalidRequest:
    """Return an error about a message with the names of the request's items instead.

    Args:
        error: an error; one that is not about messages is returned unchanged.
        places: name of the item of each message, for example `input.2`.
    """

    def name(found: re.Match[str]) -> str:
        number = int(found[1])
        place = places[number] if number < len(places) else "the end of input"
        return place + (".call_id" if found[2] else "")

    if error.field is None or not error.field.startswith("messages"):
        return error
    message = _PLACE.sub(name, error.message).replace("a tool message", "a function_call_output item")
    message = message.replace("tool messages", "function_call_output items")
    message = re.sub(r"^messages\b", "input", message)
    field = _PLACE.sub(name, error.field) if "." in error.field else "input"
    return InvalidRequest(message, field=field, reason=error.reason)
