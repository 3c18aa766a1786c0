"""URLs as people write them, and errors of servers with what to do about them."""

import json

import pytest

from kvferry.cli.chatting.server_errors import refusal, stream_failure
from kvferry.cli.chatting.stream_events import StreamedError
from kvferry.cli.server_url import ServerUrl
from kvferry.core import errors
from kvferry.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:80"),
        ("https://llm.example.com/team/v1", "https://llm.example.com:443/team"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_a_url_is_read(text: str, expected: str) -> None:
    assert str(ServerUrl.parse(text)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "http://", "ftp://a", "http://a:x", "http://a:99999", "http://[::1", "http://a b", "http://a/?q=1", "http://ä",
     "http://a/\r\nx: y", "http://a/ä", "//", "http://a\x00"],
)  # fmt: skip
def test_what_is_no_url_of_a_server_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"URL"):
        ServerUrl.parse(text)


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="--api-key-file") as refused:
        ServerUrl.parse("http://user:hunter2@host")
    assert "hunter2" not in refused.value.message


def body(message: str, code: str = "") -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "sent", "retry_after", "kind", "words"),
    [
        (401, body("no key"), None, errors.Unauthenticated, "no key; set KVFERRY_API_KEY or --api-key-file"),
        (404, body("model 'x' is not served"), None, errors.UnknownModel, "leave out --model"),
        (400, body("too long", "context_length_exceeded"), None, errors.InvalidRequest, "/undo and /clear shorten"),
        (400, body("bad field"), None, errors.InvalidRequest, "bad field"),
        (429, body("full"), "7", errors.Overloaded, "full; try again in 7 s"),
        (429, body("full"), "soon", errors.Overloaded, "full; try again"),
        (503, body("no worker"), None, errors.Unavailable, "no worker; try again"),
        (502, b"<html>\x1b[2J", None, errors.Unavailable, "http://a:1 answered HTTP 502 without saying why; set --url"),
        (307, b"", None, errors.Unavailable, "HTTP 307"),
        (500, b'{"error": {"message": 1}}', None, errors.Unavailable, "HTTP 500"),
        (500, body("a\n\x1b[31mb"), None, errors.Unavailable, "a [31mb; try again"),
    ],
)
def test_a_refusal_is_one_line_with_the_remedy(
    status: int, sent: bytes, retry_after: str | None, kind: type[errors.KvferryError], words: str
) -> None:
    headers = {"x-request-id": "req-1"} | ({} if retry_after is None else {"retry-after": retry_after})
    error = refusal(status, sent, headers, "http://a:1")
    assert type(error) is kind
    assert words in error.message
    assert error.message.isprintable()
    assert ("(request req-1)" in error.message) is (status >= 500 and b"message" in sent and b": 1}" not in sent)


def test_an_error_in_a_stream_says_that_the_answer_failed() -> None:
    assert stream_failure(StreamedError("a worker is lost"), {"x-request-id": "req-1"}).message == (
        "the answer failed: a worker is lost; try again (request req-1)"
    )
    assert "did not say why" in stream_failure(StreamedError(), {}).message
