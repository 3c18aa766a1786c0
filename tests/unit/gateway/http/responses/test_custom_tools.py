"""Custom tools of the Responses API with OpenAI's client: calls, streams, turns, formats, refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.fields.custom_tools import arguments_of, input_of
from kvferry.gateway.http.responses.tools import CustomTool, FunctionTool, without_function
from kvferry.text.answers.registry import CallFormat

PATCH = '*** Begin Patch\n+"å" \\ 1\n*** End Patch'
TOOL: Any = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
CALL = written(CallFormat.HERMES, [("apply_patch", {"input": PATCH})])


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES) as running:
        running.source.answers = [CALL]
        yield running


@pytest.fixture
async def client(api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as opened:
        yield opened


async def post(api: AnsweringApi, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=api.url) as http:
        return await http.post("/responses", json={"input": "a", **body})


async def test_a_custom_tool_is_called_with_text_and_its_result_answered(api, client):
    first = await client.responses.create(model="bytes", input="Write.", tools=[TOOL])
    (call,) = first.output
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "apply_patch", PATCH, "completed")
    assert '"Changes files."' in api.source.prompt
    api.source.answers = ["Done."]
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    items = [{"role": "user", "content": "Write."}, call.model_dump(), result]
    second = await client.responses.create(model="bytes", input=items, tools=[TOOL])
    sent = api.source.prompt
    third = await client.responses.create(model="bytes", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert second.output_text == third.output_text == "Done."
    assert sent == api.source.prompt
    assert json.dumps(PATCH)[1:-1].replace("\\u00e5", "å") in sent


async def test_a_stream_has_the_whole_input(client):
    events = [event async for event in await client.responses.create(
        model="bytes", input="Write.", tools=[TOOL], stream=True
    )]  # fmt: skip
    assert [event.type for event in events[2:-1]] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert (events[2].item.type, events[2].item.input) == ("custom_tool_call", "")
    assert events[3].delta == events[4].input == events[5].item.input == PATCH


async def test_functions_and_custom_tools_are_called_together(api, client):
    shell: Any = {"type": "function", "name": "shell", "parameters": {}}
    api.source.answers = [written(CallFormat.HERMES, [("shell", {"input": "ls"}), ("apply_patch", {"input": "p"})])]
    found = await client.responses.create(model="bytes", input="?", tools=[shell, TOOL])
    assert [item.type for item in found.output] == ["function_call", "custom_tool_call"]
    assert (json.loads(found.output[0].arguments), found.output[1].input) == ({"input": "ls"}, "p")


async def test_an_input_that_is_cut_off_is_shown_as_far_as_it_came(api, client):
    api.source.answers, api.source.finish = [CALL[: CALL.index("End Patch")]], FinishReason.LENGTH
    found = await client.responses.create(model="bytes", input="?", tools=[TOOL])
    assert found.status == "incomplete"
    assert PATCH.startswith(found.output[0].input)
    assert len(found.output[0].input) > 10


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}])
async def test_a_regular_expression_is_enforced_if_a_call_must_be_made(api, choice):
    tool = {**TOOL, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]+|x"}}
    api.source.answers = [written(CallFormat.HERMES, [("apply_patch", {"input": "abc"})])]
    answer = await post(api, tools=[tool], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert "kvferry-ignored" not in answer.headers
    constraint = api.source.requests[-1].sampling.constraint
    assert constraint is not None
    assert "[a-c]+|x" in constraint.source


@pytest.mark.parametrize("definition", ["a)|(?:b", r"\\)", "a)", "(a))(b", r"[^]\]]))"])
async def test_a_regular_expression_cannot_leave_the_group_around_it(api, definition):
    tool = {**TOOL, "format": {"type": "grammar", "syntax": "regex", "definition": definition}}
    answer = await post(api, tools=[tool], tool_choice="required")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools.0.format.definition"
    assert "has a `)` without its `(`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("definition", [r"\)a", "[)]a", "[]()]", r"(a(b)*)|[^])]", r"[\])]x"])
async def test_other_parentheses_are_taken(api, definition):
    tool = {**TOOL, "format": {"type": "grammar", "syntax": "regex", "definition": definition}}
    answer = await post(api, tools=[tool])
    assert answer.status_code == 200, answer.text


def test_errors_of_tools_have_the_paths_of_this_api():
    tools = [FunctionTool(type="function", name="look"), CustomTool(type="custom", name="patch")]

    def renamed(field: str) -> tuple[str | None, str]:
        error = without_function(InvalidRequest(f"{field}: is wrong", field=field), tools)
        return error.field, error.message

    assert renamed("tools.0.function.parameters") == ("tools.0.parameters", "tools.0.parameters: is wrong")
    name = "tools.1.format.definition"
    assert renamed("tools.1.function.parameters") == (name, f"{name}: is wrong")
    assert renamed("tools.1.function.name")[0] == "tools.1.name"
    assert renamed("tool_choice") == ("tool_choice", "tool_choice: is wrong")


@pytest.mark.parametrize("syntax", ["lark", "regex"])
async def test_formats_that_are_only_described_are_named(api, syntax):
    tool = {**TOOL, "format": {"type": "grammar", "syntax": syntax, "definition": "start: /a/"}}
    answer = await post(api, tools=[tool])
    assert answer.headers["kvferry-ignored"] == "tools.format"
    assert f"must match this {syntax} grammar" in api.source.prompt
    text = await post(api, tools=[{**TOOL, "format": {"type": "text"}}])
    assert "kvferry-ignored" not in text.headers


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({**TOOL, "name": "a b"}, "tools.0.name"),
        ({"type": "function", "name": "a b"}, "tools.0.name"),
        ({"type": "custom"}, "tools.0.name"),
        ({**TOOL, "format": {"type": "grammar"}}, "tools.0.format.syntax"),
        ({**TOOL, "format": {"type": "grammar", "syntax": "lark"}}, "tools.0.format.definition"),
        ({**TOOL, "format": {"type": "grammar", "syntax": "bnf", "definition": "a"}}, "tools.0.format.syntax"),
        ({**TOOL, "format": {"type": "grammar", "syntax": "regex", "definition": "a" * 16_385}},
         "tools.0.format.definition"),
    ],
)  # fmt: skip
async def test_invalid_tools_are_refused_by_name(api, tool, field):
    answer = await post(api, tools=[tool])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not api.source.requests


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"text": "fig"}', '{"text": "fig"}'), ('{"inp', ""), ("fig", "fig"), ('{"input": 7}', "7"), ("[1]", "[1]")],
)
def test_arguments_without_an_input_are_the_input(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


@given(st.text(), st.integers(0, 100))
def test_inputs_survive_the_form_of_arguments(text, cut):
    arguments = arguments_of(text)
    assert input_of(arguments) == text
    partial = input_of(arguments[: min(cut, len(arguments))])
    assert text.startswith(partial) or arguments.startswith(partial)
