"""The Responses API over real sockets with OpenAI's client: text, streams, functions, turns, formats, refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from pydantic import BaseModel

from kvferry.core.constraint import ConstraintKind
from kvferry.core.errors import Unavailable
from kvferry.core.sampling import FinishReason
from kvferry.text.answers.registry import CallFormat

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Returns the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = written(CallFormat.HERMES, [("get_weather", {"city": "Oslo"})])


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES) as running:
        running.source.answers = ["It is cold."]
        yield running


@pytest.fixture
async def thinking() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as running:
        yield running


@pytest.fixture
async def client(api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as opened:
        yield opened


async def post(api: AnsweringApi, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=api.url) as http:
        return await http.post("/responses", json=body)


async def test_a_text_is_answered(api, client):
    answer = await client.responses.create(
        model="bytes",
        input="hello",
        instructions="Be kind.",
        metadata={"a": "b"},
        temperature=0.5,
        max_output_tokens=99,
    )
    assert answer.output_text == "It is cold."
    assert api.source.prompt == "<system>Be kind.<user>hello<assistant>"
    assert (answer.status, answer.model, answer.object) == ("completed", "bytes", "response")
    assert (answer.metadata, answer.temperature, answer.max_output_tokens) == ({"a": "b"}, 0.5, 99)
    assert (answer.error, answer.incomplete_details, answer.truncation) == (None, None, "disabled")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(api.source.prompt), 11)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    (message,) = answer.output
    assert (message.role, message.status, message.content[0].annotations) == ("assistant", "completed", [])
    assert api.source.requests[-1].sampling.max_tokens == 99


async def test_a_list_of_messages_is_the_conversation(api, client):
    await client.responses.create(
        model="bytes",
        input=[
            {"role": "developer", "content": "Be brief."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    assert api.source.prompt == "<system>Be brief.<user>ab<assistant>c<user>d<assistant>"


async def test_events_come_in_the_documented_order(client):
    stream = await client.responses.create(model="bytes", input="hello", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    deltas = types.count("response.output_text.delta")
    assert deltas > 1
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is cold."
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    done = events[-1].response
    assert (done.status, done.output_text, done.id) == ("completed", "It is cold.", events[0].response.id)


async def test_a_stream_ends_as_the_same_response_without_a_stream(api, client):
    whole = await client.responses.create(model="bytes", input="hello")
    async with client.responses.stream(model="bytes", input="hello") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    varying = {"id", "created_at", "completed_at", "kvferry"}
    left, right = (r.model_dump(exclude=varying) for r in (whole, final))
    for response in (left, right):
        for item in response["output"]:
            del item["id"]
            for part in item["content"]:
                part.pop("parsed", None)
    assert left == right


async def test_a_cut_off_answer_is_incomplete(api, client):
    api.source.finish = FinishReason.LENGTH
    answer = await client.responses.create(model="bytes", input="hello", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    events = [
        e async for e in await client.responses.create(model="bytes", input="x", max_output_tokens=4, stream=True)
    ]
    assert events[-1].type == "response.incomplete"


async def test_an_empty_answer_is_a_message_without_text(api, client):
    api.source.answers = [""]
    answer = await client.responses.create(model="bytes", input="hello")
    assert (answer.output_text, answer.status, len(answer.output)) == ("", "completed", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_is_called_and_its_result_answered(api, client, stream):
    api.source.answers = [f"Let me look.{CALL}"]
    items: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
    if stream:
        events = [
            event
            async for event in await client.responses.create(model="bytes", input=items, tools=[WEATHER], stream=True)
        ]
        answer = events[-1].response
        types = [event.type for event in events]
        assert types.index("response.output_text.done") < types.index("response.function_call_arguments.delta")
        arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert "".join(arguments) == done.arguments
        added = [e.item for e in events if e.type == "response.output_item.added"]
        assert [item.type for item in added] == ["message", "function_call"]
        assert added[1].arguments == ""
    else:
        answer = await client.responses.create(model="bytes", input=items, tools=[WEATHER])
    message, call = answer.output
    assert message.content[0].text == "Let me look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    items += [item.to_dict() for item in answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "-3 °C"})
    api.source.answers = ["It is cold in Oslo."]
    final = await client.responses.create(model="bytes", input=items, tools=[WEATHER])
    assert final.output_text == "It is cold in Oslo."
    assert "-3 °C" in api.source.prompt
    assert '"city": "Oslo"' in api.source.prompt
    assert api.source.prompt.count("<assistant>") == 2, "text and call belong to one message of the conversation"


async def test_several_calls_are_items_of_one_turn(api, client):
    api.source.answers = [written(CallFormat.HERMES, [("get_weather", {"city": c}) for c in "ab"])]
    answer = await client.responses.create(model="bytes", input="?", tools=[WEATHER])
    assert [item.type for item in answer.output] == ["function_call", "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in answer.output]
    api.source.answers = ["done"]
    final = await client.responses.create(model="bytes", input=results, previous_response_id=answer.id, tools=[WEATHER])
    assert final.output_text == "done"
    forced = await client.responses.create(
        model="bytes", input="?", tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}
    )
    assert forced.tool_choice.name == "get_weather"
    assert api.source.requests[-1].sampling.constraint.kind is ConstraintKind.GRAMMAR


async def test_a_previous_response_is_the_beginning_of_the_conversation(api, client):
    first = await client.responses.create(model="bytes", input="one", instructions="Be brief.")
    api.source.answers = ["Second."]
    second = await client.responses.create(model="bytes", input="two", previous_response_id=first.id)
    assert api.source.prompt == "<user>one<assistant>It is cold.<user>two<assistant>", (
        "the instructions of the earlier response are not repeated"
    )
    assert second.previous_response_id == first.id
    await client.responses.delete(first.id)
    await client.responses.create(model="bytes", input="three", previous_response_id=second.id, instructions="New.")
    assert api.source.prompt == (
        "<system>New.<user>one<assistant>It is cold.<user>two<assistant>Second.<user>three<assistant>"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_kept_listed_and_deleted(client, stream):
    made = await client.responses.create(
        model="bytes", input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], stream=stream
    )
    if stream:
        made = [event async for event in made][-1].response
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    items = await client.responses.input_items.list(made.id, order="asc")
    assert [item.content[0].text for item in items.data] == ["a", "b"]
    page = await client.responses.input_items.list(made.id, limit=1)
    assert (page.data[0].content[0].text, page.has_more) == ("b", True)
    after = await client.responses.input_items.list(made.id, after=page.data[0].id)
    assert [item.content[0].text for item in after.data] == ["a"]
    await client.responses.delete(made.id)
    for call in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError) as gone:
            await call
        assert gone.value.code == "response_not_found"


async def test_responses_that_are_not_stored_are_not_kept(client):
    made = await client.responses.create(model="bytes", input="a", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.create(model="bytes", input="a", previous_response_id=made.id)
    assert gone.value.param == "previous_response_id"


class Answer(BaseModel):
    city: str
    degrees: int


async def test_structured_output_is_parsed(api, client):
    api.source.answers = ['{"city": "Oslo", "degrees": -3}']
    parsed = await client.responses.parse(model="bytes", input="?", text_format=Answer)
    assert parsed.output_parsed == Answer(city="Oslo", degrees=-3)
    constraint = api.source.requests[-1].sampling.constraint
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint.source)["required"] == ["city", "degrees"]
    await client.responses.create(model="bytes", input="?", text={"format": {"type": "json_object"}})
    assert api.source.requests[-1].sampling.constraint.kind is ConstraintKind.JSON_OBJECT


async def test_reasoning_is_an_item_before_the_answer(thinking):
    thinking.source.answers = ["<think>Hm.</think>Cold."]
    async with openai.AsyncOpenAI(base_url=thinking.url, api_key="any", max_retries=0) as client:
        answer = await client.responses.create(model="bytes", input="?")
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "Hm."
        assert answer.output_text == "Cold."
        events = [event async for event in await client.responses.create(model="bytes", input="?", stream=True)]
        types = [event.type for event in events]
        assert types.index("response.reasoning_text.done") < types.index("response.output_text.delta")
        assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1]
        follow: Any = [
            {"role": "user", "content": "?"},
            *(i.to_dict() for i in answer.output),
            {"role": "user", "content": "!"},
        ]
        await client.responses.create(model="bytes", input=follow)
        assert "Cold." in thinking.source.prompt


async def test_log_probabilities_come_if_they_are_included(client):
    include: Any = ["message.output_text.logprobs"]
    answer = await client.responses.create(model="bytes", input="?", include=include, top_logprobs=2)
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(token.token for token in logprobs) == "It is cold."
    plain = await client.responses.create(model="bytes", input="?")
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": "a", "background": True, "store": False}, "background", "stored"),
        ({"input": "a", "truncation": "last"}, "truncation", "'auto' or 'disabled'"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "not supported"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "'xhigh'"),
        (
            {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
            "",
        ),
        ({"input": "a", "messages": []}, "messages", "a conversation is sent in input"),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools.0.type", "web_search"),
        (
            {"input": "a", "tools": [{"type": "mcp", "server_label": "x"}], "tool_choice": {"type": "mcp"}},
            "tools.0.type",
            "mcp",
        ),
        ({"input": "a", "include": ["file_search_call.results"]}, "include", "file_search_call"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
            "input_image",
        ),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "whole number"),
        ({"input": "a", "top_p": 3}, "top_p", "greater than 0"),
        ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.name", "missing"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "tools"),
        ({"input": "a", "previous_response_id": 7}, "previous_response_id", "string"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input.0.call_id",
            "function_call_output",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
            "input",
            "have no result",
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"unsupported": 1}}}},
            "text.format",
            "unsupported",
        ),
        ({"input": "a", "background": 0}, "background", "boolean"),
    ],
)
async def test_unsupported_and_invalid_fields_are_refused_by_name(api, body, field, text):
    answer = await post(api, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert text in error["message"].lower()
    assert not api.source.requests


async def test_values_without_effect_are_accepted(api):
    body = {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a", "annotations": []}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "logprobs": []}],
                "status": "completed",
            },
            {"role": "user", "content": "c"},
        ],
        "truncation": "disabled",
        "background": False,
        "service_tier": "auto",
        "reasoning": {"effort": None},
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "prompt_cache_key": "k",
        "stream_options": None,
    }
    assert (await post(api, **body)).status_code == 200
    assert api.source.prompt == "<user>a<assistant>b<user>c<assistant>"


async def test_what_coding_agents_send_is_accepted(api):
    body = {
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "prompt_cache_key": "session",
        "text": {"verbosity": "low"},
    }
    answer = await post(api, **body)
    assert answer.status_code == 200, answer.text
    named = answer.headers["kvferry-ignored"].split(", ")
    assert named == ["reasoning.summary", "text.verbosity"]


async def test_a_failure_in_a_stream_is_its_last_event(api, client):
    source = api.source
    stream = type(source).stream

    async def failing(self, request):
        async for event in stream(self, request):
            if event.finish_reason is not None:
                raise Unavailable("no worker is left")
            yield event

    source.__class__ = type("Failing", (type(source),), {"stream": failing})
    events = [event async for event in await client.responses.create(model="bytes", input="?", stream=True)]
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "no worker is left")
    assert failed.output[0].status == "incomplete"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(failed.id)
    with pytest.raises(openai.InternalServerError) as refused:
        await client.responses.create(model="bytes", input="?")
    assert refused.value.status_code == 503


async def test_a_coding_agent_completes_two_turns(api):
    shell = {
        "type": "function",
        "name": "shell",
        "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
        "strict": False,
    }
    custom = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    }
    body = {
        "model": "bytes",
        "instructions": "You write code.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Sandbox: read-only."}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        ],
        "tools": [shell, custom, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0197",
        "text": {"verbosity": "medium"},
    }
    api.source.answers = [written(CallFormat.HERMES, [("shell", {"command": ["ls"]})])]
    first = await post(api, **body)
    assert first.status_code == 200, first.text
    assert {"tools.format", "tools.web_search"} <= set(first.headers["kvferry-ignored"].split(", "))
    assert "apply_patch" in api.source.prompt
    assert "Sandbox: read-only." in api.source.prompt
    events = [json.loads(line[6:]) for line in first.text.split("\n") if line.startswith("data: ")]
    items = events[-1]["response"]["output"]
    (call,) = (item for item in items if item["type"] == "function_call")
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "opaque"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
    api.source.answers = ["There is README.md."]
    second = await post(api, **{**body, "stream": False, "input": [*body["input"], reasoning, call, result]})
    assert second.status_code == 200, second.text
    assert "input.encrypted_content" in second.headers["kvferry-ignored"], "another server's carrier"
    assert second.json()["output"][-1]["content"][0]["text"] == "There is README.md."
    assert "README.md" in api.source.prompt
