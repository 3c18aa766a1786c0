"""Fields of chat and text completions of newer clients: usage of each chunk, reasoning, token ids, ends of prompts."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.constraint import ConstraintKind
from kvferry.gateway.http.openai.schema import ChatRequest, parse
from kvferry.text.answers.registry import CallFormat

HI = {"role": "user", "content": "hi"}
THOUGHT = "<think>abc</think>yes"
REASONING_TOKENS = len(">abc</think>")
"""A token is a byte: those from the end of the opening mark to the end of the closing mark."""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("one", "two", "three")
]


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES, has_reasoning=True) as running:
        running.source.answers = ("yes",)
        yield running


@pytest.fixture
async def http(api: AnsweringApi) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as client:
        yield client


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("chat/completions", json={"messages": [HI], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def chunks(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await http.post(path, json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


RUNNING = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", {"messages": [HI]}), ("completions", {"prompt": "hi"})]
)
async def test_each_chunk_has_the_usage_so_far(http, api, path, prompt):
    api.source.answers = ("abcdefgh",)
    found = await chunks(http, path, stream_options=RUNNING, **prompt)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert len(set(counts)) > 2
    for chunk in found:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == found[-1]["usage"]["prompt_tokens"] > 0
    assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


async def test_each_choice_has_its_own_running_usage(http, api):
    api.source.answers = ("abc", "defghi")
    found = await chunks(http, "chat/completions", messages=[HI], n=2, stream_options=RUNNING)
    last = {chunk["choices"][0]["index"]: chunk["usage"]["completion_tokens"] for chunk in found if chunk["choices"]}
    assert last == {0: 3, 1: 6}
    assert found[-1]["usage"]["completion_tokens"] == 9


async def test_running_usage_needs_the_usage(http):
    found = await chunks(http, "chat/completions", messages=[HI], stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in found)


async def test_reasoning_has_both_names(http, api):
    api.source.answers = (THOUGHT,)
    message = (await chat(http))["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("abc", "abc", "yes")
    found = await chunks(http, "chat/completions", messages=[HI])
    for name in ("reasoning", "reasoning_content"):
        assert "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in found) == "abc"


@pytest.mark.parametrize("bytes_per_step", [1, 3, 100])
async def test_reasoning_tokens_are_counted(http, api, bytes_per_step):
    api.source.answers, api.source.bytes_per_step = (THOUGHT,), bytes_per_step
    usage = (await chat(http))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": REASONING_TOKENS}
    streamed = await chunks(http, "chat/completions", messages=[HI], stream_options={"include_usage": True})
    assert streamed[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    response = await http.post("responses", json={"input": "hi"})
    details = response.json()["usage"]["output_tokens_details"]
    assert details == usage["completion_tokens_details"]
    api.source.answers = ("no thought",)
    assert (await chat(http))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_can_be_left_out(http, api):
    api.source.answers = (THOUGHT,)
    answer = await chat(http, include_reasoning=False)
    message = answer["choices"][0]["message"]
    assert message["content"] == "yes"
    assert not {"reasoning", "reasoning_content"} & message.keys()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    found = await chunks(http, "chat/completions", messages=[HI], include_reasoning=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert not any({"reasoning", "reasoning_content"} & delta.keys() for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_an_earlier_answer_has_its_reasoning_under_any_name(name):
    messages = [HI, {"role": "assistant", "content": "a", name: "why"}, HI]
    read = parse(ChatRequest, json.dumps({"messages": messages}).encode())
    assert read.template_inputs()[1] == {"role": "assistant", "content": "a", "reasoning_content": "why"}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "minimal"}}, {"reasoning_effort": "minimal"}),
        ({"reasoning_effort": "low", "reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"documents": [{"title": "t", "text": "d"}]}, {"documents": [{"title": "t", "text": "d"}]}),
    ],
)
async def test_fields_are_variables_of_the_chat_template(http, api, fields, variables):
    await chat(http, **fields)
    assert api.source.prompt == f"<user>hi{json.dumps(variables)}<assistant>"


async def test_the_effort_of_a_response_is_a_variable_of_the_chat_template(http, api):
    answer = await http.post("responses", json={"input": "hi", "reasoning": {"effort": "xhigh", "summary": "auto"}})
    assert answer.headers["kvferry-ignored"] == "reasoning.summary"
    assert api.source.prompt == f"<user>hi{json.dumps({'reasoning_effort': 'xhigh'})}<assistant>"


async def test_a_message_has_the_name_of_its_author(http, api):
    for role in ("user", "system", "assistant"):
        await chat(http, messages=[{"role": role, "content": "a", "name": "alice"}, HI])
        assert api.source.prompt == f"<{role} alice>a<user>hi<assistant>"


async def test_a_refusal_is_the_text_of_its_message(http, api):
    part = {"type": "refusal", "refusal": "No."}
    for message in ({"content": None, "refusal": "No."}, {"content": [part]}, {"content": "No.", "refusal": "x"}):
        await chat(http, messages=[HI, {"role": "assistant", **message}, HI])
        assert api.source.prompt == "<user>hi<assistant>No.<user>hi<assistant>"


async def test_the_end_of_the_prompt_is_chosen(http, api):
    messages = [HI, {"role": "assistant", "content": "It is"}]
    await chat(http, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert api.source.prompt == "<user>hi<assistant>It is"
    await chat(http, messages=messages, continue_final_message=True)
    assert api.source.prompt == "<user>hi<assistant>It is"
    await chat(http, add_generation_prompt=False)
    assert api.source.prompt == "<user>hi"


async def test_token_ids_are_returned(http, api):
    api.source.answers = (THOUGHT,)
    answer = await chat(http, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]) == b"<user>hi<assistant>"
    assert bytes(answer["choices"][0]["token_ids"]).decode() == THOUGHT
    found = await chunks(http, "chat/completions", messages=[HI], return_token_ids=True)
    assert bytes(found[0]["prompt_token_ids"]) == b"<user>hi<assistant>"
    assert all("prompt_token_ids" not in chunk for chunk in found[1:])
    assert bytes(token for chunk in found for token in chunk["choices"][0].get("token_ids", ())).decode() == THOUGHT
    assert "token_ids" not in (await chat(http))["choices"][0]


async def test_token_ids_of_completions_are_returned(http, api):
    api.source.answers = ("abcé",)
    body = {"prompt": ["hi", "ho"], "return_token_ids": True, "echo": True}
    answer = (await http.post("completions", json=body)).json()
    assert [bytes(choice["prompt_token_ids"][1:]) for choice in answer["choices"]] == [b"hi", b"ho"]
    assert [bytes(choice["token_ids"]).decode() for choice in answer["choices"]] == ["abcé"] * 2
    found = await chunks(http, "completions", **body)
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        assert choices[0]["prompt_token_ids"] == answer["choices"][index]["prompt_token_ids"]
        assert bytes(token for choice in choices for token in choice["token_ids"]).decode() == "abcé"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_allowed_tools_are_called(http, api):
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    for name, is_called in (("one", True), ("two", False)):
        api.source.answers = (call % name,)
        answer = await chat(http, tools=TOOLS, tool_choice=allowed("auto", "one", "three"))
        assert bool(answer["choices"][0]["message"].get("tool_calls")) is is_called
    assert '"two"' in api.source.prompt
    assert api.source.requests[-1].sampling.constraint is None


async def test_a_call_of_an_allowed_tool_can_be_required(http, api):
    api.source.answers = ('<tool_call>\n{"name": "one", "arguments": {}}\n</tool_call>',)
    body = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "one"}]}
    tools = [{"type": "function", "name": tool["function"]["name"]} for tool in TOOLS]  # type: ignore[index]
    for path, fields in (
        ("chat/completions", {"messages": [HI], "tools": TOOLS, "tool_choice": allowed("required", "one")}),
        ("responses", {"input": "hi", "tools": tools, "tool_choice": body}),
    ):
        answer = await http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        constraint = api.source.requests[-1].sampling.constraint
        assert constraint is not None
        assert constraint.kind is ConstraintKind.GRAMMAR
        assert '"one' in constraint.source
        assert "two" not in constraint.source
    assert answer.json()["tool_choice"] == body
    wrong = await http.post(
        "chat/completions", json={"messages": [HI], "tools": TOOLS, "tool_choice": allowed("auto", "x")}
    )
    assert (
        wrong.json()["error"]["message"]
        == "tool_choice is 'x', which is not in tools; use the name of one of the tools"
    )


async def test_openais_client_reads_the_new_fields(api):
    api.source.answers = (THOUGHT,)
    async with openai.AsyncOpenAI(base_url=api.url, api_key="none") as client:
        answer = await client.chat.completions.create(
            model="bytes",
            messages=[HI],
            reasoning_effort="low",
            prompt_cache_key="k",  # type: ignore[list-item]
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens


async def test_reasoning_tokens_of_channels_are_counted():
    parts = ("<|channel|>analysis<|message|>", "abc<|end|>", "<|start|>assistant<|channel|>final<|message|>yes")
    for bytes_per_step in (1, 4, 1000):
        async with answering_api(CallFormat.HARMONY, has_reasoning=True) as api:
            api.source.answers, api.source.bytes_per_step = ("".join(parts),), bytes_per_step
            async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
                answer = await chat(http)
        assert answer["choices"][0]["message"]["reasoning"] == "abc"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1 + len(parts[1])}


@pytest.mark.parametrize("fields", [{"thinking_token_budget": 3}, {"reasoning": {"max_tokens": 3}}])
async def test_a_budget_of_the_reasoning_is_refused_where_its_marks_are_text(http, fields):
    answer = await http.post("chat/completions", json={"messages": [HI], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"


def test_a_budget_of_the_reasoning_has_two_names():
    for fields in ({"thinking_token_budget": 3}, {"reasoning": {"max_tokens": 3}}):
        assert parse(ChatRequest, json.dumps({"messages": [HI], **fields}).encode()).max_reasoning_tokens() == 3
    assert parse(ChatRequest, json.dumps({"messages": [HI]}).encode()).max_reasoning_tokens() is None
