"""The HTTP API for clients: OpenAI's routes and error bodies; a request is cancelled when its client disconnects."""

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.core.errors import (
    InvalidRequest,
    InvariantBroken,
    KvferryError,
    Unavailable,
    UnknownModel,
    shortened,
)
from kvferry.core.ids import RequestId, new_request_id
from kvferry.core.traces.spans import TRACEPARENT, TRACESTATE, Span, TraceContext, Tracer, use_span
from kvferry.gateway.batches.batch_service import BatchService
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.dispatch.journal import Journal
from kvferry.gateway.http.batches.routes import BatchRoutes
from kvferry.gateway.http.body_route import (
    EVENT_STREAM,
    IGNORED,
    JSON,
    ApiContext,
    BodyBudget,
    BodyRoute,
    note_ignored,
    prepared,
    while_connected,
)
from kvferry.gateway.http.browsers import BrowserGuard, BrowserRules
from kvferry.gateway.http.encoding.routes import ANSWERS, UnaryRoute
from kvferry.gateway.http.fields.field_policy import Effect, FieldRule
from kvferry.gateway.http.fields.strict import effects
from kvferry.gateway.http.messages import output as messages
from kvferry.gateway.http.messages.routes import PATHS as MESSAGE_PATHS
from kvferry.gateway.http.messages.routes import CountMessageTokens, CreateMessage
from kvferry.gateway.http.openai import completions, token_generation
from kvferry.gateway.http.openai import reply as openai_reply
from kvferry.gateway.http.openai.generation import Generation, prepare_chat, prepare_completion
from kvferry.gateway.http.openai.token_generation import prepare_tokens
from kvferry.gateway.http.openapi.document import openapi_document
from kvferry.gateway.http.openapi.operations import OPERATIONS, PAGE
from kvferry.gateway.http.page_files import PageFiles
from kvferry.gateway.http.responses.memory_store import MemoryResponses
from kvferry.gateway.http.responses.routes import ResponseRoutes
from kvferry.gateway.http.responses.store import ResponseStore
from kvferry.gateway.http.route_errors import MethodNotAllowed, NoSuchRoute, no_such_request
from kvferry.gateway.http.status_bodies import Alive, Ready, Version
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.gateway.resume.event_ids import HEADER as LAST_EVENT_ID
from kvferry.gateway.resume.resumption import OpenedStream, StreamResumption, refuse_position
from kvferry.rpc.wire import check_request_id
from kvferry.serving.text_service import TextService

_log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"
_DEBUG_HEADER = "x-kvferry-kv"
"""Request header, any value. The same header of the response describes the source of the prompt's KV and the estimated
cost of loading and computing it."""
_IGNORED_HEADER = "kvferry-ignored"
"""Response header: the fields of the request that had no effect on the answer."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$-]")
_MAX_NAME_CHARS = 64
_MAX_RETRY_SECONDS = 60
"""Maximum of the header `retry-after`; official clients ignore longer times and retry at once."""
_ACCEPTED = frozenset(
    field
    for op in OPERATIONS
    if op.body is not None
    for field, rule in effects(op.body).items()
    if isinstance(rule, FieldRule) and rule.effect is Effect.ACCEPTED
)
"""Fields that have a label of their own in the metric of fields without effect."""
_COMPUTING_PATHS = frozenset(op.path for op in OPERATIONS if op.is_computed)
"""Paths whose requests are traced."""
_KNOWN_PATHS = frozenset(op.path for op in OPERATIONS if "{" not in op.path)


@dataclass(frozen=True, slots=True)
class ClientApi:
    """Handlers of the client API and their dependencies."""

    service: TextService
    config: HttpConfig
    instruments: GatewayInstruments
    readiness: Callable[[], tuple[bool, Sequence[str]]]
    """Function that returns whether a request would be served, and a note for each worker that accepts no requests."""
    journal: Journal
    needs_key: bool = False
    """Whether requests need an API key."""
    batches: BatchService | None = None
    """Files and batches; `None` if this gateway keeps none."""
    secret: bytes = b""
    """The pool's secret; empty for one of this process alone."""
    resumption: StreamResumption | None = None
    """Continues the streams of clients that reconnect; `None` if this gateway keeps no records of streams."""
    stored: ResponseStore | None = None
    """The stored responses of the pool; `None` for those of this process alone, if it keeps any."""
    context: ApiContext = field(init=False)
    """What the handlers share."""
    responses: ResponseRoutes = field(init=False)
    """Routes of responses, and those that are created in the background."""
    description: bytes = field(init=False)
    """The OpenAPI document, JSON."""

    def __post_init__(self) -> None:
        bodies = BodyBudget(self.config.max_buffered_bytes)
        object.__setattr__(self, "context", ApiContext(self.service, self.config, bodies, self.resumption))
        limits = self.config.kept_responses
        own = None if limits is None else MemoryResponses(limits, self.service.clock)
        responses = ResponseRoutes(self.context, self.stored or own, self.secret or secrets.token_bytes(32))
        object.__setattr__(self, "responses", responses)
        document = openapi_document(version("kvferry"), needs_key=self.needs_key)
        object.__setattr__(self, "description", openai_reply.encode(document))

    def routes(self) -> list[Route]:
        """Return the routes."""
        responses = self.responses
        batches = BatchRoutes(self.context, self.batches)
        handlers: dict[str, Any] = {
            "createChatCompletion": _Generate(self.context, is_chat=True),
            "createCompletion": _Generate(self.context, is_chat=False),
            "generateTokens": _GenerateTokens(self.context),
            "createMessage": CreateMessage(self.context),
            "countMessageTokens": CountMessageTokens(self.context),
            "createResponse": responses.create,
            "countResponseTokens": responses.count_tokens,
            "compactResponse": responses.compact,
            "retrieveResponse": responses.retrieve,
            "cancelResponse": responses.cancel,
            "deleteResponse": responses.delete,
            "listResponseItems": responses.input_items,
            "createFile": batches.create_file,
            "listFiles": batches.files,
            "retrieveFile": batches.file,
            "downloadFile": batches.content,
            "deleteFile": batches.delete_file,
            "createBatch": batches.create_batch,
            "listBatches": batches.batches,
            "retrieveBatch": batches.batch,
            "cancelBatch": batches.cancel_batch,
            "listModels": self._models,
            "retrieveModel": self._model,
            "explainRequest": self._explain,
            "getHealth": self._health,
            "ping": self._health,
            "getVersion": self._version,
            "getReadiness": self._ready,
            "getDescription": self._describe,
        }
        if self.config.has_page:
            page = PageFiles.chat()
            handlers |= {"getPage": page.index, "getPageFile": page.file}
        return [
            Route(op.path, handlers.get(op.name) or UnaryRoute(self.context, ANSWERS[op.path]), methods=[op.method])
            for op in OPERATIONS
            if op.name in handlers or op.name not in PAGE
        ]

    def app(self) -> ASGIApp:
        """Create the ASGI application of the client API."""
        failures: dict[Any, Any] = {
            KvferryError: _on_error,
            HTTPException: _on_http_exception,
            Exception: _on_unexpected,
        }
        rules = BrowserRules.of(self.config.address, self.config.allowed_hosts, self.config.cors_origins)
        app: ASGIApp = BrowserGuard(Starlette(routes=self.routes(), exception_handlers=failures), rules, _failure)
        if self.config.cors_origins:
            app = CORSMiddleware(
                app,
                self.config.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=("x-request-id", _IGNORED_HEADER, "retry-after"),
            )
        return _Edge(app, self.instruments, self.service)

    async def _models(self, request: Request) -> Response:
        tenant = self.context.caller(request).tenant
        cards = [card for card in self._cards() if self._may_use(tenant, card.id)]
        return Response(openai_reply.encode(openai_reply.ModelList(cards)), media_type=JSON)

    async def _model(self, request: Request) -> Response:
        tenant = self.context.caller(request).tenant
        name = request.path_params["model"]
        for card in self._cards():
            if card.id == name:
                self.service.check_access(tenant, name)
                return Response(openai_reply.encode(card), media_type=JSON)
        raise UnknownModel(
            f"model {shortened(name)!r} is not served here; use {self.service.model.name!r}", field="model"
        )

    def _may_use(self, tenant: str, model: str) -> bool:
        try:
            self.service.check_access(tenant, model)
        except UnknownModel:
            return False
        return True

    def _cards(self) -> list[openai_reply.ModelObject]:
        """Return the model and its adapters."""
        model, tokens = self.service.model, self.service.served_tokens
        # The weights' creation time is unknown; clients only sort by it.
        return [
            openai_reply.ModelObject(model.name, created=0, max_model_len=tokens),
            *(
                openai_reply.ModelObject(adapter.name, created=0, max_model_len=tokens, parent=model.name)
                for adapter in self.service.adapters()
            ),
        ]

    async def _explain(self, request: Request) -> Response:
        tenant = self.context.caller(request).tenant
        request_id = RequestId(request.path_params["request_id"])
        samples = self.journal.find(tenant, request_id)
        if samples is None:
            raise no_such_request(self.journal.why_missing(request_id, tenant))
        return Response(openai_reply.encode({"request_id": request_id, "samples": samples}), media_type=JSON)

    async def _health(self, _request: Request) -> Response:
        return Response(openai_reply.encode(Alive()), media_type=JSON)

    async def _version(self, _request: Request) -> Response:
        return Response(openai_reply.encode(Version(version("kvferry"))), media_type=JSON)

    async def _describe(self, _request: Request) -> Response:
        return Response(self.description, media_type=JSON)

    async def _ready(self, _request: Request) -> Response:
        ready, notes = self.readiness()
        body = openai_reply.encode(Ready(ready, list(notes)))
        return Response(body, 200 if ready else 503, media_type=JSON)


class _Generate(BodyRoute):
    """ASGI handler of both generating routes."""

    def __init__(self, context: ApiContext, *, is_chat: bool) -> None:
        super().__init__(context)
        self._is_chat = is_chat

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive, service, resumption = request.receive, self.context.service, self.context.resumption
        position, attempt = request.headers.get(LAST_EVENT_ID), None
        async with self.body(request) as (caller, body):
            config = self.context.config
            if resumption is not None:
                attempt = resumption.begin(caller.tenant, request.scope["path"], body, position)
                service = attempt.drawing(service)
            if self._is_chat:
                reading = prepare_chat(service, caller, body, is_strict=config.strict_fields)
            else:
                reading = prepare_completion(service, caller, body, config.max_prompts, is_strict=config.strict_fields)
            generation = await prepared(receive, body, reading)
            del body, reading  # a request that waits for room holds only its tokens
        note_ignored(request, generation.ignored)
        if generation.stream and resumption is not None and attempt is not None and generation.is_resumable:
            await self._stream_recorded(
                request, send, generation, await resumption.open(attempt, generation.service, generation.requests[0])
            )
        elif generation.stream:
            why = "this gateway has no --state" if resumption is None else "a stream with several sequences has no ids"
            refuse_position(position, why)
            events = completions.events(generation)
            await self.stream(request, send, events, end=_DONE, failed=_last_event)
        else:
            whole, timing = await while_connected(receive, completions.answer(generation))
            headers = {_DEBUG_HEADER: openai_reply.kv_line(timing)} if _DEBUG_HEADER in request.headers else None
            await Response(whole, headers=headers, media_type=JSON)(request.scope, receive, send)

    async def _stream_recorded(
        self, request: Request, send: Send, generation: Generation, opened: OpenedStream
    ) -> None:
        """Answer with a stream that another gateway can continue."""
        continued = replace(generation, service=opened.service, requests=(opened.request,), created=opened.created)
        try:
            events = completions.events(continued, opened.ids)
            await self.stream(request, send, events, end=_DONE, failed=_last_event)
            if opened.ids.is_finished:
                opened.record.end()
        finally:
            opened.record.leave()


class _GenerateTokens(BodyRoute):
    """ASGI handler of generations from token ids to token ids."""

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive, context = request.receive, self.context
        async with self.body(request) as (caller, body):
            strict = context.config.strict_fields
            made = await prepared(receive, body, prepare_tokens(context.service, caller, body, is_strict=strict))
            del body
        note_ignored(request, made.generation.ignored)
        if made.generation.stream:
            events = token_generation.events(made)
            await self.stream(request, send, events, end=_DONE, failed=_last_event)
        else:
            whole = await while_connected(receive, token_generation.answer(made))
            await Response(whole, media_type=JSON)(request.scope, receive, send)


def _last_event(error: KvferryError) -> bytes:
    """Return the last event of a stream that failed, which has no [DONE]."""
    return b"data: " + openai_reply.error_body(error) + b"\n\n"


class _Edge:
    """ASGI wrapper: assigns the request id, traces and counts each response, keeps stack traces out of responses."""

    def __init__(self, inner: ASGIApp, instruments: GatewayInstruments, service: TextService) -> None:
        self._inner = inner
        self._instruments = instruments
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["kvferry.request_id"] = request_id
        status, has_events = 0, False
        tracer = self._service.tracer()
        span = None if tracer is None else _begin_span(tracer, scope, request_id, self._service.clock.monotonic())

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_events
            if message["type"] == "http.response.start":
                status = message["status"]
                has_events = any(value.startswith(EVENT_STREAM) for _, value in message["headers"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if scope["path"] in MESSAGE_PATHS:
                    message["headers"].append((b"request-id", request_id.encode()))
                if scope.get(IGNORED):
                    message["headers"].append((_IGNORED_HEADER.encode(), _header_of(scope[IGNORED])))
                if span is not None:
                    message["headers"].append((b"traceresponse", span.context.traceparent.encode()))
            await send(message)

        try:
            await self._inner(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server cancels what runs at the end of its drain
            if status and not has_events:
                raise
            cut = Unavailable("the gateway is stopping; send the request again", retry_after_seconds=1.0)
            _log.info("%s: cut at the end of the drain", shortened(scope["path"]), extra={"request_id": request_id})
            if has_events:
                await send({"type": "http.response.body", "body": _cut_event(scope, cut), "more_body": False})
            else:
                await _failure(scope, cut)(scope, receive, send_with_id)
        except Exception:
            _log.exception("%s failed unexpectedly", shortened(scope["path"]), extra={"request_id": request_id})
        finally:
            path = scope["path"] if scope["path"] in _KNOWN_PATHS else "other"
            self._instruments.requests.labels(path, str(status)).inc()
            for name in scope.get(IGNORED, ()):
                self._instruments.ignored_fields.labels(name if name in _ACCEPTED else "unknown").inc()
            if span is not None:
                span.set({"http.response.status_code": status})
                span.end("" if 0 < status < 500 else f"status_{status}" if status else "cancelled")


def _begin_span(tracer: Tracer, scope: Scope, request_id: RequestId, now: float) -> Span | None:
    """Begin the span of a request that uses workers, and make it the current one; `None` if it is not traced."""
    path = scope["path"]
    if path not in _COMPUTING_PATHS:
        return None
    headers = Headers(scope=scope)
    parent = TraceContext.parse(headers.get(TRACEPARENT), headers.get(TRACESTATE))
    attributes = {
        "http.request.method": scope["method"],
        "http.route": path,
        "kvferry.request_id": request_id,
    }
    span = tracer.begin(f"{scope['method']} {path}", parent, now, attributes)
    use_span(span)  # uvicorn runs each request in its own task
    return span


def _request_id(scope: Scope) -> RequestId:
    """Return the client's request id, or a new one if there is none that is safe in log lines and headers."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            with suppress(InvalidRequest):
                return RequestId(check_request_id(value.decode("latin-1")))
    return new_request_id()


def _header_of(names: Sequence[str]) -> bytes:
    """Return the value of the header that names the fields without effect."""
    return ", ".join(_UNSAFE.sub("?", name[:_MAX_NAME_CHARS]) for name in names).encode()


def _failure(scope: Scope, error: KvferryError) -> Response:
    """Return the response to a request that failed, in the form of its route."""
    if scope["path"] in MESSAGE_PATHS:
        return error_response(error, messages.error_body(error, scope["kvferry.request_id"]))
    return error_response(error)


def _cut_event(scope: Scope, error: KvferryError) -> bytes:
    """Return the last event of a stream that is cut, in the form of its route, with the time after which the client may
    reconnect."""
    retry = b"retry: %d\n" % round(1e3 * (error.retry_after_seconds or 0.0))
    if scope["path"] in MESSAGE_PATHS:
        return b"event: error\n" + retry + b"data: " + messages.error_body(error, scope["kvferry.request_id"]) + b"\n\n"
    return retry + _last_event(error)


def error_response(error: KvferryError, body: bytes | None = None) -> Response:
    """Return a response with the error's HTTP status and headers.

    Args:
        error: the error.
        body: body of the response, JSON; `None` for OpenAI's error body.
    """
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(min(max(1, math.ceil(error.retry_after_seconds)), _MAX_RETRY_SECONDS))
    if error.http_status in (408, 413):  # the rest of the body would be read as the next request
        headers["connection"] = "close"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(openai_reply.error_body(error) if body is None else body, error.http_status, headers, JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    level = logging.INFO if error.http_status < 500 else logging.WARNING
    extra = {"request_id": request.scope["kvferry.request_id"]}
    _log.log(level, "%s: %s: %s", shortened(request.url.path), error.reason, error.message, extra=extra)
    return _failure(request.scope, error)


async def _on_unexpected(request: Request, _error: Exception) -> Response:
    # Starlette re-raises the exception after this response, and `_Edge` logs it.
    hidden = InvariantBroken("internal error; the gateway's log has the details under this request id")
    return _failure(request.scope, hidden)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = MethodNotAllowed if error.status_code == 405 else NoSuchRoute
    path = request.url.path
    is_admin = path in {"/metrics", "/fleet"}
    lists = (
        "the admin port serves it (--admin)"
        if is_admin
        else "GET /openapi.json lists the routes, such as POST /v1/chat/completions, /v1/completions, /v1/responses, "
        "/v1/messages and /v1/embeddings"
    )
    what = f"{request.method} {shortened(path)} is not served here; {lists}"
    response = _failure(request.scope, kind(what))
    if kind is MethodNotAllowed:
        response.headers["allow"] = ", ".join(_methods_of(request))
    return response


def _methods_of(request: Request) -> list[str]:
    """Return the methods of the request's path; each may have its own route. The first path that matches is meant: a
    later one has a parameter in place of the other's last part."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching if route.path == matching[0].path for method in route.methods or ()})
