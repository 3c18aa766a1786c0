"""Receives a request's body: declared as JSON, of bounded size and duration, within a budget for all bodies."""

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request

from kvferry.core.errors import InvalidRequest, Overloaded, RequestCancelled, shortened
from kvferry.gateway.decide.config import HttpConfig

JSON = "application/json"
_DISCARD_SECONDS = 2.0
_MAX_LENGTH_DIGITS = 18
_SMALL_BODY_BYTES = 64 << 10
"""Bodies up to this size do not count towards `HttpConfig.max_buffered_bytes`."""


class BodyTooLarge(InvalidRequest):
    """The request's body is larger than `HttpConfig.max_body_bytes`."""

    http_status = 413
    reason = "BODY_TOO_LARGE"


class UnsupportedMedia(InvalidRequest):
    """The request's content type or encoding is not plain JSON."""

    http_status = 415
    reason = "UNSUPPORTED_MEDIA_TYPE"


class BodyTooSlow(InvalidRequest):
    """The request's body was not received within `HttpConfig.body_timeout_seconds`."""

    http_status = 408
    reason = "BODY_TIMEOUT"


class BodyBudget:
    """Bytes of all large bodies that are being received or read."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: maximum number of bytes.
        """
        self.limit = limit
        self.num_bytes = 0


class BufferedBody:
    """The share of one body in a budget; returned at the end of the `with` block."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._own = budget, 0

    def grow(self, size: int) -> None:
        """Record that the body has `size` bytes by now.

        Raises:
            Overloaded: the total size of all large bodies exceeds the limit.
        """
        if size <= _SMALL_BODY_BYTES:
            return
        budget, added = self._budget, size - self._own
        if budget.num_bytes + added > budget.limit:
            raise Overloaded(
                f"{budget.num_bytes} bytes of bodies are being received; at most {budget.limit} are buffered",
                retry_after_seconds=1.0,
            )
        budget.num_bytes += added
        self._own = size

    def __enter__(self) -> "BufferedBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.num_bytes -= self._own


def check_media(request: Request) -> None:
    """Reject bodies that are not declared as plain JSON: browsers send other types across sites without a preflight
    request.

    Raises:
        UnsupportedMedia: the media type is not JSON, or the body is compressed.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMedia(f"the body must be sent as {JSON}, not as {shortened(kind)!r}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMedia(
            f"the body must be plain {JSON}; content-encoding {shortened(encoding)!r} is not supported"
        )


async def read_body(request: Request, config: HttpConfig, buffered: BufferedBody) -> bytes:
    """Receive the body of a request.

    Args:
        request: the request, before its body is read.
        config: limits of size and time.
        buffered: share of the budget for all bodies; it grows with the body.

    Raises:
        BodyTooLarge: the body has more than `max_body_bytes` bytes.
        BodyTooSlow: the body did not arrive within `body_timeout_seconds`.
        Overloaded: the budget of all bodies is used up.
        RequestCancelled: the client disconnected.
    """
    limit = config.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > limit):
        await _discard_body(request)
        raise BodyTooLarge(f"the body has {shortened(length)} bytes; at most {limit} are accepted")
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_seconds):
            async for part in request.stream():
                body += part
                buffered.grow(len(body))
                if len(body) > limit:
                    await _discard_body(request)
                    raise BodyTooLarge(f"the body has more than {limit} bytes")
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {config.body_timeout_seconds:g} s") from None
    except ClientDisconnect:
        raise RequestCancelled("the client disconnected while sending") from None
    return bytes(body)


async def _discard_body(request: Request) -> None:
    """Receive the rest of a body for a short time: closing a connection with unread data would reset it, and the client
    would not receive the response."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (await request.receive()).get("more_body"):
                pass
