"""kvferry's gateway behind a real Envoy with default settings: events of a stream arrive one by one, comments keep the
connection, errors pass through, and retries repeat no answer that has begun."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import urlsplit

import httpx
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.servers.envoy import EnvoyMode, envoy, envoy_path
from harness.waiting import eventually

from kvferry.core.errors import InvariantBroken
from kvferry.gateway.decide.config import HttpConfig
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.registry import CallFormat

SECONDS = 20.0
pytestmark = pytest.mark.skipif(envoy_path() is None, reason="Envoy is not installed")
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/responses": {"input": "hi", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True},
}


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    config = HttpConfig(address="127.0.0.1:0", sse_keepalive_seconds=0.05)
    async with answering_api(CallFormat.HERMES, http=config) as running:
        running.source.answers = ["abcdef"]
        yield running


@pytest.fixture
async def http(api, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    upstream = urlsplit(api.url).netloc
    mode = EnvoyMode(is_off=True, by_override=True, endpoints=(upstream,), retries=2)
    async with envoy("127.0.0.1:1", tmp_path, mode) as url, httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        yield client


def changed(
    api: AnsweringApi, *, gate: asyncio.Event, before_the_first: bool = False, fails: bool = False
) -> list[str]:
    """Let answers wait before their first or second token, or fail there; return a list that gets a line for each."""
    stream, begun = type(api.source).stream, list[str]()

    async def waiting(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        begun.append("one")
        if before_the_first:
            await gate.wait()
        async for event in stream(self, request):
            yield event
            if fails:
                raise InvariantBroken("broken on purpose")
            await gate.wait()

    api.source.__class__ = type("Changed", (type(api.source),), {"stream": waiting})
    return begun


@pytest.mark.parametrize("path", list(ROUTES))
async def test_the_first_event_arrives_while_the_answer_is_generated(path, api, http):
    gate = asyncio.Event()
    begun = changed(api, gate=gate)
    async with asyncio.timeout(SECONDS), http.stream("POST", path, json=ROUTES[path]) as answer:
        lines = answer.aiter_lines()
        assert await anext(line async for line in lines if line.startswith("data:"))
        assert not gate.is_set()
        gate.set()
        assert [line async for line in lines if line.startswith("data:")]
    assert len(begun) == 1


async def test_comments_arrive_while_the_first_token_is_awaited(api, http):
    gate = asyncio.Event()
    changed(api, gate=gate, before_the_first=True)
    path = "/v1/chat/completions"
    async with asyncio.timeout(SECONDS), http.stream("POST", path, json=ROUTES[path]) as answer:
        lines = answer.aiter_lines()
        assert await anext(line async for line in lines if line) == ": keep-alive"
        gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_stream_that_breaks_is_not_sent_again(api, http):
    begun = changed(api, gate=asyncio.Event(), fails=True)
    path = "/v1/completions"
    async with asyncio.timeout(SECONDS), http.stream("POST", path, json=ROUTES[path]) as answer:
        events = [line async for line in answer.aiter_lines() if line.startswith("data:")]
    assert any("error" in event for event in events)
    assert len(begun) == 1


async def test_a_client_that_leaves_ends_the_answer(api, http):
    gate = asyncio.Event()
    changed(api, gate=gate)
    path = "/v1/completions"
    async with asyncio.timeout(SECONDS), http.stream("POST", path, json=ROUTES[path]) as answer:
        assert await anext(line async for line in answer.aiter_lines() if line.startswith("data:"))
    await eventually(lambda: not api.source.num_open, SECONDS)


async def test_errors_pass_through(http):
    refused = await http.post("/v1/completions", json={"prompt": "hi", "temperature": -1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"
