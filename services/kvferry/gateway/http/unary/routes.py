"""The routes of this folder, and their ASGI handler; a request is cancelled when its client disconnects."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.core.errors import RequestCancelled
from kvferry.gateway.config import HttpConfig
from kvferry.gateway.http.openai.api import Caller
from kvferry.gateway.http.request_body import JSON, BodyBudget, BufferedBody, check_media, read_body
from kvferry.gateway.http.unary.comparisons import answer_rerank, answer_score
from kvferry.gateway.http.unary.embeddings import answer_embeddings
from kvferry.gateway.http.unary.token_ids import answer_detokenize, answer_tokenize
from kvferry.rpc.text.text_service import TextService

_log = logging.getLogger(__name__)
T = TypeVar("T")
Answer = Callable[[TextService, Caller, bytes], Coroutine[Any, Any, bytes]]

ANSWERS: Mapping[str, Answer] = {
    "/v1/embeddings": answer_embeddings,
    "/v1/score": answer_score,
    "/score": answer_score,
    "/v1/rerank": answer_rerank,
    "/rerank": answer_rerank,
    "/tokenize": answer_tokenize,
    "/detokenize": answer_detokenize,
}
"""The functions that answer a request, by path; all with method POST."""


class Side(Protocol):
    """The part of the client API that the handlers use."""

    @property
    def service(self) -> TextService: ...

    @property
    def config(self) -> HttpConfig: ...

    @property
    def bodies(self) -> BodyBudget: ...

    def caller(self, request: Request) -> Caller:
        """Return the caller of a request, whose API key has been checked."""
        ...


class UnaryRoute:
    """ASGI handler of one route."""

    def __init__(self, side: Side, answer: Answer) -> None:
        self._side = side
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except RequestCancelled as gone:
            _log.info("%s: %s", scope["path"], gone.message, extra={"request_id": scope["kvferry.request_id"]})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, side = Request(scope, receive), self._side
        caller = side.caller(request)
        check_media(request)
        with BufferedBody(side.bodies) as buffered:
            body = await read_body(request, side.config, buffered)
            whole = await while_connected(receive, self._answer(side.service, caller, body))
        await Response(whole, media_type=JSON)(scope, receive, send)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it if the client disconnects.

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
