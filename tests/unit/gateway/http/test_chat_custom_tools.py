"""Custom tools of chat with OpenAI's client: calls, streams, turns, formats, choices, refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.errors import InvalidRequest
from kvferry.text.answers.registry import CallFormat

PATCH = '*** Begin Patch\n+"å" \\ 1\n*** End Patch'
TOOL: Any = {"type": "custom", "custom": {"name": "apply_patch", "description": "Changes files."}}
FUNCTION: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = written(CallFormat.HERMES, [("apply_patch", {"input": PATCH})])
MESSAGE = {"role": "user", "content": "Write."}


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
        return await http.post("/chat/completions", json={"messages": [MESSAGE], **body})


async def test_a_custom_tool_is_called_with_text_and_its_result_answered(api, client):
    first = await client.chat.completions.create(model="bytes", messages=[MESSAGE], tools=[TOOL])
    (call,) = first.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCH)
    assert first.choices[0].finish_reason == "tool_calls"
    assert '"Changes files."' in api.source.prompt
    api.source.answers = ["Done."]
    turn = first.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    second = await client.chat.completions.create(model="bytes", messages=[MESSAGE, turn, result], tools=[TOOL])
    assert second.choices[0].message.content == "Done."
    assert json.dumps(PATCH)[1:-1].replace("\\u00e5", "å") in api.source.prompt


async def test_a_stream_has_each_input_as_a_whole_and_functions_in_parts(api):
    calls = [("apply_patch", {"input": PATCH}), ("look", {"where": "there"}), ("apply_patch", {"input": ""})]
    api.source.answers = [written(CallFormat.HERMES, calls)]
    reply = await post(api, tools=[TOOL, FUNCTION], stream=True)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls") or ()]
    heads = [delta for delta in deltas if delta.get("type")]
    assert [(head["index"], head["type"]) for head in heads] == [(0, "custom"), (1, "function"), (2, "custom")]
    assert heads[0]["custom"] == {"input": "", "name": "apply_patch"}
    inputs = [(d["index"], d["custom"]["input"]) for d in deltas if "custom" in d and not d.get("type")]
    assert inputs == [(0, PATCH), (2, "")]
    arguments = "".join(delta["function"]["arguments"] for delta in deltas if "function" in delta)
    assert json.loads(arguments) == {"where": "there"}
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_cut_call_ends_with_the_input_so_far(api):
    api.source.answers = [CALL[: CALL.index("End")]]
    reply = await post(api, tools=[TOOL])
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["input"] == PATCH[: PATCH.index("End")]


@pytest.mark.parametrize(
    ("choice", "ignored"),
    [
        ("auto", True),
        ("required", False),
        ({"type": "custom", "custom": {"name": "apply_patch"}}, False),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}]},
            },
            False,
        ),
    ],
)
async def test_a_pattern_is_enforced_where_a_call_must_be_made(api, choice, ignored):
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    reply = await post(
        api, tools=[{"type": "custom", "custom": {"name": "apply_patch", "format": grammar}}], tool_choice=choice
    )
    assert reply.status_code == 200, reply.text
    assert ("tools.custom.format" in reply.headers.get("kvferry-ignored", "")) == ignored
    assert "[a-z]+" in api.source.prompt


@pytest.mark.parametrize(
    ("custom", "field"),
    [
        ({"name": "a", "format": {"type": "grammar"}}, "tools.0.custom.format.grammar"),
        ({"name": "a", "format": {"type": "text", "grammar": {"syntax": "lark", "definition": "x"}}},
         "tools.0.custom.format.grammar"),
        ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a)b"}}},
         "tools.0.custom.format.grammar.definition"),
        ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "a"}}}, "syntax"),
        ({}, "name"),
        ({"name": "not a name!"}, "tools.0.custom.name"),
        ({"name": "a", "description": "d" * 20_000}, "tools.0.custom.description"),
    ],
)  # fmt: skip
async def test_incomplete_formats_are_refused_by_name(api, custom, field):
    reply = await post(api, tools=[{"type": "custom", "custom": custom}])
    assert reply.status_code == 400
    assert field in reply.json()["error"]["param"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "apply_patch"}},
        {"type": "custom", "custom": {"name": "look"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "look"}}]},
        },
    ],
)
async def test_a_choice_of_the_other_type_is_refused(api, choice):
    reply = await post(api, tools=[TOOL, FUNCTION], tool_choice=choice)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tool_choice"
    assert "but its type is" in reply.json()["error"]["message"]


async def test_an_error_of_the_grammar_names_the_definition(api):
    """The rule in the error shows whose grammar is invalid: the second tool's."""
    api.source.error = InvalidRequest("constraint: no such pattern (rule arguments_1)", field="constraint")
    custom = {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?=a)b"}}}
    reply = await post(api, tools=[FUNCTION, {"type": "custom", "custom": custom}], tool_choice="required")
    assert reply.status_code == 400
    field = "tools.1.custom.format.grammar.definition"
    assert reply.json()["error"]["param"] == field
    assert reply.json()["error"]["message"].startswith(f"{field}: ")
