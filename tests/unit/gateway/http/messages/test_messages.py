"""The Messages API over real sockets in plain HTTP: answers, events, tools, reasoning, fields without effect."""

import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.answers import written
from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.fakes.scripted_gateway import scripted_gateway

from kvferry.core.constraint import ConstraintKind
from kvferry.core.errors import GenerationFailed, Overloaded
from kvferry.core.inference.chunks import Usage
from kvferry.core.sampling import FinishReason
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.messages.blocks import ConversationMessage, conversation
from kvferry.gateway.http.messages.body import read_count, read_message
from kvferry.gateway.http.messages.progress import usage_of
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.registry import CallFormat

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Returns the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CALL = written(CallFormat.HERMES, [("get_weather", {"city": "Oslo"})])
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as running:
        running.source.answers = ["It is cold."]
        yield running


async def post(api: AnsweringApi, path: str = "/messages", **fields: Any) -> httpx.Response:
    body = {"model": "bytes", "messages": USER, **({"max_tokens": 100} if path == "/messages" else {}), **fields}
    async with httpx.AsyncClient(base_url=api.url) as http:
        return await http.post(path, json=body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"})


async def answer(api: AnsweringApi, **fields: Any) -> dict[str, Any]:
    response = await post(api, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def events(api: AnsweringApi, **fields: Any) -> list[dict[str, Any]]:
    response = await post(api, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def refusal(api: AnsweringApi, status: int = 400, **fields: Any) -> str:
    response = await post(api, **fields)
    body = response.json()
    assert response.status_code == status, body
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert body["error"].keys() == {"type", "message", "details"}
    return body["error"]["message"]


async def test_a_message_is_answered(api):
    response = await post(api, system="Be kind.", temperature=0.5, top_p=0.9, top_k=7, metadata={"user_id": "u"})
    whole = response.json()
    assert api.source.prompt == "<system>Be kind.<user>hello<assistant>"
    assert whole["id"] == f"msg_{response.headers['request-id']}"
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "bytes")
    assert whole["content"] == [{"type": "text", "text": "It is cold.", "citations": None}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert whole["usage"] == {
        "input_tokens": len(api.source.prompt),
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "output_tokens": 11,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert "kvferry-ignored" not in response.headers
    sampling = api.source.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (100, 0.5, 0.9, 7)


async def test_blocks_of_text_are_lines_and_messages_of_one_role_are_one_message(api):
    text = [{"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in ("a", "b")]
    await answer(
        api,
        system=text,
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": text},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": text},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [text[0]]},
        ],
    )
    assert api.source.prompt == "<system>a\nb\nBe kind.<user>a\nb\nc<assistant>ab<system>Be brief.<user>a<assistant>"


async def test_events_come_in_the_documented_order(api):
    found = await events(api)
    types = [event["type"] for event in found]
    deltas = types.count("content_block_delta")
    assert deltas > 1
    assert types == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == len(api.source.prompt)
    assert found[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "citations": None},
    }
    assert {event["delta"]["type"] for event in found[2 : 2 + deltas]} == {"text_delta"}
    assert "".join(event["delta"]["text"] for event in found[2 : 2 + deltas]) == "It is cold."
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 11


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_a_stream_adds_up_to_the_whole_answer(api, size):
    api.source.bytes_per_step = size
    api.source.answers = [f"<think>\nLook it up.\n</think>\nLet me look.{CALL}{CALL}"]
    whole = await answer(api, tools=[WEATHER])
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == "tool_use"
    assert "Look it up." in whole["content"][0]["thinking"]
    assert whole["content"][0]["signature"]
    for call in whole["content"][2:]:
        assert (call["name"], call["input"]) == ("get_weather", {"city": "Oslo"})
    assert len({call["id"] for call in whole["content"][2:]}) == 2
    blocks: list[dict[str, Any]] = []
    for event in await events(api, tools=[WEATHER]):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            ((name, value),) = ((key, text) for key, text in event["delta"].items() if key != "type")
            target = {"partial_json": "json"}.get(name, name)
            blocks[-1][target] += value
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"]


async def test_a_call_is_answered_in_the_next_turn(api):
    api.source.answers = [f"Let me look.{CALL}"]
    first = await answer(api, tools=[WEATHER])
    call_id = first["content"][1]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "-3 °C"}]}
    turns = [*USER, {"role": "assistant", "content": first["content"]}]
    await answer(api, tools=[WEATHER], messages=[*turns, {"role": "user", "content": [result]}])
    assert "<tool_response>\n-3 °C\n</tool_response>" in api.source.prompt
    assert api.source.prompt.count("<user>") == 2, "a message with results alone has no text"
    failed = {**result, "is_error": True, "content": "no such city"}
    text = {"type": "text", "text": "Go on."}
    await answer(api, tools=[WEATHER], messages=[*turns, {"role": "user", "content": [text, failed]}])
    assert "<tool_response>\nError: no such city\n</tool_response><user>Go on." in api.source.prompt


def test_reasoning_of_the_history_reaches_the_template():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "any"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "yes"},
    ]
    message = ConversationMessage.model_validate({"role": "assistant", "content": blocks})
    messages, places = conversation(None, [message])
    assert messages == [{"role": "assistant", "content": "yes", "reasoning_content": "hm"}]
    assert places == ["messages.0"]


@pytest.mark.parametrize(
    ("kind", "is_enabled"), [("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)]
)
async def test_thinking_is_a_variable_of_the_template(api, kind, is_enabled):
    response = await post(api, thinking={"type": kind, "display": "summarized"})
    assert f'{{"enable_thinking": {str(is_enabled).lower()}}}' in api.source.prompt
    assert response.headers["kvferry-ignored"] == "thinking.display"


async def test_a_budget_is_no_reason_to_refuse_where_it_cannot_be_enforced(api):
    response = await post(api, thinking={"type": "enabled", "budget_tokens": 2000})
    assert response.status_code == 200
    assert response.headers["kvferry-ignored"] == "thinking.budget_tokens"


async def test_an_effort_is_a_variable_of_the_template(api):
    for effort, value in (("low", "low"), ("max", "xhigh")):
        response = await post(api, output_config={"effort": effort})
        assert f'{{"reasoning_effort": "{value}"}}' in api.source.prompt
        assert "kvferry-ignored" not in response.headers


async def test_tokens_of_the_reasoning_are_counted(api):
    api.source.answers = ["<think>hm</think>Yes."]
    details = (await answer(api))["usage"]["output_tokens_details"]
    assert 2 < details["thinking_tokens"] <= len("<think>hm</think>")


async def test_the_answer_continues_a_last_message_of_the_assistant(api):
    api.source.answers = [" is cold."]
    turns = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "It"}]}]
    found = await answer(api, messages=turns)
    assert api.source.prompt == "<user>hello<assistant>It"
    assert found["content"][0]["text"] == " is cold."
    counted = await post(api, "/messages/count_tokens", messages=turns)
    assert counted.json() == {"input_tokens": len(api.source.prompt)}
    await answer(api, messages=[*USER, {"role": "assistant", "content": []}])
    assert api.source.prompt == "<user>hello<assistant><assistant>"


async def test_a_strict_gateway_refuses_unknown_fields_and_accepts_listed_ones():
    http = HttpConfig(address="127.0.0.1:0", strict_fields=True)
    async with scripted_gateway(http=http) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": USER, "max_tokens": 5}
            listed = await client.post(
                path, json={**body, "container": "c"} if path == "/v1/messages" else {"messages": USER}
            )
            assert listed.status_code == 200
            unknown = await client.post(path, json={**body, "flavour": 1})
            assert (unknown.status_code, unknown.json()["type"]) == (400, "error")
        await gateway.idle()


async def test_reasons_why_an_answer_ends(api):
    api.source.answers = ["one two three"]
    ended = await answer(api, stop_sequences=["two"])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "two")
    assert ended["content"][0]["text"] == "one "
    api.source.finish = FinishReason.LENGTH
    assert (await answer(api, max_tokens=13))["stop_reason"] == "max_tokens"
    assert (await answer(api, max_tokens=99))["stop_reason"] == "model_context_window_exceeded"
    api.source.answers = [CALL[:-20]]
    cut = await answer(api, tools=[WEATHER], max_tokens=len(CALL) - 20)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["name"] == "get_weather"
    assert isinstance(cut["content"][0]["input"], dict)
    api.source.answers = [""]
    api.source.finish = FinishReason.STOP
    empty = await answer(api)
    assert (empty["content"], empty["stop_reason"]) == ([], "end_turn")


async def test_no_output_tokens_compute_the_prompt_alone(api):
    api.source.answers = ["<think>x"]
    found = await answer(api, max_tokens=0)
    assert (found["content"], found["usage"]["output_tokens"], found["stop_reason"]) == ([], 0, "max_tokens")


async def test_choices_of_tools(api):
    api.source.answers = [CALL + CALL]
    assert (await answer(api, tools=[WEATHER], tool_choice={"type": "auto"}))["stop_reason"] == "tool_use"
    one = await answer(api, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(one["content"]) == 1
    none = await answer(api, tools=[WEATHER], tool_choice={"type": "none"})
    assert (none["stop_reason"], "get_weather" in api.source.prompt) == ("end_turn", False)
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced = await answer(api, tools=[WEATHER], tool_choice=choice)
        assert forced["stop_reason"] == "tool_use"
        assert api.source.requests[-1].sampling.constraint is not None
    for choice, words in (
        ({"type": "tool"}, "tool_choice.name is missing"),
        ({"type": "tool", "name": "other"}, "not in tools"),
        ({"type": "maybe"}, "tool_choice.type"),
    ):
        assert words in await refusal(api, tools=[WEATHER], tool_choice=choice)


async def test_tools_of_other_types_are_left_out_and_named_unless_they_are_forced(api):
    tools = [SEARCH, WEATHER]
    for choice in ({"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "get_weather"}):
        api.source.answers = [CALL]
        response = await post(api, tools=tools, tool_choice=choice)
        assert response.status_code == 200
        assert response.headers["kvferry-ignored"] == "tools.web_search_20250305"
        assert "web_search" not in api.source.prompt
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        assert "tools.0" in await refusal(api, tools=tools, tool_choice=choice)


async def test_the_format_of_the_output(api):
    api.source.answers = ['{"a": 1}']
    given = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": given, "effort": "high"}}, {"output_format": given}):
        response = await post(api, **fields)
        assert response.status_code == 200
        assert api.source.requests[-1].sampling.constraint.kind is ConstraintKind.JSON_SCHEMA
    wrong = {"type": "json_schema", "schema": {"unsupported": True}}
    assert "output_config.format: " in await refusal(api, output_config={"format": wrong})


async def test_unknown_fields_have_no_effect_and_are_named(api):
    block = {"type": "text", "text": "hi", "citations": None, "flavour": 1}
    response = await post(
        api,
        messages=[{"role": "user", "content": [block, block]}],
        tools=[{**WEATHER, "eager_input_streaming": True}],
        service_tier="flex",
        context_management={"edits": []},
        container="c",
        **{"bad\r\nname": 1, "ü": 2},
    )
    assert response.status_code == 200
    named = response.headers["kvferry-ignored"].split(", ")
    assert sorted(named) == [
        "?",
        "bad??name",
        "container",
        "context_management",
        "messages.content.flavour",
        "service_tier",
        "tools.eager_input_streaming",
    ]
    streamed = await post(api, stream=True, speed="fast")
    assert streamed.headers["kvferry-ignored"] == "speed"
    many = await post(api, **{f"field_{number}": 1 for number in range(50)})
    assert len(many.headers["kvferry-ignored"].split(", ")) == 50


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 1.5}, "temperature must be a number from 0.0 to 1.0"),
        ({"top_p": 2.0}, "top_p"),
        ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role must be one of user, assistant, system"),
        ({"messages": [1]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages.0.content.0.type is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 257}]}, "at most 256"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type 'image' is not supported in a message of role user; use text, tool_result",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use' is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "document"}]}]}]},
            "messages.0.content.0.content.0.type 'document' is not supported",
        ),
        ({"system": [{"type": "image"}]}, "system.0.type 'image' is not supported in the system prompt"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"fallbacks": [{"model": "x"}]}, "fallbacks is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema is missing"),
        ({"tools": [SEARCH, {**WEATHER, "name": "a b"}]}, "tools.1.name must have 1 to 64 letters"),
        ({"tools": [SEARCH, {**WEATHER, "input_schema": {"type": "array"}}]}, "tools.1.input_schema"),
        ({"tools": [WEATHER] * 129}, "at most 128"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"cache_salt": "x" * 5000}, "cache_salt"),
    ],
)
async def test_refused(api, fields, words):
    assert words in await refusal(api, **fields)


async def test_results_and_calls_belong_together(api):
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
    message = await refusal(api, system="s", messages=[*USER, call, *USER])
    assert message == "the tool calls 't1' before messages.2 have no result; add a tool_result block for each"
    wrong = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "x"}]}
    assert "messages.2.tool_use_id 't2' does not match" in await refusal(api, messages=[*USER, call, wrong])


async def test_a_forced_call_whose_schema_cannot_be_used_names_the_tool(api):
    bad = {**WEATHER, "input_schema": {"type": "object", "properties": {"unsupported": {"type": "string"}}}}
    message = await refusal(api, tools=[SEARCH, bad], tool_choice={"type": "tool", "name": "get_weather"})
    assert message.startswith("tools")
    assert "function" not in message


@pytest.mark.parametrize("count", [False, True])
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(api, count):
    limit = 1 << 16
    if not count:
        message = await refusal(api, messages=[{"role": "user", "content": "x" * limit}])
        assert message.startswith(
            f"prompt is too long: {limit + len('<user><assistant>')} tokens > {limit - 1} maximum"
        )
    longest = 64 * limit
    path = "/messages/count_tokens" if count else "/messages"
    message = await refusal(api, path=path, messages=[{"role": "user", "content": "x" * (longest + 640)}])
    assert message.startswith("prompt is too long: 655")
    assert f" tokens > {limit - 1} maximum" in message


async def test_tokens_are_counted(api):
    fields: dict[str, Any] = {"system": "Be kind.", "tools": [WEATHER, SEARCH], "thinking": {"type": "disabled"}}
    response = await post(api, "/messages/count_tokens", **fields)
    await answer(api, **fields)
    assert response.json() == {"input_tokens": len(api.source.prompt)}
    assert response.headers["kvferry-ignored"] == "tools.web_search_20250305"
    ends_open = [*USER, {"role": "assistant", "content": "It is"}]
    assert (await post(api, "/messages/count_tokens", messages=ends_open)).status_code == 200
    assert "not served" in await refusal(api, 404, path="/messages/count_tokens", model="other")
    assert "tools.0.input_schema" in await refusal(api, path="/messages/count_tokens", tools=[{"name": "a"}])


async def test_the_query_has_no_effect(api):
    assert (await post(api, "/messages?beta=true", max_tokens=5)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_before_its_first_token_has_a_status(api, stream):
    async def failing(_request):
        raise Overloaded("try later", retry_after_seconds=3.0)
        yield

    api.source.stream = failing
    response = await post(api, stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_a_stream_that_fails_ends_with_an_error(api):
    async def failing(_request):
        yield TokenEvent(())
        raise GenerationFailed("no token could be sampled")

    api.source.stream = failing
    *_, last = await events(api)
    details = {"error_code": "generation_failed"}
    assert last["error"] == {"type": "api_error", "message": "no token could be sampled", "details": details}
    assert last["request_id"]


async def test_unknown_methods_and_bodies_have_errors_of_the_form(api):
    async with httpx.AsyncClient(base_url=api.url) as http:
        for response, status in (
            (await http.get("/messages"), 405),
            (await http.post("/messages", content="{}"), 415),
            (await http.post("/messages", json=[]), 400),
            (await http.post("/messages", json={}, headers={"x-request-id": "no id"}), 400),
        ):
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"
            assert response.json()["request_id"] == response.headers["request-id"]


async def test_large_bodies_are_read_in_another_process(api):
    long = "x" * 40_000
    await answer(api, messages=[{"role": "user", "content": long}])
    assert long in api.source.prompt
    body = json.dumps({"messages": USER, "max_tokens": 5, "tools": [WEATHER], "speed": "fast"}).encode()
    for read in (read_message, read_count):
        found = read(byte_model(1 << 16), body)
        assert pickle.loads(pickle.dumps(found)) == found


def test_the_parts_of_a_prompt_add_up_to_its_tokens():
    usage = usage_of(Usage(100, 5, 64, cache_write_tokens=32))
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 64, 32)
