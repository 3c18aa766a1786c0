"""The routes of this folder, and their ASGI handler."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvferry.gateway.http.body_route import JSON, ApiContext, BodyRoute, while_connected
from kvferry.gateway.http.encoding.comparisons import answer_rerank, answer_score
from kvferry.gateway.http.encoding.embeddings import answer_embeddings
from kvferry.gateway.http.encoding.token_ids import answer_detokenize, answer_tokenize
from kvferry.serving.request import Caller
from kvferry.serving.text_service import TextService

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


class UnaryRoute(BodyRoute):
    """ASGI handler of a route that answers with one JSON body, not with a stream."""

    def __init__(self, context: ApiContext, answer: Answer) -> None:
        """
        Args:
            context: the gateway's objects that all routes use.
            answer: computes the body of the answer.
        """
        super().__init__(context)
        self._answer = answer

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        async with self.body(request) as (caller, body):
            whole = await while_connected(request.receive, self._answer(self.context.service, caller, body))
        await Response(whole, media_type=JSON)(request.scope, request.receive, send)
