"""Summaries of conversations: the prompt, the answer, and conversations that continue from a summary."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pytest
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.responses.carrier import MAX_CARRIED_CHARS, Carried, CarrierKey
from kvferry.gateway.http.responses.items import (
    SUMMARY_TITLE,
    Compaction,
    InputMessage,
    ReasoningInput,
    messages_of,
    with_carried,
)
from kvferry.text.answers.registry import CallFormat

KEY = CarrierKey.of(b"a secret of the pool", "tenant-a")
LOOK: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CONVERSATION: list[Any] = [
    {"role": "user", "content": "Where is my bag?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "under the bed"},
    {"role": "assistant", "content": "Under your bed."},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES) as running:
        running.source.answers = ["The bag is under the bed."]
        yield running


@pytest.fixture
async def client(api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as opened:
        yield opened


async def post(api: AnsweringApi, path: str = "/compact", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=api.url) as http:
        return await http.post(f"/responses{path}", json=body)


async def test_the_answer_has_the_messages_of_the_user_and_a_summary(api, client):
    answer = await client.responses.compact(model="bytes", input=CONVERSATION, instructions="Be kind.")
    assert answer.object == "response.compaction"
    *users, summary = answer.output
    assert [item.content[0].text for item in users] == ["Where is my bag?", "Thanks."]
    assert {(item.type, item.role, item.status) for item in users} == {("message", "user", "completed")}
    assert summary.type == "compaction"
    assert answer.usage.input_tokens == len(api.source.prompt)
    assert answer.usage.output_tokens == len("The bag is under the bed.")


async def test_the_prompt_begins_as_the_one_of_the_conversation(api, client):
    fields: Any = {"model": "bytes", "input": CONVERSATION, "instructions": "Be kind.", "tools": [LOOK]}
    await client.responses.create(**fields)
    before = api.source.prompt
    assert (await post(api, **fields)).status_code == 200
    assert api.source.prompt.startswith(before.removesuffix("<assistant>"))
    assert api.source.prompt.endswith("as plain text.<assistant>")


async def test_a_conversation_continues_from_its_summary(api, client):
    compacted = await client.responses.compact(model="bytes", input=CONVERSATION)
    items: Any = [item.to_dict(warnings=False) for item in compacted.output]
    await client.responses.create(model="bytes", input=[*items, {"role": "user", "content": "And my hat?"}])
    assert api.source.prompt == (
        "<user>Where is my bag?\n\nThanks.\n\nSummary of the conversation so far:\n\nThe bag is under the bed.\n\n"
        "And my hat?<assistant>"
    )
    answered = {"role": "assistant", "content": "Here."}
    await client.responses.create(model="bytes", input=[items[-1], answered, {"role": "user", "content": "Hm?"}])
    assert api.source.prompt == (
        "<user>Summary of the conversation so far:\n\nThe bag is under the bed.<assistant>Here.<user>Hm?<assistant>"
    )


async def test_a_summary_is_summarized_again(api, client):
    compacted = await client.responses.compact(model="bytes", input=CONVERSATION)
    items: Any = [item.to_dict(warnings=False) for item in compacted.output]
    api.source.answers = ["All is found."]
    again = await client.responses.compact(model="bytes", input=[*items, {"role": "user", "content": "And my hat?"}])
    assert "The bag is under the bed." in api.source.prompt
    assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]


async def test_a_stored_conversation_is_summarized(api, client):
    first = await client.responses.create(model="bytes", input="Where is my bag?")
    answer = await client.responses.compact(model="bytes", previous_response_id=first.id)
    assert api.source.prompt.startswith("<user>Where is my bag?<assistant>The bag is under the bed.<user>Summarize")
    assert [item.type for item in answer.output] == ["message", "compaction"]
    following = await client.responses.create(
        model="bytes", input=[item.to_dict(warnings=False) for item in answer.output]
    )  # type: ignore[misc]
    assert following.status == "completed"


async def test_a_model_that_calls_a_tool_is_asked_without_tools(api):
    calling = written(CallFormat.HERMES, [("look", {})])
    answers = iter([calling, "The bag is under the bed."])
    give = api.source.stream

    async def stream(request: Any) -> AsyncIterator[Any]:
        api.source.answers = [next(answers)]
        async for event in give(request):
            yield event

    api.source.stream = stream
    answer = await post(api, input=CONVERSATION, tools=[LOOK])
    assert answer.json()["output"][-1]["type"] == "compaction"
    first, second = api.source.requests
    assert b"look" in bytes(first.token_ids).split(b"Where")[0]
    assert b"look" not in bytes(second.token_ids).split(b"Where")[0]


async def test_an_empty_summary_is_an_error(api):
    api.source.answers = ["  "]
    answer = await post(api, input="hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")
    assert "raise max_output_tokens" in answer.json()["error"]["message"]


async def test_a_long_conversation_loses_its_oldest_turns(api):
    turns = [{"role": role, "content": f"{n:02}" + "x" * 5000} for n in range(9) for role in ("user", "assistant")]
    assert (await post(api, input=turns)).status_code == 200
    assert len(api.source.prompt) <= (1 << 16) - api.source.requests[-1].sampling.max_tokens + 1
    assert "08x" in api.source.prompt
    assert "00x" not in api.source.prompt


async def test_a_summary_has_a_bounded_length(api):
    api.source.finish = FinishReason.LENGTH
    answer = await post(api, input="hello")
    assert api.source.requests[-1].sampling.max_tokens == 4096
    assert answer.json()["output"][-1]["type"] == "compaction", "a summary that was cut is still one"
    await post(api, input="hello", max_output_tokens=7)
    assert api.source.requests[-1].sampling.max_tokens == 7


@pytest.mark.parametrize("carrier", ["", "gAAAA", KEY.seal("forged", Carried.SUMMARY)])
async def test_a_foreign_summary_is_refused(api, carrier):
    item = {"type": "compaction", "encrypted_content": carrier}
    for path in ("", "/compact", "/input_tokens"):
        answer = await post(api, path, input=[{"role": "user", "content": "hi"}, item])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input.1.encrypted_content"
        assert "send the conversation's items" in answer.json()["error"]["message"]


def test_a_carrier_of_reasoning_is_no_summary():
    assert KEY.opened(KEY.seal("a thought"), Carried.SUMMARY) is None
    assert KEY.opened(KEY.seal("a summary", Carried.SUMMARY)) is None
    assert KEY.opened(KEY.seal("a summary", Carried.SUMMARY), Carried.SUMMARY) == "a summary"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "hi", "stream": True}, "stream"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "model": "other"}, "model"),
        ({"input": [{"type": "image"}]}, "input.0.type"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_a_bad_request_is_refused_by_name(api, body, field):
    answer = await post(api, **body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == field


async def test_fields_of_agents_have_no_effect_and_are_named(api):
    answer = await post(api, input="hi", tool_choice="auto", parallel_tool_calls=True, text={"verbosity": "low"})
    assert answer.status_code == 200
    assert answer.headers["kvferry-ignored"] == "tool_choice, parallel_tool_calls, text"


def test_only_the_messages_of_the_user_around_a_summary_become_one():
    def said(text: str, role: Literal["user", "assistant"] = "user") -> InputMessage:
        return InputMessage(role=role, content=text)

    summaries = [Compaction(type="compaction", encrypted_content=text) for text in ("S", "T")]
    items = [said("a"), said("b"), said("c", "assistant"), said("d"), *summaries, said("e"), said("f", "assistant")]
    messages, places = messages_of([*items, said("g"), said("h")], list("0123456789"))
    texts = [message["content"] for message in messages]
    assert texts == ["a", "b", "c", f"d\n\n{SUMMARY_TITLE}S\n\n{SUMMARY_TITLE}T\n\ne", "f", "g", "h"]
    assert places == ["0", "1", "2", "3", "7", "8", "9"]


@pytest.mark.parametrize("kind", list(Carried))
def test_small_carriers_with_much_text_are_refused(kind):
    key = CarrierKey.of(b"a secret of the pool", "tenant-a")
    size = MAX_CARRIED_CHARS // 4
    carrier = key.seal("a" * size, kind)
    assert len(carrier) < 8192
    item = (
        Compaction(type="compaction", encrypted_content=carrier)
        if kind is Carried.SUMMARY
        else ReasoningInput(type="reasoning", encrypted_content=carrier)
    )
    found, _ = with_carried([item] * 4, ["x"] * 4, key)
    assert len(messages_of(found, ["x"] * 4)[0]) == 1
    with pytest.raises(InvalidRequest, match="send fewer items") as caught:
        with_carried([item] * 5, [f"input.{number}" for number in range(5)], key)
    assert caught.value.field == "input.4.encrypted_content"
