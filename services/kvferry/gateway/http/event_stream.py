"""Sends server-sent events as the body of an HTTP response."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.types import Send

from kvferry.core.errors import KvferryError


async def send_events(
    events: AsyncGenerator[bytes, None], send: Send, *, end: bytes, failed: Callable[[KvferryError], bytes]
) -> None:
    """Send a status and all events.

    Args:
        events: encoded events, at least one.
        send: ASGI `send` of the request.
        end: bytes after the last event.
        failed: returns the last event of a stream that fails after its first event; `end` is not sent then.

    Raises:
        KvferryError: the stream failed before its first event; no status was sent.
    """
    async with aclosing(events) as opened:
        # Wait for the first event before sending a status, so that a rejected request gets an ordinary error response.
        first = await anext(opened)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        last = end
        try:
            async for event in opened:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except KvferryError as error:
            last = failed(error)  # the status was already sent
    await send({"type": "http.response.body", "body": last, "more_body": False})
