"""LangChain's OpenAI classes against the real server: text, streams, functions, structured output, embeddings."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from harness.fakes.answers import written
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.fakes.scripted_gateway import scripted_gateway
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from kvferry.core.constraint import ConstraintKind
from kvferry.text.answers.registry import CallFormat

KEY = SecretStr("any")
MESSAGES = [SystemMessage("Be brief."), HumanMessage("hello")]


@tool
def get_weather(city: str) -> str:
    """Returns the weather in a city."""
    return f"cold in {city}"


class Answer(BaseModel):
    """An answer."""

    city: str
    degrees: int


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    async with answering_api(CallFormat.HERMES) as running:
        running.source.answers = ["It is cold."]
        yield running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """HTTP clients that are closed after the test; LangChain's own client is not."""
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


def model(api: AnsweringApi, http: httpx.AsyncClient, *, responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        http_async_client=http,
        model="bytes",
        base_url=api.url,
        api_key=KEY,
        max_retries=0,
        use_responses_api=responses,
        temperature=0,
    )


@pytest.mark.parametrize("responses", [False, True])
async def test_chat_and_its_stream(api, http, responses):
    chat = model(api, http, responses=responses)
    answer = await chat.ainvoke(MESSAGES)
    assert answer.text == "It is cold."
    assert answer.usage_metadata["output_tokens"] == 11
    assert api.source.prompt == "<system>Be brief.<user>hello<assistant>"
    assert "".join([chunk.text async for chunk in chat.astream(MESSAGES)]) == "It is cold."


@pytest.mark.parametrize("responses", [False, True])
async def test_a_tool_is_called_and_its_result_answered(api, http, responses):
    chat = model(api, http, responses=responses).bind_tools([get_weather])
    api.source.answers = [written(CallFormat.HERMES, [("get_weather", {"city": "Oslo"})])]
    question = HumanMessage("Weather?")
    answer = await chat.ainvoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    result = ToolMessage(await get_weather.ainvoke(call["args"]), tool_call_id=call["id"])
    api.source.answers = ["Cold."]
    assert (await chat.ainvoke([question, answer, result])).text == "Cold."
    assert "cold in Oslo" in api.source.prompt


@pytest.mark.parametrize("responses", [False, True])
async def test_structured_output(api, http, responses):
    api.source.answers = ['{"city": "Oslo", "degrees": -3}']
    chat = model(api, http, responses=responses).with_structured_output(Answer, method="json_schema")
    assert await chat.ainvoke("?") == Answer(city="Oslo", degrees=-3)
    constraint = api.source.requests[-1].sampling.constraint
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint.source)["required"] == ["city", "degrees"]


async def test_completions_and_embeddings(http):
    async with scripted_gateway(both=1, prefill=0, decode=0) as gateway:
        llm = OpenAI(model="bytes", base_url=f"{gateway.url}/v1", api_key=KEY, max_tokens=5, http_async_client=http)
        assert len(await llm.ainvoke("abc")) == 5
        vectors = OpenAIEmbeddings(
            model="bytes",
            base_url=f"{gateway.url}/v1",
            api_key=KEY,
            check_embedding_ctx_length=False,
            http_async_client=http,
        )
        found = await vectors.aembed_documents(["a", "b"])
        assert [len(vector) for vector in found] == [8, 8]
