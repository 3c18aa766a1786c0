"""Behind nginx with its default settings: events of a stream arrive one by one, comments keep the connection, and
errors and ids pass through. Skipped where nginx is not installed.
"""

import asyncio
import shutil
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from harness.fakes.scripted_answers import AnsweringApi, answering_api
from harness.waiting import until

from kvferry.gateway.decide.config import HttpConfig
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent
from kvferry.text.answers.registry import CallFormat

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
SECONDS = 20.0
CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  gzip {gzip};
  gzip_types *;
  gzip_min_length 0;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://{upstream}; }}
  }}
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@asynccontextmanager
async def nginx(upstream: str, folder: Path, *, gzip: str) -> AsyncIterator[str]:
    """Run nginx in front of the address `upstream`; yield its URL."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / "nginx.conf"
    file.write_text(CONFIG.format(folder=folder, port=port, upstream=upstream, gzip=gzip))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(folder), "-e", f"{folder}/error.log", "-c", str(file)
    )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await asyncio.to_thread(until, listens, "nginx listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
async def api() -> AsyncIterator[AnsweringApi]:
    config = HttpConfig(address="127.0.0.1:0", sse_keepalive_seconds=0.05)
    async with answering_api(CallFormat.HERMES, http=config) as running:
        running.source.answers = ["abcdef"]
        yield running


@pytest.fixture(params=["off", "on"], ids=["plain", "gzip"])
async def http(api: AnsweringApi, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    upstream = urlsplit(api.url).netloc
    async with (
        nginx(upstream, tmp_path, gzip=request.param) as url,
        httpx.AsyncClient(base_url=url, timeout=SECONDS) as client,
    ):
        yield client


def held(api: AnsweringApi, *, before_the_first: bool) -> asyncio.Event:
    """Let the answer wait before its first or its second token; return the event that continues it."""
    gate = asyncio.Event()
    stream = type(api.source).stream

    async def waiting(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        if before_the_first:
            await gate.wait()
        async for event in stream(self, request):
            yield event
            await gate.wait()

    api.source.__class__ = type("Held", (type(api.source),), {"stream": waiting})
    return gate


ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": True},
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/responses": {"input": "hi", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True},
    "/inference/v1/generate": {"token_ids": [104], "stream": True},
}


@pytest.mark.parametrize("path", list(ROUTES))
async def test_the_first_event_arrives_while_the_answer_is_generated(api, http, path):
    gate = held(api, before_the_first=False)
    async with asyncio.timeout(SECONDS), http.stream("POST", path, json=ROUTES[path]) as answer:
        lines = answer.aiter_lines()
        first = await anext(line async for line in lines if line.startswith("data:"))
        assert not gate.is_set(), "the event arrived before the answer could go on"
        gate.set()
        rest = [line async for line in lines if line.startswith("data:")]
    assert first
    assert rest


async def test_comments_arrive_while_the_first_token_is_awaited(api, http):
    gate = held(api, before_the_first=True)
    path = "/v1/chat/completions"
    async with asyncio.timeout(SECONDS), http.stream("POST", path, json=ROUTES[path]) as answer:
        lines = answer.aiter_lines()
        assert await anext(line async for line in lines if line) == ": keep-alive"
        gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_ids_and_errors_pass_through(http):
    headers = {"x-request-id": "mine-1"}
    answer = await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-1")
    refused = await http.post("/v1/completions", json={"prompt": "hi", "temperature": -1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"
