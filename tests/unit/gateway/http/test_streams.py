"""Streams and connections over real sockets: headers, comments while the first event is awaited, CORS, idle time."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.body_route import send_events
from kvferry.gateway.http.client_api import error_response
from kvferry.text.answers.registry import CallFormat

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}
COMMENT = ": keep-alive\n\n"


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    http = HttpConfig(sse_keepalive_seconds=0.4, http_keepalive_seconds=1, cors_origins=("https://chat.example",))
    async with answering_api(CallFormat.HERMES, http=http) as running:
        running.source.answers = ("yes",)
        yield running


@pytest.fixture
async def http(api: AnsweringApi) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
async def test_proxies_pass_events_on_at_once(http, path):
    answer = await http.post(path, json={**BODIES[path], "stream": True})
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert COMMENT not in answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_comments_are_sent_until_the_first_event(http, api, path):
    api.source.delay_seconds = 1.0
    answer = await http.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    comments = answer.text.count(COMMENT)
    assert comments >= 1
    assert answer.text.startswith(COMMENT * comments)
    whole = await http.post(path, json=BODIES[path])
    assert COMMENT not in whole.text


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_is_an_answer_before_the_first_comment_and_an_event_after_it(http, api, path):
    api.source.error = Unavailable("no worker is left")
    early = await http.post(path, json={**BODIES[path], "stream": True})
    assert early.status_code == 503
    assert early.json()["error"]["message"] == "no worker is left"
    api.source.delay_seconds = 1.0
    late = await http.post(path, json={**BODIES[path], "stream": True})
    assert late.status_code == 200
    events = [line.removeprefix("data: ") for line in late.text.splitlines() if line.startswith("data: ")]
    assert "no worker is left" in json.dumps(json.loads(events[-1]))
    assert "[DONE]" not in late.text


async def test_a_client_that_leaves_while_comments_are_sent_ends_its_request(http, api):
    api.source.delay_seconds = 60
    async with http.stream("POST", "completions", json={"prompt": "hi", "stream": True}) as answer:
        assert await anext(answer.aiter_text()) == COMMENT
    api.source.delay_seconds = 0
    assert (await http.post("completions", json={"prompt": "hi"})).status_code == 200


async def test_comments_are_sent_while_no_event_is_and_never_within_one():
    sent: list[Any] = []
    commented = asyncio.Event()

    async def send(message: Any) -> None:
        await asyncio.sleep(0.002)
        sent.append(message.get("body", message.get("status")))
        if sent[-1] == COMMENT.encode():
            commented.set()

    async def events() -> Any:
        await commented.wait()
        yield b"first"
        commented.clear()
        await commented.wait()
        yield b"second"

    sending = send_events(events(), send, end=b"end", failed=lambda _: b"", keepalive_seconds=0.003)
    await sending
    assert sent[0] == 200
    assert sent[-2:] == [b"second", b"end"]
    assert [part for part in sent[1:] if part != COMMENT.encode()] == [b"first", b"second", b"end"]
    assert COMMENT.encode() in sent[sent.index(b"first") :]


async def test_pages_of_an_origin_may_call_the_api(http):
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    allowed = await http.options(
        "chat/completions", headers={**asked, "access-control-request-headers": "authorization"}
    )
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["x-request-id"]
    for body in ({"prompt": "hi"}, {"prompt": 1}, {"prompt": "hi", "stream": True}):
        answer = await http.post("completions", json=body, headers={"origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "kvferry-ignored" in answer.headers["access-control-expose-headers"]
    other = await http.post("completions", json={"prompt": "hi"}, headers={"origin": "https://other.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


async def test_no_origin_may_call_the_api_by_default():
    async with answering_api(CallFormat.HERMES) as api, httpx.AsyncClient(base_url=api.url) as client:
        asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        assert (await client.options("completions", headers=asked)).status_code == 403


async def test_an_idle_connection_is_closed(api):
    host, _, port = api.url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    async with asyncio.timeout(10):
        assert b'{"status":"alive"}' in await reader.read()  # up to the end of the connection
    writer.close()


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "1"), (59.5, "60"), (60.5, "60"), (3600.0, "60")])
def test_a_time_to_retry_is_one_that_clients_follow(seconds, shown):
    assert error_response(Overloaded("full", retry_after_seconds=seconds)).headers["retry-after"] == shown
