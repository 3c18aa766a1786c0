"""The routes of responses: create, retrieve, delete, list the input's items."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvferry.core.errors import InvalidRequest, shortened
from kvferry.gateway.http.body_route import (
    JSON,
    ApiContext,
    BodyRoute,
    note_ignored,
    prepared,
    query_fields,
    while_connected,
)
from kvferry.gateway.http.fields.strict import Strict, parse_fields
from kvferry.gateway.http.openai.reply import encode
from kvferry.gateway.http.responses.carrier import CarrierKey
from kvferry.gateway.http.responses.creation import count, create
from kvferry.gateway.http.responses.output import DeletedResponse, InputTokens, ItemList
from kvferry.gateway.http.responses.store import KeptResponse, ResponseNotFound, ResponseStore


class ItemsQuery(Strict):
    """Query of GET /v1/responses/{response_id}/input_items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the item after which the list begins; `None` to begin with the first one."""


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
        self.create = _Create(context, store, secret)
        self.count_tokens = _CountTokens(context, store, secret)

    async def retrieve(self, request: Request) -> Response:
        """Answer GET /v1/responses/{response_id}.

        Raises:
            InvalidRequest: the request has query parameters.
            ResponseNotFound: the response is not stored.
        """
        kept = self._kept(request)
        if request.query_params:
            name = next(iter(request.query_params))
            raise InvalidRequest(f"{shortened(name)} is not supported; leave it out", field=shortened(name))
        return Response(kept.response, media_type=JSON)

    async def delete(self, request: Request) -> Response:
        """Answer DELETE /v1/responses/{response_id}."""
        tenant, response_id = self._named(request)
        self._opened(response_id).delete(tenant, response_id)
        return Response(encode(DeletedResponse(response_id)), media_type=JSON)

    async def input_items(self, request: Request) -> Response:
        """Answer GET /v1/responses/{response_id}/input_items.

        Raises:
            InvalidRequest: a query parameter is invalid, or `after` is not the id of an item.
            ResponseNotFound: the response is not stored.
        """
        kept = self._kept(request)
        query = parse_fields(ItemsQuery, query_fields(request.query_params), is_strict=True)
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

    def _opened(self, response_id: str) -> ResponseStore:
        if self._store is None:
            raise ResponseNotFound(
                f"response {shortened(response_id)!r} is not stored: this gateway stores no responses, because it runs "
                "as several processes",
                field="response_id",
            )
        return self._store

    def _kept(self, request: Request) -> KeptResponse:
        tenant, response_id = self._named(request)
        return self._opened(response_id).get(tenant, response_id, "response_id")


class _Create(BodyRoute):
    """ASGI handler of POST /v1/responses."""

    def __init__(self, context: ApiContext, store: ResponseStore | None, secret: bytes) -> None:
        super().__init__(context)
        self._store, self._secret = store, secret

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive = request.receive
        async with self.body(request) as (caller, body):
            context = self.context
            key, is_strict = CarrierKey.of(self._secret, caller.tenant), context.config.strict_fields
            creating = create(context.service, caller, body, self._store, key, is_strict=is_strict)
            made = await prepared(receive, body, creating)
            del body, creating
        note_ignored(request, made.ignored)
        if made.is_streamed:
            await self.stream(request, send, made.events(), end=b"", failed=made.failed)
        else:
            whole = await while_connected(receive, made.whole())
            await Response(whole, media_type=JSON)(request.scope, receive, send)


class _CountTokens(BodyRoute):
    """ASGI handler of POST /v1/responses/input_tokens."""

    def __init__(self, context: ApiContext, store: ResponseStore | None, secret: bytes) -> None:
        super().__init__(context)
        self._store, self._secret = store, secret

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        receive, context = request.receive, self.context
        async with self.body(request) as (caller, body):
            key, is_strict = CarrierKey.of(self._secret, caller.tenant), context.config.strict_fields
            counting = count(context.service, caller, body, self._store, key, is_strict=is_strict)
            num_tokens, ignored = await prepared(receive, body, counting)
        note_ignored(request, ignored)
        await Response(encode(InputTokens(num_tokens)), media_type=JSON)(request.scope, receive, send)


def _listed(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an item as it is listed: with an id, and the content of a message as parts."""
    listed = {"id": name, "status": "completed", **item}
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": content}
        listed["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
    return listed
