"""Tool calls and their results in the messages of a conversation: each result answers a call, and each call is
answered.

The rules follow OpenAI's API. Arguments are JSON text in requests, and an object in templates.
"""

from collections.abc import Mapping, Sequence

from pydantic_core import from_json

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tools import depth_of

MAX_CALLS = 128
"""Maximum number of calls in one message."""
MAX_ID_CHARS = 256
MAX_ARGUMENTS_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, object]


def check_calls(messages: Sequence[Message]) -> None:
    """Check the roles of messages, and that messages of role `tool` and the calls of assistants belong together.

    Args:
        messages: messages in the form that templates expect.

    Raises:
        InvalidRequest: a role is unknown, a result does not match a call in the preceding assistant message, or a call
            has no result or no name.
    """
    open_ids: dict[str, None] = {}
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InvalidRequest(
                f"messages.{number}.role must be one of {', '.join(ROLES)}, not {shortened(repr(message['role']))}",
                field=f"messages.{number}.role",
            )
        if message["role"] == "tool":
            call_id = str(message.get("tool_call_id", ""))
            if call_id not in open_ids:
                raise InvalidRequest(
                    f"messages.{number}.tool_call_id {shortened(call_id)!r} does not match an unanswered tool call in "
                    "the preceding assistant message; tool messages must follow that message",
                    field=f"messages.{number}.tool_call_id",
                )
            del open_ids[call_id]
            continue
        _check_answered(f"before messages.{number}", open_ids)
        open_ids = dict.fromkeys(call_ids(message))
        _check_names(message, f"messages.{number}")
    _check_answered("of the last assistant message", open_ids)


def _check_answered(where: str, open_ids: Mapping[str, None]) -> None:
    if open_ids:
        missing = ", ".join(repr(shortened(call_id)) for call_id in list(open_ids)[:3])
        raise InvalidRequest(
            f"the tool calls {missing} {where} have no result; add a tool message for each",
            field="messages",
        )


def _check_names(message: Message, where: str) -> None:
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if not call["function"]["name"]:
            field = f"{where}.tool_calls.{number}.function.name"
            raise InvalidRequest(f"{field} is empty; set it to the name of the called function", field=field)


def call_ids(message: Message) -> list[str]:
    """Return the ids of the calls of a message."""
    calls = message.get("tool_calls")
    return [str(call["id"]) for call in calls] if isinstance(calls, list) else []


def call_input(call_id: str, name: str, arguments: str) -> dict[str, object]:
    """Return a call in the form that chat templates expect.

    Args:
        call_id: id of the call.
        name: name of the function.
        arguments: arguments as JSON.
    """
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _as_object(arguments)}}


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the name of the called tool in each result, for templates that need it."""
    names: dict[str, object] = {}
    named: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            names[str(call["id"])] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            message = {**message, "name": names.get(str(message.get("tool_call_id", "")), "")}
        named.append(message)
    return named


def _as_object(arguments: str) -> object:
    """Return arguments as an object, or as text if they are not an object, as in an answer that was cut off."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) and depth_of(value) <= MAX_ARGUMENTS_DEPTH else arguments
