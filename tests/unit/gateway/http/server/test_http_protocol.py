"""Hostile connections to a real server: their use of memory and time is bounded, and other connections are served."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.gateway.http.server.http_protocol import ConnectionLimits
from kvferry.gateway.http.server.http_server import HttpServer

SECONDS = 20.0
SMALL = ConnectionLimits(max_connections=4, header_seconds=0.2, read_seconds=0.2)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
seen: list[list[tuple[bytes, bytes]]] = []


@pytest.fixture(autouse=True)
def _none_seen() -> None:
    seen.clear()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body; at `/large` with 32 MiB; at `/at-once` without reading the body."""
    body = b""
    while scope["path"] != "/at-once":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    seen.append(list(scope["headers"]))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/large":
        for _ in range(32):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": str(len(body)).encode(), "more_body": False})


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes) -> bytes:
        """Send `data` and return the head of the answer."""
        self.writer.write(data)
        return await self.reader.readuntil(b"\r\n\r\n")

    async def is_served(self) -> bool:
        """Send a request, read the whole answer, and return whether its status is 200."""
        head = await self.ask(GET)
        await self.reader.readuntil(b"0\r\n\r\n")
        return head.startswith(b"HTTP/1.1 200")

    async def is_closed(self) -> bool:
        """Wait until the server closes the connection, and return true."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


@asynccontextmanager
async def serving(limits: ConnectionLimits = SMALL) -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    server = await HttpServer.start(echo, "127.0.0.1:0", field="http", drain_seconds=1.0, limits=limits)
    host, _, port = server.address.rpartition(":")
    opened: list[Connection] = []

    async def connect() -> Connection:
        opened.append(Connection(*await asyncio.open_connection(host, int(port))))
        return opened[-1]

    try:
        async with asyncio.timeout(SECONDS):
            yield connect
    finally:
        for connection in opened:
            connection.writer.close()
        await server.stop()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nendless: " + b"a" * 40_000,
    ],
    ids=["a long header", "a long path", "many headers", "an endless header"],
)
async def test_large_heads_are_refused_with_431(head: bytes) -> None:
    async with serving() as connect:
        connection = await connect()
        answer = await connection.ask(head)
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        assert b"headers_too_large" in await connection.reader.read()
        assert await (await connect()).is_served()


async def test_invalid_http_gets_a_400_in_openais_form() -> None:
    async with serving() as connect:
        connection = await connect()
        assert (await connection.ask(b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert b'"code": "invalid_http"' in await connection.reader.read()


async def test_trailers_are_dropped() -> None:
    async with serving() as connect:
        connection = await connect()
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await connection.ask(head + b"2\r\nab\r\n0\r\nauthorization: Bearer secret\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert [name for name, _ in seen[-1]] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("endless", [b"0\r\ntrailer: " + b"a" * 100_000, b"1;" + b"a" * 100_000])
async def test_endless_framing_closes_the_connection(endless: bytes) -> None:
    async with serving() as connect:
        connection = await connect()
        connection.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(4):
            connection.writer.write(endless)
        assert await connection.is_closed()


async def test_chunks_of_one_byte_are_accepted() -> None:
    async with serving() as connect:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        connection = await connect()
        assert (await connection.ask(head + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b"50000" in await connection.reader.readuntil(b"50000")


@pytest.mark.parametrize(
    "offer", [b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n", b"Upgrade: websocket\r\n"]
)
async def test_an_offer_of_another_protocol_is_ignored(offer: bytes) -> None:
    async with serving() as connect:
        connection = await connect()
        head = b"POST / HTTP/1.1\r\nhost: x\r\n" + offer + b"content-length: 3\r\n\r\n"
        assert (await connection.ask(head + b"abc")).startswith(b"HTTP/1.1 200")
        assert b"3" in await connection.reader.readuntil(b"0\r\n\r\n")
        assert await connection.is_served()


async def test_pipelined_requests_are_bounded() -> None:
    async with serving() as connect:
        connection = await connect()
        connection.writer.write(GET * 10_000)
        assert await connection.is_closed()
        assert len(seen) < 100
        assert await (await connect()).is_served()
        few = await connect()
        few.writer.write(GET * 10)
        for _ in range(10):
            assert (await few.ask(b"")).startswith(b"HTTP/1.1 200")
            await few.reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n", b"200"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: identity\r\n", None),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n", b"400"),
    ],
)
async def test_a_request_that_a_proxy_could_read_differently_is_refused(head: bytes, status: bytes | None) -> None:
    async with serving() as connect:
        answer = await (await connect()).ask(head + (b"\r\n0\r\n\r\n" if b"chunked" in head else b"\r\n"))
        assert answer.split(b" ")[1] in ((status,) if status else (b"400", b"501"))


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost:"], ids=["silent", "half a head"])
async def test_a_connection_without_a_whole_head_is_closed(begun: bytes) -> None:
    async with serving() as connect:
        connection = await connect()
        connection.writer.write(begun)
        assert await connection.is_closed()


async def test_half_a_second_head_is_closed_too() -> None:
    async with serving() as connect:
        connection = await connect()
        await connection.ask(GET)
        connection.writer.write(b"GET / HT")
        assert await connection.is_closed()


async def test_the_wait_for_an_unread_body_is_bounded() -> None:
    async with serving() as connect:
        connection = await connect()
        head = b"POST /at-once HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
        assert (await connection.ask(head + b"a")).startswith(b"HTTP/1.1 200")
        assert await connection.is_closed()
        connection = await connect()
        assert (await connection.ask(head + b"a")).startswith(b"HTTP/1.1 200")
        connection.writer.write(b"bcd")  # the rest of the body, so the connection is kept
        await connection.reader.readuntil(b"0\r\n\r\n")
        assert await connection.is_served()


async def test_a_new_connection_replaces_the_one_that_was_idle_longest() -> None:
    async with serving(ConnectionLimits(max_connections=3)) as connect:
        kept = [await connect() for _ in range(3)]
        for connection in kept:
            assert await connection.is_served()
        await kept[0].is_served()  # now the second connection is idle longest
        newest = await connect()
        assert await newest.is_served()
        assert await kept[1].is_closed()
        for connection in (kept[0], kept[2], newest):
            assert await connection.is_served()


async def test_busy_connections_are_not_replaced() -> None:
    async with serving(ConnectionLimits(max_connections=2)) as connect:
        busy = [await connect() for _ in range(2)]
        for connection in busy:
            connection.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na")
            await connection.writer.drain()
        # A further connection is closed at once. If it was accepted before the requests, it replaces one of the
        # connections.
        late = await connect()
        assert await late.is_closed()
        for connection in busy:
            assert (await connection.ask(b"b")).startswith(b"HTTP/1.1 200")


async def test_many_silent_connections_do_not_block_others() -> None:
    async with serving() as connect:
        for _ in range(40):
            await connect()
        assert await (await connect()).is_served()


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async with serving() as connect:
        connection = await connect()
        connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await connection.writer.drain()
        while (await (await connect()).ask(GET)) and len(seen) < 1:
            pass
        other = await connect()
        await other.is_closed()  # the idle timeout is longer than the stall timeout, so the latter has passed too
        connection.reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await connection.reader.readexactly(32 << 20)
