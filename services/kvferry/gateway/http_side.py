"""The HTTP side: a Starlette app with OpenAI's routes, its error bodies, and no request that outlives its client."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.core.errors import InvalidRequest, InvariantBroken, KvferryError, RequestCancelled, UnknownModel
from kvferry.core.ids import RequestId, new_request_id
from kvferry.gateway import openai_api, openai_reply
from kvferry.gateway.config import HttpConfig
from kvferry.gateway.instruments import Instruments
from kvferry.gateway.journal import Journal
from kvferry.gateway.openai_api import Caller, Generation
from kvferry.rpc.text_service import TextService
from kvferry.rpc.wire import check_request_id

_log = logging.getLogger(__name__)
T = TypeVar("T")
_JSON = "application/json"
_DEBUG_HEADER = "x-kvferry-kv"
"""Sent with any value, it comes back with where the prompt's KV came from and what each way would have cost."""
_KNOWN_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics", "/fleet"}
)


class BodyTooLarge(InvalidRequest):
    """The request's body is larger than this server takes."""

    http_status = 413
    reason = "BODY_TOO_LARGE"


class UnsupportedMedia(InvalidRequest):
    """The request's body is not said to be plain JSON."""

    http_status = 415
    reason = "UNSUPPORTED_MEDIA_TYPE"


class BodyTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""

    http_status = 408
    reason = "BODY_TIMEOUT"


class NoSuchRoute(InvalidRequest):
    """There is nothing at this path, or not with this method."""

    http_status = 404
    reason = "NOT_FOUND"


class MethodNotAllowed(NoSuchRoute):
    """The path exists; the method does not."""

    http_status = 405
    reason = "METHOD_NOT_ALLOWED"


@dataclass(frozen=True, slots=True)
class HttpSide:
    """What the handlers need."""

    service: TextService
    config: HttpConfig
    instruments: Instruments
    readiness: Callable[[], tuple[bool, Sequence[str]]]
    """Whether a request would be served, and what there is to say about it."""
    journal: Journal
    report: Callable[[], Mapping[str, object]] = dict
    """The fleet, for an operator."""

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/chat/completions", _Generate(self, is_chat=True), methods=["POST"]),
            Route("/v1/completions", _Generate(self, is_chat=False), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/v1/requests/{request_id}", self._explain, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/fleet", self._fleet, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {
            KvferryError: _on_error,
            HTTPException: _on_http_exception,
            Exception: _on_unexpected,
        }
        return _Edge(Starlette(routes=routes, exception_handlers=handlers), self.instruments)

    def caller(self, request: Request) -> Caller:
        """Who sent `request`.

        Raises:
            Unauthenticated: nobody whom we know.
        """
        tenant = self.service.tenant_of(request.headers.get("authorization"))
        return Caller(request.scope["kvferry.request_id"], tenant, self.service.clock.monotonic())

    async def _models(self, request: Request) -> Response:
        self.caller(request)
        return Response(openai_reply.encode(openai_reply.ModelList([self._card()])), media_type=_JSON)

    async def _model(self, request: Request) -> Response:
        self.caller(request)
        asked = request.path_params["model"]
        if asked != self.service.model.name:
            raise UnknownModel(
                f"model {asked!r} is not served here; this is {self.service.model.name!r}", field="model"
            )
        return Response(openai_reply.encode(self._card()), media_type=_JSON)

    def _card(self) -> openai_reply.Model:
        model = self.service.model
        # When the weights were made is not known; clients only sort by it.
        return openai_reply.Model(model.name, created=0, max_model_len=model.max_model_tokens)

    async def _explain(self, request: Request) -> Response:
        tenant = self.caller(request).tenant
        request_id = RequestId(request.path_params["request_id"])
        samples = self.journal.find(tenant, request_id)
        if samples is None:
            raise NoSuchRoute(
                f"request {request_id!r} is not known here: it is still running, was answered by another gateway or "
                "before this one started, or many came since",
                field="request_id",
                reason="REQUEST_NOT_FOUND",
            )
        return Response(openai_reply.encode({"request_id": request_id, "samples": samples}), media_type=_JSON)

    async def _health(self, _request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type=_JSON)

    async def _ready(self, _request: Request) -> Response:
        ready, notes = self.readiness()
        body = openai_reply.encode({"ready": ready, "notes": list(notes)})
        return Response(body, 200 if ready else 503, media_type=_JSON)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self.instruments.registry), media_type=CONTENT_TYPE_LATEST)

    async def _fleet(self, _request: Request) -> Response:
        return Response(openai_reply.encode(self.report()), media_type=_JSON)


class _Generate:
    """Both generating routes, as bare ASGI: nothing stands between a token and the socket."""

    def __init__(self, side: HttpSide, *, is_chat: bool) -> None:
        self._side = side
        self._is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except RequestCancelled as gone:
            # Nobody is left to answer.
            _log.info("%s: %s", scope["path"], gone.message, extra={"request_id": scope["kvferry.request_id"]})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        caller = self._side.caller(request)
        _check_media(request)
        body = await _read_body(request, self._side.config)
        service = self._side.service
        if self._is_chat:
            generation = await openai_api.prepare_chat(service, caller, body)
        else:
            limit = self._side.config.max_prompts
            generation = await openai_api.prepare_completion(service, caller, body, limit)
        if generation.stream:
            await _while_connected(receive, _stream(generation, send))
        else:
            whole, timing = await _while_connected(receive, openai_api.answer(generation))
            headers = {_DEBUG_HEADER: openai_reply.kv_line(timing)} if _DEBUG_HEADER in request.headers else None
            await Response(whole, headers=headers, media_type=_JSON)(scope, receive, send)


async def _stream(generation: Generation, send: Send) -> None:
    async with aclosing(openai_api.events(generation)) as events:
        # The first event decides between a status and a stream, so that a refusal is an ordinary answer.
        first = await anext(events)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        end = await _rest(events, send)
    await send({"type": "http.response.body", "body": end, "more_body": False})


async def _rest(events: AsyncGenerator[bytes, None], send: Send) -> bytes:
    """Send what follows; what to end the body with."""
    try:
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    except KvferryError as error:
        # The status is out already: the error is the last event, and there is no [DONE].
        return b"data: " + openai_reply.error_body(error) + b"\n\n"
    return b"data: [DONE]\n\n"


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, but cancel it at once when the client goes away.

    Raises:
        RequestCancelled: it went.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestCancelled("the client went away")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_media(request: Request) -> None:
    """A page of another site may make a browser send it plain text unasked, but JSON only after we allowed it."""
    kind = request.headers.get("content-type", _JSON)
    if kind.partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMedia(f"the body must be sent as {_JSON}, not as {kind[:80]!r}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMedia(f"the body must be plain {_JSON}; content-encoding {encoding[:80]!r} is not implemented")


async def _read_body(request: Request, config: HttpConfig) -> bytes:
    limit = config.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(f"the body has {length} bytes; at most {limit} are accepted")
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise BodyTooLarge(f"the body has more than {limit} bytes")
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {config.body_timeout_seconds:g} s") from None
    except ClientDisconnect:
        raise RequestCancelled("the client went away while sending") from None
    return bytes(body)


class _Edge:
    """Around everything: the request id in and out, one count per answer, no stack trace to anybody outside."""

    def __init__(self, inner: ASGIApp, instruments: Instruments) -> None:
        self._inner = inner
        self._instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request_id, refusal = _request_id(scope)
        scope["kvferry.request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if refusal is not None:
                await _error_response(refusal)(scope, receive, send_with_id)
            else:
                await self._inner(scope, receive, send_with_id)
        except Exception:
            _log.exception("%s failed unexpectedly", scope["path"], extra={"request_id": request_id})
        finally:
            path = scope["path"] if scope["path"] in _KNOWN_PATHS else "other"
            self._instruments.requests.labels(path, str(status)).inc()


def _request_id(scope: Scope) -> tuple[RequestId, InvalidRequest | None]:
    """The client's own request id, or a new one, with an error when the client's cannot be used."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            try:
                return RequestId(check_request_id(value.decode("latin-1"))), None
            except InvalidRequest as refusal:
                return new_request_id(), refusal
    return new_request_id(), None


def _error_response(error: KvferryError) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_seconds)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(openai_reply.error_body(error), error.http_status, headers, _JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    level = logging.INFO if error.http_status < 500 else logging.WARNING
    extra = {"request_id": request.scope["kvferry.request_id"]}
    _log.log(level, "%s: %s: %s", request.url.path, error.reason, error.message, extra=extra)
    return _error_response(error)


async def _on_unexpected(_request: Request, _error: Exception) -> Response:
    # Starlette raises it again after this answer, and `_Edge` logs it.
    return _error_response(InvariantBroken("internal error; the gateway's log has the details under this request id"))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = MethodNotAllowed if error.status_code == 405 else NoSuchRoute
    what = (
        f"{request.method} {request.url.path} is not served here; see /v1/models, /v1/chat/completions, /v1/completions"
    )
    response = _error_response(kind(what))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
