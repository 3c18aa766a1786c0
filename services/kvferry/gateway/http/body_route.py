"""Routes with a body: it is declared as JSON, of bounded size and duration, within a budget for all bodies.

The ASGI handler of such a route cancels a request whose client disconnects. Answers may be server-sent events.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded, RequestCancelled, shortened
from kvferry.gateway.decide.config import HttpConfig
from kvferry.serving.request import EXPLAIN_HEADER, Caller
from kvferry.serving.text_service import LARGE_CHARS, TextService

if TYPE_CHECKING:  # its records have metrics, which bodies and answers do not import
    from kvferry.gateway.resume.resumption import StreamResumption

JSON = "application/json"
_DISCARD_SECONDS = 2.0
_MAX_LENGTH_DIGITS = 18
_SMALL_BODY_BYTES = 64 << 10
"""Bodies up to this size do not count towards `HttpConfig.max_buffered_bytes`."""
EVENT_STREAM = b"text/event-stream"
"""Media type of streams."""
_STREAM_HEADERS = (
    (b"content-type", EVENT_STREAM + b"; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
)
BATCH_TENANT = "kvferry.batch_tenant"
"""Entry of the scope of a request that the gateway makes itself, a line of a batch: its tenant."""
IGNORED = "kvferry.ignored"
"""Entry of a request's scope: the names of its fields without effect."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


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


def check_media_type(request: Request) -> None:
    """Reject bodies that are not declared as JSON: browsers send other types across sites without a preflight request.

    Raises:
        UnsupportedMedia: the media type is not JSON.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMedia(f"the body must be sent as {JSON}, not as {shortened(kind)!r}; set content-type")


def check_media(request: Request) -> None:
    """Reject bodies that are not declared as plain JSON.

    Raises:
        UnsupportedMedia: the media type is not JSON, or the body is compressed.
    """
    check_media_type(request)
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
        await discard_body(request)
        raise BodyTooLarge(f"the body has {shortened(length)} bytes; at most {limit} are accepted")
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_seconds):
            async for part in request.stream():
                body += part
                buffered.grow(len(body))
                if len(body) > limit:
                    await discard_body(request)
                    raise BodyTooLarge(f"the body has more than {limit} bytes")
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {config.body_timeout_seconds:g} s") from None
    except ClientDisconnect:
        raise RequestCancelled("the client disconnected while sending") from None
    return bytes(body)


async def discard_body(request: Request) -> None:
    """Receive the rest of a body for a short time: closing a connection with unread data would reset it, and the client
    would not receive the response."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (await request.receive()).get("more_body"):
                pass


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the handlers of the client API share."""

    service: TextService
    config: HttpConfig
    bodies: BodyBudget
    """Memory of the bodies that are being read."""
    resumption: "StreamResumption | None" = None
    """Continues the streams of clients that reconnect; `None` if this gateway keeps no records of streams."""

    def caller(self, request: Request) -> Caller:
        """Return the caller of `request`: request id, tenant, time of arrival.

        Raises:
            Unauthenticated: the API key is missing or unknown.
            Overloaded: too many unknown keys came from the client's address.
        """
        request_id, arrived = request.scope["kvferry.request_id"], self.service.clock.monotonic()
        batch_tenant: str | None = request.scope.get(BATCH_TENANT)
        if batch_tenant is not None:
            return Caller(request_id, batch_tenant, arrived=arrived, is_batch_line=True)
        address = request.client.host if request.client is not None else ""
        authorization = request.headers.get("authorization")
        if authorization is None and (key := request.headers.get("x-api-key")) is not None:
            authorization = f"Bearer {key}"  # Anthropic's clients
        tenant = self.service.tenant_of(authorization, address)
        return Caller(
            request_id,
            tenant,
            arrived=arrived,
            is_explained=EXPLAIN_HEADER in request.headers,
            address=address,
        )


class BodyRoute:
    """ASGI handler of a route whose requests have a body; no middleware runs around it. Subclasses define `serve`."""

    def __init__(self, context: ApiContext) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.serve(Request(scope, receive), send)
        except RequestCancelled as gone:
            _log.info("%s: %s", scope["path"], gone.message, extra={"request_id": scope["kvferry.request_id"]})

    async def serve(self, request: Request, send: Send) -> None:
        """Answer a request.

        Raises:
            KvferryError: the request failed before a status was sent.
        """
        raise NotImplementedError

    async def stream(
        self,
        request: Request,
        send: Send,
        events: AsyncGenerator[bytes, None],
        *,
        end: bytes,
        failed: Callable[[KvferryError], bytes],
    ) -> None:
        """Answer with server-sent events until they end or the client disconnects; see `send_events`."""
        keepalive_seconds = self.context.config.sse_keepalive_seconds
        sending = send_events(events, send, end=end, failed=failed, keepalive_seconds=keepalive_seconds)
        await while_connected(request.receive, sending)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[tuple[Caller, bytes]]:
        """Yield the caller and the body of a request; the body counts as buffered for the length of the `with`
        block."""
        caller = self.context.caller(request)
        check_media(request)
        with BufferedBody(self.context.bodies) as buffered:
            yield caller, await read_body(request, self.context.config, buffered)


async def prepared(receive: Receive, body: bytes, preparing: Coroutine[Any, Any, T]) -> T:
    """Await the preparation of a request. A large body waits for the text process, and the client may disconnect
    meanwhile.

    Args:
        receive: receives the events of the client's connection.
        body: body of the request.
        preparing: the preparation.

    Raises:
        RequestCancelled: the client disconnected.
    """
    return await (while_connected(receive, preparing) if len(body) >= LARGE_CHARS else preparing)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if the client disconnects.

    Args:
        receive: receives the events of the client's connection.
        work: the work to await.

    Raises:
        RequestCancelled: the client disconnected.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestCancelled("the client disconnected")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(
    events: AsyncGenerator[bytes, None],
    send: Send,
    *,
    end: bytes,
    failed: Callable[[KvferryError], bytes],
    keepalive_seconds: float = 0.0,
) -> None:
    """Send a status and all events.

    Args:
        events: encoded events; a stream may have none.
        send: ASGI `send` of the request.
        end: bytes after the last event.
        failed: returns the last event of a stream that fails after its status was sent; `end` is not sent then.
        keepalive_seconds: time without an event after which a comment is sent, for example while generation is
            paused; 0 sends none.

    Raises:
        KvferryError: the stream failed before its first event and its first comment; no status was sent.
    """
    is_begun = False

    async def begin() -> None:
        nonlocal is_begun
        if not is_begun:
            await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
            is_begun = True

    num_sent = 0
    sending = asyncio.Lock()  # a comment never splits an event

    async def keep_alive() -> None:
        while True:
            before = num_sent
            await asyncio.sleep(keepalive_seconds)
            if num_sent != before or sending.locked():
                continue
            async with sending:
                await begin()
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})

    async def send_event(event: bytes) -> None:
        nonlocal num_sent
        num_sent += 1
        async with sending:
            if not is_begun:
                await begin()
            await send({"type": "http.response.body", "body": event, "more_body": True})

    async with aclosing(events) as opened:
        keeping = asyncio.create_task(keep_alive()) if keepalive_seconds else None
        last = end
        try:
            # Wait for the first event before sending a status, so that a rejected request gets an ordinary error.
            first = await anext(opened, b"")
            await send_event(first)
            async for event in opened:
                await send_event(event)
        except KvferryError as error:
            await _cancelled(keeping)
            if not is_begun:
                raise
            last = failed(error)
        finally:
            await _cancelled(keeping)
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _cancelled(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task, and wait until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def note_ignored(request: Request, ignored: Sequence[str]) -> None:
    """Record the fields of a request that have no effect, for the response header and the metric of ignored fields."""
    request.scope[IGNORED] = ignored
