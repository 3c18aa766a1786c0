"""Anthropic's Python client against the real server."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from pydantic import BaseModel

from kvferry.core.errors import Unavailable
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.registry import CallFormat

USER: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Returns the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = written(CallFormat.HERMES, [("get_weather", {"city": "Oslo"})])


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as running:
        running.source.answers = ["It is cold."]
        yield running


@pytest.fixture
async def client(api) -> AsyncIterator[anthropic.AsyncAnthropic]:
    base = api.url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as opened:
        yield opened


async def test_a_message(api, client):
    message = await client.messages.create(model="bytes", max_tokens=50, messages=USER, system="Be kind.")
    assert [block.text for block in message.content] == ["It is cold."]
    assert (message.stop_reason, message.role, message.type) == ("end_turn", "assistant", "message")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(api.source.prompt), 11)
    assert message.usage.cache_creation_input_tokens == message.usage.cache_read_input_tokens == 0
    assert message._request_id is not None
    assert message.id == f"msg_{message._request_id}"


async def test_a_stream_is_the_same_message(api, client):
    api.source.answers = [f"<think>hm</think>Let me look.{CALL}{CALL}"]
    fields: Any = {"model": "bytes", "max_tokens": 500, "messages": USER, "tools": [WEATHER]}
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == "Let me look."
    kinds = [block.type for block in whole.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    parts = []
    for message in (whole, final):
        shown = message.model_dump(include={"content", "stop_reason", "stop_sequence", "usage", "role", "model"})
        for block in shown["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
        parts.append(shown)
    assert parts[0] == parts[1]


async def test_a_call_and_its_result(api, client):
    api.source.answers = [f"<think>hm</think>{CALL}"]
    asked: Any = {"model": "bytes", "max_tokens": 500, "tools": [WEATHER]}
    first = await client.messages.create(messages=USER, **asked)
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "-3 °C"}
    api.source.answers = ["It is cold."]
    messages: Any = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await client.messages.create(messages=messages, **asked)
    assert second.content[0].text == "It is cold."
    assert "<tool_response>\n-3 °C\n</tool_response>" in api.source.prompt


async def test_the_client_runs_the_tools(api, client):
    asked = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Returns the weather.

        Args:
            city: name of the city.
        """
        asked.append(city)
        api.source.answers = ["It is cold."]
        return "-3 °C"

    api.source.answers = [CALL]
    runner = client.beta.messages.tool_runner(model="bytes", max_tokens=500, messages=USER, tools=[get_weather])
    last = await runner.until_done()
    assert asked == ["Oslo"]
    assert last.content[0].text == "It is cold."


async def test_an_output_with_a_schema(api, client):
    class City(BaseModel):
        name: str

    api.source.answers = ['{"name": "Oslo"}']
    message = await client.messages.parse(model="bytes", max_tokens=50, messages=USER, output_format=City)
    assert message.parsed_output == City(name="Oslo")
    constraint = api.source.requests[-1].sampling.constraint
    assert json.loads(constraint.source)["properties"].keys() == {"name"}


async def test_tokens_are_counted(api, client):
    counted = await client.messages.count_tokens(model="bytes", messages=USER, tools=[WEATHER])
    await client.messages.create(model="bytes", max_tokens=50, messages=USER, tools=[WEATHER])
    assert counted.input_tokens == len(api.source.prompt)


async def test_models_are_listed(client):
    assert [model.id async for model in client.models.list()] == ["bytes"]


async def test_a_body_like_that_of_an_agent_is_accepted(api, client):
    raw = await client.beta.messages.with_raw_response.create(
        model="bytes",
        max_tokens=20_000,
        system=[
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;",
            },
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>x</system-reminder>"},
                    {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}},
                ],
            }
        ],
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    )
    assert (await raw.parse()).content[0].text == "It is cold."
    assert "cch" not in api.source.prompt
    assert set(raw.headers["kvferry-ignored"].split(", ")) == {
        "context_management",
        "tools.web_search_20250305",
    }


async def test_errors_are_those_of_the_client(api, client):
    asked: Any = {"max_tokens": 50, "messages": USER}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="claude", **asked)
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 65535 maximum"):
        await client.messages.create(model="bytes", max_tokens=5, messages=[{"role": "user", "content": "x" * 70_000}])

    async def failing(_request):
        yield TokenEvent(())
        raise Unavailable("the worker is gone")

    api.source.stream = failing
    with pytest.raises(anthropic.InternalServerError):
        await client.messages.create(model="bytes", **asked)
    with pytest.raises(anthropic.APIStatusError, match="the worker is gone"):
        async for _ in await client.messages.create(model="bytes", stream=True, **asked):
            pass
