"""Calls of functions over real sockets with OpenAI's client: call, result, answer, for each format of calls."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.constraint import ConstraintKind
from kvferry.core.sampling import FinishReason
from kvferry.text.answers.registry import CallFormat

pytestmark = pytest.mark.asyncio(loop_scope="module")

Calls = list[tuple[str, dict[str, Any]]]
FORMATS = list(CallFormat)


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


TEXT = {"type": "string"}
TOOLS = [
    tool("get_weather", city=TEXT),
    tool("add", a={"type": "number"}, b={"type": "number"}),
    tool("now"),
    tool("send-mail", to={"type": "array", "items": TEXT}, body={"type": "object"}),
]


@dataclass(frozen=True)
class Scenario:
    """An answer with calls, the results of the calls, and the next answer."""

    calls: Calls
    results: list[str]
    answer: str = "Done."
    content: str = ""
    bytes_per_step: int = 3
    extra: dict[str, Any] = field(default_factory=dict)


SCENARIOS = [
    Scenario([("get_weather", {"city": "Oslo"})], ["-3 °C"], "It is cold in Oslo."),
    Scenario([("get_weather", {"city": "Oslo"})], ["-3 °C"], content="Let me look."),
    Scenario([("get_weather", {"city": "Oslo"})], ["-3 °C"], bytes_per_step=1),
    Scenario([("get_weather", {"city": "Oslo"})], ["-3 °C"], bytes_per_step=10_000),
    Scenario([("now", {})], ["12:00"]),
    Scenario([("now", {})], [""]),
    Scenario([("now", {}), ("now", {})], ["12:00", "12:01"], bytes_per_step=1),
    Scenario([("add", {"a": 1, "b": 2.5})], ["3.5"], "3.5"),
    Scenario([("add", {"a": -1e30, "b": 0})], ["-1e30"]),
    Scenario([("get_weather", {"city": "東京 🗼"})], ["晴れ"], "晴れです。", content="はい。"),
    Scenario([("get_weather", {"city": 'quote " backslash \\ newline \n tab \t'})], ["?"]),
    Scenario([("get_weather", {"city": "it's </tool_call> [TOOL_CALLS] ; }"})], ["?"]),
    Scenario([("get_weather", {"city": "a"}), ("get_weather", {"city": "b"})], ["1", "2"]),
    Scenario([("get_weather", {"city": "a"}), ("add", {"a": 1, "b": 2}), ("now", {})], ["1", "2", "3"]),
    Scenario([("send-mail", {"to": ["x", "y"], "body": {"text": ["a", {"b": None}], "html": True}})], ["sent"]),
    Scenario([("send-mail", {"to": [], "body": {}})], ['{"error": "no recipient"}'], "That failed."),
    Scenario([("now", {"zone": None, "utc": False})], ["12:00"]),
    Scenario([("now", {})], ["result with <tool_call>{} in it"]),
    Scenario([("add", {"a": 0, "b": 0})] * 8, [str(n) for n in range(8)]),
    Scenario([("get_weather", {"city": "x" * 5000})], ["long"], "short", bytes_per_step=100),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=FORMATS)
async def api(request: pytest.FixtureRequest) -> AsyncIterator[tuple[CallFormat, AnsweringApi, openai.AsyncOpenAI]]:
    async with (
        answering_api(request.param) as running,
        openai.AsyncOpenAI(base_url=running.url, api_key="any", max_retries=0) as client,
    ):
        yield request.param, running, client


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    answer = await client.chat.completions.create(model="bytes", **fields)
    return answer.choices[0]


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    """Assemble the deltas of a stream as OpenAI's documentation does."""
    stream = await client.chat.completions.create(model="bytes", stream=True, **fields)
    content, calls, finish, role = "", [], None, None
    async for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        role = choice.delta.role or role
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            if delta.index == len(calls):
                assert (delta.type, bool(delta.id), bool(delta.function.name)) == ("function", True, True)
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            else:
                assert (delta.id, delta.type, delta.function.name) == (None, None, None)
            calls[delta.index]["arguments"] += delta.function.arguments
    assert role == "assistant"
    return finish, content, calls


@pytest.mark.parametrize("number", range(len(SCENARIOS)))
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_call_result_answer(api, number, is_streamed):
    call_format, running, client = api
    scenario = SCENARIOS[number]
    running.source.bytes_per_step = scenario.bytes_per_step
    tag = "<|python_tag|>" if call_format is CallFormat.LLAMA3_JSON and scenario.content else ""
    running.source.answers = (scenario.content + tag + written(call_format, scenario.calls, has_types=True),)
    messages: list[Any] = [{"role": "user", "content": "Please."}]
    if is_streamed:
        finish, content, calls = await streamed(client, messages=messages, tools=TOOLS)
        assistant = {
            "role": "assistant",
            "content": content or None,
            "tool_calls": [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls
            ],
        }
    else:
        choice = await whole(client, messages=messages, tools=TOOLS)
        finish, content = choice.finish_reason, choice.message.content or ""
        assert choice.message.content is None or scenario.content
        assistant = choice.message.model_dump(exclude={"function_call", "annotations", "audio", "refusal"})
        calls = [{"id": c.id, **c.function.model_dump()} for c in choice.message.tool_calls]
    assert finish == "tool_calls"
    assert content == scenario.content
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == scenario.calls
    assert len({c["id"] for c in calls}) == len(calls)

    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": result}
        for c, result in zip(calls, scenario.results, strict=True)
    ]
    running.source.answers = (scenario.answer,)
    messages += [assistant, *results]
    if is_streamed:
        assert await streamed(client, messages=messages, tools=TOOLS) == ("stop", scenario.answer, [])
    else:
        choice = await whole(client, messages=messages, tools=TOOLS)
        assert (choice.finish_reason, choice.message.content) == ("stop", scenario.answer)
        assert choice.message.tool_calls is None
    for name, arguments in scenario.calls:
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        assert f"<tool_call>\n{call}\n</tool_call>" in running.source.prompt
    for result in scenario.results:
        assert f"<tool_response>\n{result}\n</tool_response>" in running.source.prompt


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hermes() -> AsyncIterator[tuple[AnsweringApi, openai.AsyncOpenAI]]:
    async with (
        answering_api(CallFormat.HERMES, has_reasoning=True) as running,
        openai.AsyncOpenAI(base_url=running.url, api_key="any", max_retries=0) as client,
    ):
        yield running, client


USER: list[Any] = [{"role": "user", "content": "Please."}]
CALL = '<tool_call>{"name": "now"}</tool_call>'


async def test_samples_have_calls_of_their_own(hermes):
    running, client = hermes
    running.source.answers = (CALL, "plain", f"both {CALL}{CALL}")
    answer = await client.chat.completions.create(model="bytes", messages=USER, tools=TOOLS, n=3)
    found = [(c.finish_reason, c.message.content, len(c.message.tool_calls or ())) for c in answer.choices]
    assert found == [("tool_calls", None, 1), ("stop", "plain", 0), ("tool_calls", "both", 2)]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 3
    stream = await client.chat.completions.create(model="bytes", messages=USER, tools=TOOLS, n=3, stream=True)
    finishes = {}
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert finishes == {0: "tool_calls", 1: "stop", 2: "tool_calls"}


async def test_one_call_if_calls_are_not_parallel(hermes):
    running, client = hermes
    running.source.answers = (CALL + CALL,)
    answer = await client.chat.completions.create(model="bytes", messages=USER, tools=TOOLS, parallel_tool_calls=False)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == ("tool_calls", None, 1)
    assert answer.usage.completion_tokens <= len(CALL), "the answer ends at the end of the call"
    assert len((await streamed(client, messages=USER, tools=TOOLS, parallel_tool_calls=False))[2]) == 1


async def test_calls_are_not_parsed_without_tools(hermes):
    running, client = hermes
    running.source.answers = (CALL,)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = await whole(client, messages=USER, **fields)
        assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
        assert "get_weather" not in running.source.prompt


async def test_a_cut_off_answer_has_finish_reason_length(hermes):
    running, client = hermes
    running.source.answers = ('<tool_call>{"name": "add", "arguments": {"a": 1',)
    running.source.finish = FinishReason.LENGTH
    try:
        choice = await whole(client, messages=USER, tools=TOOLS)
    finally:
        running.source.finish = FinishReason.STOP
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", '{"a": 1')


async def test_tools_are_in_the_prompt(hermes):
    running, client = hermes
    running.source.answers = ("no",)
    await whole(client, messages=[{"role": "system", "content": "Be brief."}, *USER], tools=TOOLS)
    assert running.source.prompt.startswith("<system>Be brief.\n\nYou can call functions.")
    assert all(name in running.source.prompt for name in ("get_weather", "Does add.", '"items": {"type": "string"}'))


async def test_log_probabilities_cover_every_token(hermes):
    running, client = hermes
    running.source.answers = (f"a{CALL}",)
    choice = await whole(client, messages=USER, tools=TOOLS, logprobs=True)
    assert len(choice.logprobs.content) == len(running.source.answers[0])
    stream = await client.chat.completions.create(model="bytes", messages=USER, tools=TOOLS, logprobs=True, stream=True)
    count = 0
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        count += len(logprobs.content) if logprobs else 0
    assert count == len(running.source.answers[0])


async def test_a_stop_string_ends_an_answer_before_it_is_split(hermes):
    running, client = hermes
    running.source.answers = (f"before STOP {CALL}",)
    choice = await whole(client, messages=USER, tools=TOOLS, stop="STOP")
    assert (choice.message.content, choice.message.tool_calls) == ("before ", None)


async def test_reasoning_is_apart_from_content(hermes):
    running, client = hermes
    running.source.answers = (f"<think>\nhm\n</think>\n\nyes{CALL}",)
    choice = await whole(client, messages=USER, tools=TOOLS)
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "yes")
    assert len(choice.message.tool_calls) == 1
    stream = await client.chat.completions.create(model="bytes", messages=USER, stream=True)
    reasoning = content = ""
    async for chunk in stream:
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == ("hm", f"yes{CALL}")
    messages = [*USER, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, *USER]
    await whole(client, messages=messages)


@pytest.mark.parametrize(
    ("choice", "names", "is_single"),
    [
        ("required", ["get_weather", "add", "now", "send-mail"], False),
        ({"type": "function", "function": {"name": "add"}}, ["add"], True),
    ],
)
async def test_required_calls_are_constrained(hermes, choice, names, is_single):
    running, client = hermes
    running.source.answers = (CALL,)
    await whole(client, messages=USER, tools=TOOLS, tool_choice=choice)
    constraint = running.source.requests[-1].sampling.constraint
    assert constraint.kind is ConstraintKind.GRAMMAR
    assert [name for name in ("get_weather", "add", "now", "send-mail") if name in constraint.source] == names
    assert ("{0,15}" not in constraint.source) == is_single
    await whole(client, messages=USER, tools=TOOLS)
    assert running.source.requests[-1].sampling.constraint is None


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "12:00"}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function' or 'custom', not 'web_search'"),
        ({"tools": [{"type": ["custom"]}]}, "tools.0.type", "must be 'function' or 'custom', not a JSON array"),
        ({"tools": [{"name": "f"}]}, "tools.0.type", "is missing"),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            "tool_choice.type",
            "must be 'function', 'custom' or 'allowed_tools', not 'tool'",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
        ({"tools": [named("a" * 65)]}, "tools.0.function.name", "64"),
        ({"tools": [named("")]}, "tools.0.function.name", "1 to"),
        ({"tools": [named("f"), named("f")]}, "tools.1.function.name", "earlier"),
        ({"tools": [named(f"f{n}") for n in range(129)]}, "tools", "129 items; at most 128"),
        ({"tools": [tool("f", a=deep(40))]}, "tools.0.function.parameters", "more than 32 nested objects and arrays"),
        ({"tools": [tool("f", a={"description": "x" * (1 << 17)})]}, "tools", "characters"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters.type",
            "type object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
            "",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 20_000}}]},
            "tools.0.function.description",
            "16384",
        ),
        ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice", "not in tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "unknown"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": named("f")}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
        ({"messages": [*USER, RESULT]}, "messages.1.tool_call_id", "does not match"),
        (
            {"messages": [*USER, ASSISTANT, {**RESULT, "tool_call_id": "y"}]},
            "messages.2.tool_call_id",
            "does not match",
        ),
        ({"messages": [*USER, ASSISTANT, *USER]}, "messages", "'x'"),
        ({"messages": [*USER, ASSISTANT]}, "messages", "have no result"),
        ({"messages": [*USER, ASSISTANT, RESULT, RESULT]}, "messages.3.tool_call_id", "does not match"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id", "missing"),
        ({"messages": [{**ASSISTANT, "role": "user"}]}, "messages.0.tool_calls", "role assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "missing"),
        ({"messages": [{**ASSISTANT, "tool_calls": ASSISTANT["tool_calls"] * 129}]}, "messages.0.tool_calls", ""),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "missing",
        ),
    ],
)
async def test_bad_requests_are_refused_by_name(hermes, change, param, words):
    running, _ = hermes
    running.source.answers = ("x",)
    async with httpx.AsyncClient() as client:
        body = {"model": "bytes", "messages": USER, **change}
        response = await client.post(f"{running.url}/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_arguments_in_the_history_need_not_be_json(hermes):
    running, client = hermes
    running.source.answers = ("ok",)
    cut = {"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"a": 1'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [cut]}, RESULT]
    assert (await whole(client, messages=messages, tools=TOOLS)).message.content == "ok"


@pytest.mark.parametrize("bytes_per_step", [1, 3, 10_000])
@pytest.mark.parametrize("call_format", FORMATS)
async def test_stop_strings_end_the_text_and_no_call(call_format: CallFormat, bytes_per_step: int) -> None:
    """A call that a stop string cut would be run with wrong arguments."""
    async with (
        answering_api(call_format) as api,
        openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as client,
    ):
        api.source.bytes_per_step = bytes_per_step
        api.source.answers = [written(call_format, [("get_weather", {"city": "Oslo"})], has_types=True)]
        messages: Any = [{"role": "user", "content": "Weather?"}]
        for stop in ("sl", "city", "Oslo"):
            answer = await client.chat.completions.create(model="bytes", messages=messages, tools=TOOLS, stop=stop)
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls", stop
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
        api.source.answers = ["Let me look. It is cold."]
        answer = await client.chat.completions.create(model="bytes", messages=messages, tools=TOOLS, stop="look")
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "Let me ")
