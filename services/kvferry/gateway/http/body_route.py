"""ASGI handler of a route with a body: reads it within the limits, and cancels a request whose client disconnects."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvferry.core.errors import RequestCancelled
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.http.request_body import BodyBudget, BufferedBody, check_media, read_body
from kvferry.serving.request import EXPLAIN_HEADER, Caller
from kvferry.serving.text_service import LARGE_CHARS, TextService

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What the handlers of the client API share."""

    service: TextService
    config: HttpConfig
    bodies: BodyBudget
    """Memory of the bodies that are being read."""

    def caller(self, request: Request) -> Caller:
        """Return the caller of `request`: request id, tenant, time of arrival.

        Raises:
            Unauthenticated: the API key is missing or unknown.
            Overloaded: too many unknown keys came from the client's address.
        """
        address = request.client.host if request.client is not None else ""
        tenant = self.service.tenant_of(request.headers.get("authorization"), address)
        return Caller(
            request.scope["kvferry.request_id"],
            tenant,
            arrived=self.service.clock.monotonic(),
            is_explained=EXPLAIN_HEADER in request.headers,
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
