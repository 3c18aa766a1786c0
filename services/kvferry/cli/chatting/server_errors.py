"""Errors that a server answered, as one line with the remedy."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from kvferry.cli.chatting.safe_text import shown_line
from kvferry.cli.chatting.stream_events import StreamedError
from kvferry.core.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    Forbidden,
    InvalidRequest,
    KvferryError,
    Overloaded,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)

_SERVER_ERROR = 500
_MAX_DIGITS = 9
_KINDS: dict[int, type[KvferryError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: UnknownModel,
    429: Overloaded,
}


class ErrorAnswer(Struct):
    """Body of an answer with an error."""

    error: StreamedError


_ERRORS = msgspec.json.Decoder(ErrorAnswer)


def refusal(status: int, body: bytes, headers: Mapping[str, str], url: str) -> KvferryError:
    """Return the error for a response with a status other than 200.

    Args:
        status: HTTP status.
        body: body of the response, also of servers that are no gateways.
        headers: headers of the response.
        url: the server, for servers whose responses have no error object.
    """
    try:
        error = _ERRORS.decode(body).error
    except (msgspec.DecodeError, RecursionError):
        error = StreamedError()
    if not error.message:
        return _kind(status)(f"{url} answered HTTP {status} without saying why; set --url to a kvferry gateway")
    retry_after = headers.get("retry-after", "")
    seconds = float(retry_after) if retry_after.isdecimal() and len(retry_after) < _MAX_DIGITS else None
    remedy = remedy_of(status, str(error.code or ""), seconds) + (_request(headers) if status >= _SERVER_ERROR else "")
    return _kind(status)(f"{shown_line(error.message)}{remedy}", retry_after_seconds=seconds)


def stream_failure(error: StreamedError, headers: Mapping[str, str]) -> KvferryError:
    """Return the error for an event that ends a stream whose request was accepted.

    Args:
        error: the event.
        headers: headers of the response.
    """
    why = shown_line(error.message) or "the server did not say why"
    return Unavailable(f"the answer failed: {why}{remedy_of(200, str(error.code or ''), None)}{_request(headers)}")


def remedy_of(status: int, code: str, retry_after_seconds: float | None) -> str:
    """Return what to do about an error, to be appended to a server's message; empty if its message says it.

    Args:
        status: HTTP status; 200 for an error in a stream.
        code: OpenAI's code of the error.
        retry_after_seconds: time after which a retry may succeed; `None` if the server named none.
    """
    if status == 401:
        return "; set KVFERRY_API_KEY or --api-key-file"
    if code.upper() == CONTEXT_LENGTH_EXCEEDED:
        return "; in a chat, /undo and /clear shorten the conversation"
    if status == 404:
        return "; leave out --model to use the first model that the gateway lists"
    if retry_after_seconds is not None:
        return f"; try again in {retry_after_seconds:g} s"
    if status == 429 or status >= 500 or status == 200:
        return "; try again"
    return ""


def _request(headers: Mapping[str, str]) -> str:
    """Return the request's id in brackets, under which the gateway's log has more; empty if there is none."""
    found = shown_line(headers.get("x-request-id", ""))
    return f" (request {found})" if found else ""


def _kind(status: int) -> type[KvferryError]:
    return _KINDS.get(status, InvalidRequest if 400 <= status < 500 else Unavailable)
