"""Messages and tools of Python callers: kvferry's own types, or dictionaries in OpenAI's form."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.core.inference.tool_calls import ToolCall
from kvferry.core.inference.tools import Tool, ToolMode, ToolUse

ToolInput = Mapping[str, object]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}`."""


def tool_from_input(value: object, number: int) -> Tool:
    """Return a tool.

    Args:
        value: a `Tool` or a `ToolInput`.
        number: index of the tool, for errors.

    Raises:
        InvalidRequest: the value has neither form.
    """
    if isinstance(value, Tool):
        return value
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"tools.{number}", 'a Tool, or {"type": "function", "function": {"name": "f", ..}}', value)
    return Tool(
        function["name"],
        str(function.get("description") or ""),
        function.get("parameters") or {},
        is_strict=bool(function.get("strict")),
    )


def use_from_input(
    tools: Sequence[Tool | ToolInput], choice: str | Mapping[str, object], *, is_parallel: bool
) -> ToolUse:
    """Return tools and how they may be used.

    Args:
        tools: tools that the model may call.
        choice: `auto`, `none`, `required`, or the name of the tool to call, also as `{"type": "function", "function":
            {"name": ..}}`; or the tools that may be called, as `{"type": "allowed_tools", "allowed_tools": {"mode":
            "auto", "tools": [{"type": "function", "function": {"name": ..}}]}}`.
        is_parallel: whether an answer may have several calls.

    Raises:
        InvalidRequest: `choice` has another form; see also `ToolUse` and `tool_from_input`.
    """
    allowed: frozenset[str] | None = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice.get("allowed_tools"))
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name", choice) if isinstance(function, Mapping) else choice
    if not isinstance(choice, str):
        raise _wrong("tool_choice", "auto, none, required, or the name of a tool", choice)
    given = tuple(tool_from_input(tool, number) for number, tool in enumerate(tools))
    if choice in tuple(ToolMode):
        return ToolUse(given, ToolMode(choice), is_parallel=is_parallel, allowed=allowed)
    return ToolUse(given, ToolMode.REQUIRED, choice, is_parallel=is_parallel)


def _allowed(value: object) -> tuple[str, frozenset[str]]:
    """Return the mode and the names of a choice of several tools."""
    tools = value.get("tools") if isinstance(value, Mapping) else None
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    mode = value.get("mode") if isinstance(value, Mapping) else None
    is_whole = bool(names) and len(names) == len(tools or ()) and all(isinstance(name, str) for name in names)
    if mode not in (ToolMode.AUTO, ToolMode.REQUIRED) or not is_whole:
        raise _wrong("tool_choice.allowed_tools", "a mode, auto or required, and the tools by name", value)
    return str(mode), frozenset(map(str, names))


def call_from_input(value: object, where: str) -> ToolCall:
    """Return a call in an assistant's message.

    Args:
        value: a `ToolCall`, or `{"id": .., "function": {"name": .., "arguments": ..}}` with arguments as JSON text or
            as an object.
        where: path of the call, for errors.

    Raises:
        InvalidRequest: the value has neither form.
    """
    if isinstance(value, ToolCall):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    if not isinstance(value, Mapping) or not isinstance(function, Mapping) or not named:
        raise _wrong(where, 'a ToolCall, or {"id": "c1", "function": {"name": "f", "arguments": "{}"}}', value)
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(value.get("id") or ""), function["name"], text)


def calls_from_input(message: Mapping[str, object], where: str) -> list[ToolCall]:
    """Return the calls of a message; see `call_from_input`."""
    calls: Any = message.get("tool_calls") or ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
        raise _wrong(f"{where}.tool_calls", "a list of calls", calls)
    return [call_from_input(call, f"{where}.tool_calls.{number}") for number, call in enumerate(calls)]


def content_from_input(message: Mapping[str, object], where: str) -> str:
    """Return the text of a message: a string, a list of OpenAI's text parts, or nothing.

    Args:
        message: the message.
        where: path of the message in the request, for error messages.

    Raises:
        InvalidRequest: the content has another form, for example an image.
    """
    content: Any = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            expected = 'a string or a list of parts {"type": "text", "text": ..}'
            raise _wrong(f"{where}.content", expected, parts[number])
    return "".join(map(str, texts))


def _wrong(where: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{where} must be {expected}, not {shortened(repr(value))}", field=where.partition(".")[0])
