"""Conversations that are too long: the number of their tokens, and the truncation that leaves out the oldest items."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, context_overflow
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.responses.body import first_fitting
from kvferry.text.answers.registry import CallFormat

CONTEXT_TOKENS = 1 << 16
"""Context length of the byte model."""


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES) as running:
        running.source.answers = ["It is cold."]
        yield running


@pytest.fixture
async def client(api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as opened:
        yield opened


def turns(count: int, length: int) -> list[Any]:
    """Return a conversation in which each answer calls a function."""
    items: list[Any] = []
    for number in range(count):
        items += [
            {"role": "user", "content": f"{number:02}:" + "u" * length},
            {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"{number:02}:" + "r" * length},
            {"role": "assistant", "content": f"{number:02}:" + "a" * length},
        ]
    return [*items, {"role": "user", "content": "last question"}]


def prompt_of(api: AnsweringApi) -> str:
    return bytes(api.source.requests[-1].token_ids).decode()


async def test_the_number_of_tokens_is_the_one_of_the_prompt(api, client):
    fields: Any = {"model": "bytes", "input": turns(2, 20), "instructions": "Be brief."}
    counted = await client.responses.input_tokens.count(**fields)
    answer = await client.responses.create(**fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == answer.usage.input_tokens == len(api.source.requests[-1].token_ids)


async def test_a_conversation_that_is_too_long_is_counted(api, client):
    limit = CONTEXT_TOKENS
    counted = await client.responses.input_tokens.count(model="bytes", input=turns(8, limit // 8))
    assert counted.input_tokens > limit


async def test_the_oldest_turns_are_left_out_if_the_client_asks_for_that(api, client):
    limit = CONTEXT_TOKENS
    fields: Any = {"model": "bytes", "input": turns(12, limit // 20), "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**fields)
    assert refused.value.code == CONTEXT_LENGTH_EXCEEDED.lower()
    answer = await client.responses.create(**fields, truncation="auto", max_output_tokens=16)
    assert answer.truncation == "auto"
    prompt = prompt_of(api)
    assert len(prompt) <= limit - 16
    assert "Be brief." in prompt
    assert prompt.rstrip().count("last question") == 1
    kept = [number for number in range(12) if f"{number:02}:u" in prompt]
    assert kept == list(range(12 - len(kept), 12)), "turns are left out from the oldest on"
    assert kept
    assert all(f"{number:02}:r" in prompt for number in kept), "a call keeps its result"
    longer = limit - len(prompt) - 16
    assert longer < 4 * (limit // 20), "no more turns are left out than needed"


async def test_a_short_conversation_is_used_as_a_whole(api, client):
    await client.responses.create(model="bytes", input=turns(2, 5), truncation="auto")
    assert "00:u" in prompt_of(api)


async def test_a_last_message_that_is_too_long_is_refused(api, client):
    limit = CONTEXT_TOKENS
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="bytes", input="x" * (limit + 1), truncation="auto")
    assert refused.value.code == CONTEXT_LENGTH_EXCEEDED.lower()


@pytest.mark.parametrize("fits_from", range(8))
def test_the_first_conversation_that_fits_is_found(fits_from):
    read: list[int] = []

    def attempt(start: int) -> int:
        read.append(start)
        if start < fits_from:
            raise context_overflow(100 - start, 93)
        return start

    assert first_fitting(range(8), attempt) == fits_from
    assert len(read) <= 4


def test_another_error_ends_the_search():
    def attempt(start: int) -> int:
        raise InvalidRequest("the template rejects these messages", field="input")

    with pytest.raises(InvalidRequest, match="rejects"):
        first_fitting(range(8), attempt)


async def test_stored_conversations_that_are_read_count_as_buffered():
    async with (
        answering_api(CallFormat.HERMES, http=HttpConfig(max_buffered_bytes=70_000)) as api,
        openai.AsyncOpenAI(base_url=api.url, api_key="any", max_retries=0) as client,
    ):
        api.source.answers = ["It is cold."]
        name = None
        for _ in range(2):
            text: dict[str, Any] = {"model": "bytes", "input": "a" * 40_000, "truncation": "auto"}
            name = (await client.responses.create(**text, previous_response_id=name)).id
        with pytest.raises(openai.RateLimitError, match="at most 70000"):
            await client.responses.create(model="bytes", input="more", truncation="auto", previous_response_id=name)
        await client.responses.create(model="bytes", input="more")  # what was counted is given back
