"""Responses in the background with OpenAI's client: polled, cancelled, streamed and resumed, bounded, stopped."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.waiting import eventually

from kvferry.core.errors import Unavailable
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.responses import background
from kvferry.gateway.http.responses.memory_store import MemoryResponses
from kvferry.text.answers.registry import CallFormat


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES) as running:
        running.source.answers = ["It is cold."]
        yield running
    assert running.source.num_open == 0


@pytest.fixture
async def client(api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as opened:
        yield opened


async def begin(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return await client.responses.create(model="bytes", input="hello", background=True, **more)


async def polled(client: openai.AsyncOpenAI, name: str, until: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(10):
        found = await client.responses.retrieve(name)
        while not until(found):
            found = await client.responses.retrieve(name)
    return found


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    return await polled(client, name, lambda found: found.status not in ("queued", "in_progress"))


async def test_a_response_is_polled_until_it_is_complete(api, client):
    api.source.held = asyncio.Event()
    begun = await begin(client)
    assert (begun.status, begun.output, begun.background) == ("queued", [], True)
    found = await polled(client, begun.id, lambda found: found.output)
    assert (found.status, found.output_text) == ("in_progress", "It ")
    api.source.held.set()
    whole = await ended(client, begun.id)
    assert (whole.status, whole.output_text, whole.background) == ("completed", "It is cold.", True)
    assert whole.usage.output_tokens == 11
    following = await client.responses.create(model="bytes", input="why?", previous_response_id=begun.id)
    assert following.output_text == "It is cold."
    assert api.source.prompt == "<user>hello<assistant>It is cold.<user>why?<assistant>"


async def test_a_client_that_leaves_does_not_end_its_response(api, client):
    api.source.held = asyncio.Event()
    name = ""
    async with await begin(client, stream=True) as stream:
        async for event in stream:
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.output_text.delta":
                break
    last = event.sequence_number
    api.source.held.set()
    rest = [event async for event in await client.responses.retrieve(name, stream=True, starting_after=last)]
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert (rest[-1].type, rest[-1].response.output_text) == ("response.completed", "It is cold.")


async def test_events_are_recorded_from_the_queue_to_the_end(client):
    events = [event async for event in await begin(client, stream=True)]
    assert [event.type for event in events[:4]] == [
        "response.created", "response.queued", "response.in_progress", "response.output_item.added"
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    name = events[0].response.id
    again = [event async for event in await client.responses.retrieve(name, stream=True)]
    assert again == events
    assert [event async for event in await client.responses.retrieve(name, stream=True, starting_after=99999)] == []


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_cancelled_response_keeps_what_it_has(api, client, is_begun):
    api.source.held = asyncio.Event()
    begun = await begin(client)
    await polled(client, begun.id, lambda found: found.output or not is_begun)
    found = await client.responses.cancel(begun.id)
    assert (found.status, found.output_text) == ("cancelled", "It " if is_begun else found.output_text)
    assert api.source.num_open == 0
    assert await client.responses.cancel(begun.id) == await client.responses.retrieve(begun.id) == found


async def test_a_stream_of_a_cancelled_response_ends_with_an_event(api, client):
    api.source.held = asyncio.Event()
    stream = await begin(client, stream=True)
    events = [await anext(stream)]
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and event.delta:
            await client.responses.cancel(events[0].response.id)
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_running_response_is_named_where_an_ended_one_is_needed(api, client):
    api.source.held = asyncio.Event()
    begun = await begin(client)
    with pytest.raises(openai.NotFoundError, match="still being created"):
        await client.responses.create(model="bytes", input="why?", previous_response_id=begun.id)
    with pytest.raises(openai.NotFoundError, match="still being created"):
        await client.responses.input_items.list(begun.id)
    api.source.held.set()
    await ended(client, begun.id)
    await client.responses.retrieve(begun.id, include=["message.output_text.logprobs"])
    listed = await client.responses.input_items.list(begun.id, include=["message.output_text.logprobs"])
    assert len(listed.data) == 1


async def test_a_deleted_response_ends_and_is_forgotten(api, client):
    api.source.held = asyncio.Event()
    begun = await begin(client)
    await client.responses.delete(begun.id)
    assert api.source.num_open == 0
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_a_failure_is_the_state_of_the_response(api, client):
    api.source.error = Unavailable("no worker")
    whole = await ended(client, (await begin(client)).id)
    assert (whole.status, whole.error.code, whole.error.message) == ("failed", "server_error", "no worker")


async def test_an_unexpected_failure_shows_nothing_of_its_cause(api, client, caplog):
    api.source.answers = []  # an IndexError
    whole = await ended(client, (await begin(client)).id)
    assert (whole.status, whole.error.message) == ("failed", "internal error; the gateway's log has the details")
    assert "failed unexpectedly" in caplog.text


async def test_only_responses_in_the_background_are_cancelled_and_replayed(client):
    whole = await client.responses.create(model="bytes", input="hello")
    with pytest.raises(openai.BadRequestError, match="in the background"):
        await client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="records them"):
        await client.responses.retrieve(whole.id, stream=True)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_other")
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(whole.id, extra_query={"starting_after": "-1"})


async def test_the_number_of_running_responses_is_bounded(api, client, monkeypatch):
    monkeypatch.setattr(background, "MAX_TENANT_RUNNING", 2)
    api.source.held = asyncio.Event()
    begun = [await begin(client) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="at most 2"):
        await begin(client)
    await client.responses.cancel(begun[0].id)
    await begin(client)


async def test_responses_that_wait_for_the_store_count_as_running(api, client, monkeypatch):
    monkeypatch.setattr(background, "MAX_TENANT_RUNNING", 2)
    is_free, waiting, begin_now = asyncio.Event(), [], MemoryResponses.begin

    async def begin_later(*arguments: Any) -> bool:
        waiting.append(arguments)
        await is_free.wait()
        return await begin_now(*arguments)

    monkeypatch.setattr(MemoryResponses, "begin", begin_later)
    begun = [asyncio.create_task(begin(client)) for _ in range(2)]
    await eventually(lambda: len(waiting) == 2)
    with pytest.raises(openai.RateLimitError, match="at most 2"):
        await begin(client)
    is_free.set()
    for response in await asyncio.gather(*begun):
        await ended(client, response.id)
    await ended(client, (await begin(client)).id)


async def test_a_gateway_that_keeps_nothing_refuses_them():
    async with (
        answering_api(CallFormat.HERMES, http=HttpConfig(kept_responses=None)) as api,
        httpx.AsyncClient(base_url=api.url) as http,
    ):
        answer = await http.post("/responses", json={"input": "a", "background": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
        assert (await http.post("/responses/resp_1/cancel")).status_code == 404


async def test_a_stopping_gateway_waits_and_then_cancels(api, client):
    api.source.held = asyncio.Event()
    await begin(client, stream=True)
    await api.responses.stop(0.0)
    assert api.source.num_open == 0
    with pytest.raises(openai.InternalServerError, match="stopping"):
        await begin(client)
