"""The benchmark's client against a server in this process: its measures, and its handling of invalid answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvferry.bench.serving.http_client import Target
from kvferry.bench.serving.run import common_errors, run
from kvferry.bench.workload.measures import MeasuredAnswer, summary
from kvferry.bench.workload.requests import BenchRequest
from kvferry.core.clock import SystemClock
from kvferry.core.errors import Unavailable, UsageError

Body = dict[str, object]
Respond = Callable[[Body, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
REQUESTS = [BenchRequest(0.0, (301, 302), 3), BenchRequest(0.0, (303,), 2)]


def event(**message: object) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
    """Answer as vLLM does: a message per token, then the usage."""
    writer.write(HEAD)
    assert isinstance(body["max_tokens"], int)
    assert isinstance(body["prompt"], list)
    for _ in range(body["max_tokens"]):
        writer.write(event(choices=[{"text": "word "}]))
        await writer.drain()
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    writer.write(event(choices=[], usage=usage) + b"data: [DONE]\n\n")


@asynccontextmanager
async def serving(respond: Respond, first: Respond = answer) -> AsyncIterator[Target]:
    """Serve `/v1/models` with one model; answer the first completion with `first` and the later ones with `respond`."""
    count = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            body = json.dumps({"data": [{"id": "the-model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            request = json.loads(await reader.readexactly(length))
            assert request["model"] == "the-model"
            count += 1
            await (first if count == 1 else respond)(request, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=5.0)


async def measured(respond: Respond, requests: list[BenchRequest] = REQUESTS) -> list[MeasuredAnswer]:
    async with serving(respond) as target:
        model, answers = await run(requests, target, SystemClock())
    assert model == "the-model"
    return answers


async def test_sizes_come_from_the_usage_and_times_from_the_messages() -> None:
    answers = await measured(answer)
    assert [(a.num_input, a.num_output, len(a.times), a.error) for a in answers] == [(2, 3, 3, ""), (1, 2, 2, "")]
    assert all(list(a.times) == sorted(a.times) and a.ttft > 0 for a in answers)
    assert summary(answers, {})["completed"] == 2


async def broken(_: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"data: {broken\n\n")


async def wordless(_: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"data: [DONE]\n\n")


async def overloaded(_: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\ncontent-length: 4\r\n\r\nfull")


async def failing(_: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(choices=[{"text": "one"}]) + event(error={"message": "the worker died"}))


async def cut(_: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + event(choices=[{"text": "one"}]))


async def listed(_: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"data: [1]\n\n")


@pytest.mark.parametrize(
    ("respond", "error"),
    [
        (broken, "JSONDecodeError"),
        (wordless, "the answer has no text"),
        (overloaded, "HTTP 429: full"),
        (failing, "the worker died"),
        (cut, "RemoteProtocolError"),
        (listed, "not a JSON object"),
    ],
)
async def test_a_bad_answer_fails_its_request_and_no_other(respond: Respond, error: str) -> None:
    async def second_is_bad(body: Body, writer: asyncio.StreamWriter) -> None:
        await (respond if body["prompt"] == [303] else answer)(body, writer)

    good, bad = await measured(second_is_bad)
    assert not good.error
    assert error in bad.error
    assert common_errors([good, bad]) == [(bad.error, 1)]


async def test_requests_are_sent_while_earlier_ones_are_not_answered() -> None:
    both = asyncio.Event()
    waiting = 0

    async def together(body: Body, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        await answer(body, writer)

    assert not any(a.error for a in await measured(together))


async def test_a_limit_of_concurrency_holds_requests_back_and_counts_the_wait() -> None:
    open_now = most = 0

    async def counted(body: Body, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await answer(body, writer)
        open_now -= 1

    async with serving(counted) as target:
        _, answers = await run(REQUESTS * 4, target, SystemClock(), max_concurrency=1)
    assert most == 1
    assert answers[-1].ttft > answers[0].ttft
    assert answers[-1].sent > 0


async def test_a_server_that_rejects_the_first_request_ends_the_run() -> None:
    with pytest.raises(Unavailable, match="/v1/models cannot be read"):
        await run(REQUESTS, Target("http://127.0.0.1:1"), SystemClock())
    async with serving(answer, first=overloaded) as target:
        with pytest.raises(Unavailable, match="the server rejects the first request: HTTP 429"):
            await run(REQUESTS, target, SystemClock())
    with pytest.raises(UsageError, match="must start with http"):
        await run(REQUESTS, Target("localhost:8000"), SystemClock())
