"""The client of `kvferry chat` against servers that answer, refuse, cut, stall and lie."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from kvferry.cli.chatting.chat_client import ChatClient
from kvferry.cli.server_url import ServerUrl
from kvferry.core import errors
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError

SECONDS = 20.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ONE = b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n'
TLS_HELLO = b"\x16\x03"
END = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@dataclass
class OneAnswer:
    """A server that answers one connection with prepared bytes."""

    port: int
    received: bytearray = field(default_factory=bytearray)
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when the client has closed the connection."""


@contextmanager
def answering(sent: bytes, *, holds: bool = False) -> Iterator[OneAnswer]:
    """Serve `sent` to the first connection once its request has arrived; then close it, or wait until the client
    does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        server = OneAnswer(listener.getsockname()[1])

        def serve() -> None:
            with closing(listener.accept()[0]) as connection, suppress(ConnectionError):
                connection.settimeout(SECONDS)
                while b"}" not in server.received and not server.received.startswith((b"GET", TLS_HELLO)):
                    server.received += connection.recv(1 << 16)
                connection.sendall(sent)
                if holds and connection.recv(1) == b"":
                    server.closed.set()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server
        finally:
            thread.join(SECONDS)
            assert not thread.is_alive()


def client(port: int, *, api_key: str = "", seconds: float = SECONDS, path: str = "") -> ChatClient:
    url = ServerUrl.parse(f"http://127.0.0.1:{port}{path}")
    return ChatClient(url, SystemClock(), api_key=api_key, timeout_seconds=seconds)


def texts(port: int, *, seconds: float = SECONDS) -> list[str | None]:
    found = []
    with closing(client(port, seconds=seconds).answer(b"{}")) as chunks:
        for chunk in chunks:
            found += [choice.delta.content for choice in chunk.choices if choice.delta is not None]
    return found


def test_an_answer_is_read_to_its_end() -> None:
    with answering(HEAD + chunked(b": keep-alive\n\n" + ONE[:9]) + chunked(ONE[9:] + ONE) + chunked(END)) as server:
        assert texts(server.port) == ["one", "one"]
    assert server.received.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"content-type: application/json\r\n" in server.received
    assert b"authorization" not in server.received.lower()


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + chunked(ONE),
        HEAD + chunked(ONE) + b"0\r\n\r\n",
        HEAD + chunked(ONE + END[:7]) + b"0\r\n\r\n",
        HEAD + chunked(ONE)[:-9],
        HEAD + chunked(ONE) + b"zz\r\n",
        HEAD + chunked(ONE) + chunked(b"data: {\n\n"),
        HEAD[:20],
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + ONE,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
    ],
)
def test_a_cut_or_damaged_answer_is_an_error(sent: bytes) -> None:
    with answering(sent) as server, pytest.raises(errors.Unavailable, match=r"the stream is broken.*; send the prompt"):
        texts(server.port)


@contextmanager
def answering_in_turn(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one answer to each connection; yield the port, and the requests."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)

        def serve() -> None:
            for sent in answers:
                with closing(listener.accept()[0]) as connection:
                    connection.settimeout(SECONDS)
                    received = b""
                    while b"}" not in received:
                        received += connection.recv(1 << 16)
                    requests.append(received)
                    connection.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], requests
        finally:
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_an_answer_whose_gateway_is_lost_is_continued_at_the_next_connection() -> None:
    stopping = b'data: {"error": {"message": "the gateway is stopping", "code": "unavailable"}}\n\n'
    first = HEAD + chunked(b"id: a.1\n" + ONE) + chunked(b"id: a.2\n" + ONE[:20])
    second = HEAD + chunked(b"id: a.2\n" + ONE + b"retry: 1000\n" + stopping) + b"0\r\n\r\n"
    busy = b'HTTP/1.1 503 x\r\ncontent-length: 36\r\n\r\n{"error": {"message": "no worker"}}  '
    third = HEAD + chunked(b"id: a.3\n" + ONE + END)
    with answering_in_turn(first, second, busy, third) as (port, requests):
        assert texts(port) == ["one"] * 3
    assert b"last-event-id" not in requests[0]
    assert [b"last-event-id: a.1" in request for request in requests[1:]] == [True, False, False]
    assert [b"last-event-id: a.2" in request for request in requests[1:]] == [False, True, True]


def test_an_answer_that_is_refused_at_its_position_is_not_tried_again() -> None:
    refused = b'data: {"error": {"message": "continued elsewhere", "code": "resume_refused"}}\n\n'
    with (
        answering_in_turn(HEAD + chunked(b"id: a.1\n" + ONE + refused)) as (port, _),
        pytest.raises(errors.Unavailable, match="continued elsewhere"),
    ):
        texts(port)


def test_an_error_in_a_stream_is_reported() -> None:
    failed = b'data: {"error": {"message": "a worker is lost", "code": "unavailable"}}\n\n'
    with answering(HEAD + chunked(ONE + failed)) as server, pytest.raises(errors.Unavailable, match="a worker is lost"):
        texts(server.port)


def test_a_refusal_is_reported_with_the_remedy() -> None:
    body = b'{"error": {"message": "full", "type": "rate_limit_error", "param": null, "code": "overloaded"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\ncontent-length: %d\r\n\r\n" % len(body)
    with answering(head + body) as server, pytest.raises(errors.Overloaded) as refused:
        texts(server.port)
    assert refused.value.message == "full; try again in 3 s"


def test_a_redirect_is_not_followed() -> None:
    found = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n"
    with answering(found) as server, pytest.raises(errors.Unavailable, match="HTTP 302"):
        texts(server.port)


def test_closing_an_answer_closes_the_connection() -> None:
    with answering(HEAD + chunked(ONE), holds=True) as server:
        chunks = client(server.port).answer(b"{}")
        assert next(iter(chunks)).choices
        chunks.close()
        assert server.closed.wait(SECONDS)


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + chunked(ONE)])
def test_a_silent_server_is_left_at_the_deadline(sent: bytes) -> None:
    with answering(sent, holds=True) as server:
        with pytest.raises(errors.DeadlinePassed, match=r"within 0\.2 s; use a longer --timeout"):
            texts(server.port, seconds=0.2)
        assert server.closed.wait(SECONDS)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(errors.Unavailable, match=f"http://127.0.0.1:{port} cannot be reached .* set --url"):
            texts(port)


def test_tls_with_a_server_of_plain_http_names_the_scheme() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        url = ServerUrl.parse(f"https://127.0.0.1:{server.port}")
        with pytest.raises(errors.Unavailable, match=r"check the scheme of --url"):
            list(ChatClient(url, SystemClock(), timeout_seconds=SECONDS).answer(b"{}"))


@pytest.mark.parametrize("body", [b'{"data": []}', b"{}", b"x" * (2 << 20)], ids=len)
def test_a_server_without_models_is_named(body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    with answering(head + body) as server, pytest.raises(errors.Unavailable, match="lists no models"):
        client(server.port).first_model()


def test_the_first_model_is_found_below_a_prefix_with_the_key() -> None:
    body = b'{"object": "list", "data": [{"id": "a", "created": 0}, {"id": "b"}]}'
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as server:
        assert client(server.port, api_key="the-key", path="/llm/v1").first_model() == "a"
    assert server.received.startswith(b"GET /llm/v1/models HTTP/1.1\r\n")
    assert b"authorization: Bearer the-key\r\n" in server.received


@pytest.mark.parametrize("key", ["a\nb", "a b", "ä", "\ufffd", "a\x00"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UsageError) as refused:
        client(1, api_key=key)
    assert key not in refused.value.message


def test_a_server_that_never_begins_its_answer_is_cut_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def announce() -> None:
            with closing(listener.accept()[0]) as connection, suppress(OSError):
                connection.settimeout(2.0)  # ends when the client reads no more
                while True:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

        thread = threading.Thread(target=announce)
        thread.start()
        url = ServerUrl.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")
        client = ChatClient(url, SystemClock(), timeout_seconds=1.0)
        with pytest.raises(errors.DeadlinePassed, match="did not finish the answer within 1 s"):
            list(client.answer(b"{}"))
        thread.join(SECONDS)
        assert not thread.is_alive()
