"""The routes of responses: create, retrieve, cancel, delete, list the input's items."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvferry.core.errors import InvalidRequest, KvferryError, shortened
from kvferry.core.process.struct_types import describe
from kvferry.gateway.http.body_route import (
    JSON,
    ApiContext,
    BodyRoute,
    note_ignored,
    prepared,
    while_connected,
)
from kvferry.gateway.http.fields.query import query_fields
from kvferry.gateway.http.fields.strict import Strict, parse_fields
from kvferry.gateway.http.openai.reply import encode
from kvferry.gateway.http.responses.background import BackgroundRuns, NotStreamed
from kvferry.gateway.http.responses.carrier import CarrierKey
from kvferry.gateway.http.responses.compaction import compact
from kvferry.gateway.http.responses.creation import count, create, earlier_response
from kvferry.gateway.http.responses.output import DeletedResponse, InputTokens, ItemList
from kvferry.gateway.http.responses.store import KeptResponse, ResponseNotFound, ResponseStore, still_running


class ItemsQuery(Strict):
    """Query of GET /v1/responses/{response_id}/input_items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the item after which the list begins; `None` to begin with the first one."""


class RetrieveQuery(Strict):
    """Query of GET /v1/responses/{response_id}."""

    stream: bool = False
    """Whether the events of a response in the background are sent instead of the response."""
    starting_after: Annotated[int, Field(ge=0)] | None = None
    """Sequence number after which the events begin; `None` for all events."""
    include_obfuscation: bool | None = None
    """No effect: events have no padding."""


class ResponseRoutes:
    """Handlers of all routes of responses."""

    def __init__(self, context: ApiContext, store: ResponseStore | None, secret: bytes) -> None:
        """
        Args:
            context: the client API: service, limits and authentication.
            store: keeps responses; `None` if this gateway keeps none.
            secret: the pool's secret, from which the keys of carriers of reasoning are derived.
        """
        self._context = context
        self._store = store
        self._runs = None if store is None else BackgroundRuns(store)
        self.create = _Create(context, store, self._runs, secret)
        self.count_tokens = _CountTokens(context, store, secret)
        self.compact = _Compact(context, store, secret)
        self.retrieve = _Retrieve(context, store, self._runs)

    async def stop(self, seconds: float) -> None:
        """Wait for the responses in the background, and cancel those that run for longer than `seconds`."""
        if self._runs is not None:
            await self._runs.stop(seconds)

    async def cancel(self, request: Request) -> Response:
        """Answer POST /v1/responses/{response_id}/cancel; a response that has ended stays as it is.

        Raises:
            InvalidRequest: the response is not one in the background.
            ResponseNotFound: the response is neither running nor stored.
        """
        tenant, response_id = self._named(request)
        if self._runs is not None:
            await self._runs.cancel_anywhere(tenant, response_id)
        kept = await self._kept(request)
        if not msgspec.json.decode(kept.response, type=_Kind).background:
            raise InvalidRequest(
                "only a response in the background can be cancelled; close the connection to cancel another one",
                field="response_id",
            )
        return Response(kept.response, media_type=JSON)

    async def delete(self, request: Request) -> Response:
        """Answer DELETE /v1/responses/{response_id}; a running one is cancelled."""
        tenant, response_id = self._named(request)
        if self._runs is not None:
            await self._runs.cancel(tenant, response_id)
        await _opened(self._store, response_id).delete(tenant, response_id)
        return Response(encode(DeletedResponse(response_id)), media_type=JSON)

    async def input_items(self, request: Request) -> Response:
        """Answer GET /v1/responses/{response_id}/input_items.

        Raises:
            InvalidRequest: a query parameter is invalid, or `after` is not the id of an item.
            ResponseNotFound: the response is not stored.
        """
        kept = await self._kept(request)
        if kept.is_running:
            raise still_running(self._named(request)[1], "response_id")
        query = parse_fields(ItemsQuery, _queried(request), is_strict=True)
        name = request.path_params["response_id"]
        items = [_listed(item, f"{name}_{number}") for number, item in enumerate(msgspec.json.decode(kept.own_items))]
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            places = [number for number, item in enumerate(items) if item["id"] == query.after]
            if not places:
                raise InvalidRequest("after is not the id of an item of this response", field="after")
            items = items[places[0] + 1 :]
        page = items[: query.limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        listed = ItemList(page, first, last, has_more=len(items) > len(page))
        return Response(encode(listed), media_type=JSON)

    def _named(self, request: Request) -> tuple[str, str]:
        return self._context.caller(request).tenant, request.path_params["response_id"]

    async def _kept(self, request: Request) -> KeptResponse:
        tenant, response_id = self._named(request)
        return await _opened(self._store, response_id).read(tenant, response_id, "response_id")


class _Kind(msgspec.Struct):
    background: bool = False


describe(_Kind)


class _Create(BodyRoute):
    """ASGI handler of POST /v1/responses."""

    def __init__(
        self, context: ApiContext, store: ResponseStore | None, runs: BackgroundRuns | None, secret: bytes
    ) -> None:
        super().__init__(context)
        self._store, self._runs, self._secret = store, runs, secret

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive = request.receive
        async with self.body(request) as (caller, body):
            context = self.context
            key, is_strict = CarrierKey.of(self._secret, caller.tenant), context.config.strict_fields
            creating = create(
                context.service, caller, body, self._store, key, bodies=context.bodies, is_strict=is_strict
            )
            made = await prepared(receive, body, creating)
            del body, creating
        note_ignored(request, made.ignored)
        if made.is_background and self._runs is not None:
            run = await self._runs.begin(caller.tenant, made)
            if made.is_streamed:
                await self.stream(request, send, run.read(0), end=b"", failed=made.failed)
            else:
                await Response(made.so_far(), media_type=JSON)(request.scope, receive, send)
        elif made.is_streamed:
            await self.stream(request, send, made.events(), end=b"", failed=made.failed)
        else:
            whole = await while_connected(receive, made.whole())
            await Response(whole, media_type=JSON)(request.scope, receive, send)


class _Retrieve(BodyRoute):
    """ASGI handler of GET /v1/responses/{response_id}."""

    def __init__(self, context: ApiContext, store: ResponseStore | None, runs: BackgroundRuns | None) -> None:
        super().__init__(context)
        self._store, self._runs = store, runs

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`.

        Raises:
            InvalidRequest: a query parameter is invalid.
            NotStreamed: the events of a response are requested that has none.
            ResponseNotFound: the response is neither running nor stored.
        """
        tenant, name = self.context.caller(request).tenant, request.path_params["response_id"]
        query = parse_fields(RetrieveQuery, _queried(request), is_strict=True)
        run = None if self._runs is None else self._runs.find(tenant, name)
        kept = None if run is not None else await _opened(self._store, name).read(tenant, name, "response_id")
        if not query.stream:
            whole = run.creation.so_far() if run is not None else kept.response if kept is not None else b""
            await Response(whole, media_type=JSON)(request.scope, request.receive, send)
            return
        first = 0 if query.starting_after is None else query.starting_after + 1
        recorded = run.events if run is not None else kept.events if kept is not None else ()
        if kept is not None and kept.is_running:
            raise NotStreamed(
                f"the events of response {shortened(name)!r} are at the gateway that creates it until it has ended; "
                "ask without stream, or again later",
                field="stream",
            )
        if not recorded:
            raise NotStreamed(
                f"response {shortened(name)!r} has no events: only a request with background and stream records them",
                field="stream",
            )
        events = run.read(first) if run is not None else _replayed(recorded[first:])
        await self.stream(request, send, events, end=b"", failed=_no_event)


def _queried(request: Request) -> dict[str, Any]:
    """Return the fields of a query, without `include`: a response has what its creation included."""
    return query_fields(request.query_params, ("include", "include[]"))


async def _replayed(events: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for event in events:
        yield event


def _no_event(_error: KvferryError) -> bytes:
    return b""


def _opened(store: ResponseStore | None, response_id: str) -> ResponseStore:
    if store is None:
        raise ResponseNotFound(
            f"response {shortened(response_id)!r} is not stored: this gateway stores no responses, because it runs "
            "as several processes without --state",
            field="response_id",
        )
    return store


class _ReadsConversation(BodyRoute):
    """A route whose body may continue a stored response and have carriers."""

    def __init__(self, context: ApiContext, store: ResponseStore | None, secret: bytes) -> None:
        super().__init__(context)
        self._store, self._secret = store, secret


class _CountTokens(_ReadsConversation):
    """ASGI handler of POST /v1/responses/input_tokens."""

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive, context = request.receive, self.context
        async with self.body(request) as (caller, body):
            key, is_strict = CarrierKey.of(self._secret, caller.tenant), context.config.strict_fields
            counting = count(context.service, caller, body, self._store, key, is_strict=is_strict)
            num_tokens, ignored = await prepared(receive, body, counting)
        note_ignored(request, ignored)
        await Response(encode(InputTokens(num_tokens)), media_type=JSON)(request.scope, receive, send)


class _Compact(_ReadsConversation):
    """ASGI handler of POST /v1/responses/compact."""

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive, context = request.receive, self.context
        async with self.body(request) as (caller, body):
            key, is_strict = CarrierKey.of(self._secret, caller.tenant), context.config.strict_fields
            _, before = await earlier_response(caller, body, self._store)
            work = compact(context.service, caller, body, before, key, is_strict=is_strict)
            answer, ignored = await while_connected(receive, work)
        note_ignored(request, ignored)
        await Response(encode(answer), media_type=JSON)(request.scope, receive, send)


def _listed(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an item as it is listed: with an id, and the content of a message as parts."""
    listed = {"id": name, "status": "completed", **item}
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": content}
        listed["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
    return listed
