"""Messages and tools of Python callers: kvferry's types and OpenAI's dictionaries, and errors that name the place."""

import json
from typing import Any

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.inference.tool_calls import ToolCall
from kvferry.core.inference.tool_inputs import calls_from_input, content_from_input, tool_from_input, use_from_input
from kvferry.core.inference.tools import Tool
from kvferry.text.tools.conversations import check_calls

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def test_a_tool_in_openais_form_equals_kvferrys() -> None:
    expected = Tool("f", "adds", SCHEMA, is_strict=True)
    function = {"name": "f", "description": "adds", "parameters": SCHEMA, "strict": True}
    assert tool_from_input({"type": "function", "function": function}, 0) == tool_from_input(expected, 0) == expected
    assert tool_from_input({"type": "function", "function": {"name": "f"}}, 0) == Tool("f")


@pytest.mark.parametrize(
    "tool", [None, "f", {"name": "f"}, {"type": "function"}, {"type": "web", "function": {"name": "f"}}]
)
def test_other_tools_are_refused_by_number(tool: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\.3 must be a Tool, or") as caught:
        tool_from_input(tool, 3)
    assert caught.value.field == "tools"


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_calls_may_have_either_form(arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (found,) = calls_from_input({"role": "assistant", "tool_calls": [call]}, "messages.0")
    assert (found.call_id, found.name, json.loads(found.arguments)) == ("c1", "f", {"x": 1})
    assert calls_from_input({"role": "assistant", "tool_calls": (found,)}, "messages.0") == [
        ToolCall("c1", "f", found.arguments)
    ]
    assert calls_from_input({"role": "user"}, "messages.0") == []


@pytest.mark.parametrize(
    ("calls", "where"),
    [("f", "tool_calls"), ({"id": "c"}, "tool_calls"), ([1], "tool_calls.0"), ([{}], "tool_calls.0")],
)
def test_other_calls_are_refused_by_place(calls: Any, where: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\.2\.{where} must be"):
        calls_from_input({"role": "assistant", "tool_calls": calls}, "messages.2")


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([], ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab")],
)
def test_content_is_text_or_parts_of_text(content: Any, text: str) -> None:
    assert content_from_input({"role": "user", "content": content}, "messages.0") == text


@pytest.mark.parametrize("content", [5, [5], [{"type": "image_url"}], [{"type": "text"}], {"type": "text", "text": 5}])
def test_other_content_is_refused(content: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.1\.content must be a string or a list of parts"):
        content_from_input({"role": "user", "content": content}, "messages.1")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "users", "content": "x"}], "messages.0.role"),
        ([{"role": "", "content": "x"}], "messages.0.role"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "", "arguments": {}}}]},
                {"role": "tool", "tool_call_id": "c", "content": "y"},
            ],
            "messages.1.tool_calls.0.function.name",
        ),
    ],
)
def test_roles_and_names_of_calls_are_checked(messages: list[dict[str, object]], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_calls(messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"mode": "auto"},
        {"mode": "none", "tools": [{"function": {"name": "f"}}]},
        {"mode": "auto", "tools": [{"function": {"name": 1}}]},
        {"mode": "auto", "tools": [{"function": {"name": "f"}}, {}]},
    ],
)
def test_allowed_tools_of_another_form_are_refused(value):
    with pytest.raises(InvalidRequest, match=r"tool_choice\.allowed_tools must be a mode"):
        use_from_input([Tool("f", "", {})], {"type": "allowed_tools", "allowed_tools": value}, is_parallel=True)
