"""Checks the JSON of a request against limits: sizes of arrays and objects, types of prompts. Stops at the first error.

These checks precede validation, which reports every error in a value and would take minutes for a large value.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.core.errors import InvalidRequest, shortened

MAX_FIELDS = 64
"""Maximum number of fields per object; OpenAI's requests have fewer."""
MAX_ITEMS = 1024
"""Maximum length of an array or object other than `prompt` and `messages`; `tools` has a separate limit."""
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Maximum number of content parts per message."""

Prompt = str | list[str] | list[int] | list[list[int]]


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Check the sizes of a request's arrays and objects.

    Raises:
        InvalidRequest: an array or object is too large; the message contains its path.
    """
    _at_most("the body", fields, MAX_FIELDS, "fields", field=None)
    for name, value in fields.items():
        if name == "messages":
            _check_messages(value)
        elif name != "prompt":
            _at_most(shortened(name), value, MAX_ITEMS, "items")


def check_prompt(value: object) -> Prompt:
    """Check the types of a prompt; token ids are checked against the vocabulary later.

    Raises:
        InvalidRequest: an item has the wrong type; the message contains its path.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _no_prompt("prompt", value)
    if len(value) > MAX_ITEMS and type(value[0]) is not int:
        raise InvalidRequest(f"prompt has {len(value)} prompts; at most {MAX_ITEMS} are accepted", field="prompt")
    kinds = set(map(type, value))
    if kinds <= {str} or kinds == {int}:
        return value
    if kinds == {list}:
        for number, ids in enumerate(value):
            if not set(map(type, ids)) <= {int}:
                raise _no_prompt(f"prompt.{number}.{_first_other(ids, int)}", ids[_first_other(ids, int)])
        return value
    wanted = type(value[0]) if type(value[0]) in (str, int, list) else str
    wrong = _first_other(value, wanted)
    raise _no_prompt(f"prompt.{wrong}", value[wrong])


def shown(value: object) -> str:
    """Describe a value for an error message. Numbers and booleans are shown; strings are not, since they may be
    prompts."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return shortened(str(value)) if value.bit_length() < 1 << 10 else "a number of more than 300 digits"
    if isinstance(value, float):
        return repr(value)
    return f"a JSON {_JSON_TYPES.get(type(value), 'value')}"


_JSON_TYPES: Mapping[type, str] = {str: "string", list: "array", dict: "object"}


def _check_messages(messages: object) -> None:
    _at_most("messages", messages, MAX_MESSAGES, "messages")
    if not isinstance(messages, list):
        return
    for number, message in enumerate(messages):
        _at_most(f"messages.{number}", message, MAX_FIELDS, "fields")
        content = message.get("content") if isinstance(message, dict) else None
        _at_most(f"messages.{number}.content", content, MAX_PARTS, "parts")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            _at_most(f"messages.{number}.content.{index}", part, MAX_FIELDS, "fields")


def _at_most(name: str, value: object, limit: int, unit: str, *, field: str | None = "") -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        where = name if field == "" else field
        raise InvalidRequest(f"{name} has {len(value)} {unit}; at most {limit} are accepted", field=where)


def _first_other(items: Iterable[object], kind: type) -> int:
    return next(number for number, item in enumerate(items) if type(item) is not kind)


def _no_prompt(field: str, value: object) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: a prompt must be a string, a list of strings, a list of token ids (integers) or a list of such "
        f"lists, not {shown(value)}",
        field=field,
    )
