"""The routes of this folder, and their ASGI handler."""

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvferry.gateway.http.body_route import JSON, ApiContext, BodyRoute, note_ignored, while_connected
from kvferry.gateway.http.encoding.bodies import Answered
from kvferry.gateway.http.encoding.comparisons import answer_rerank, answer_score
from kvferry.gateway.http.encoding.embeddings import answer_embeddings
from kvferry.gateway.http.encoding.token_ids import answer_detokenize, answer_tokenize
from kvferry.serving.request import Caller
from kvferry.serving.text_service import TextService


class AnswerFunction(Protocol):
    """Function that answers a request."""

    def __call__(
        self, service: TextService, caller: Caller, body: bytes, *, is_strict: bool
    ) -> Coroutine[Any, Any, Answered]:
        """Return the body of the response, and the names of the request's fields without effect.

        Args:
            service: the served model, and the workers.
            caller: request id, tenant and time of arrival.
            body: body of the request, JSON.
            is_strict: whether unknown fields are refused.
        """
        ...


ANSWERS: Mapping[str, AnswerFunction] = {
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

    def __init__(self, context: ApiContext, answer: AnswerFunction) -> None:
        """
        Args:
            context: the gateway's objects that all routes use.
            answer: computes the body of the response.
        """
        super().__init__(context)
        self._answer = answer

    async def serve(self, request: Request, send: Send) -> None:
        """See `BodyRoute.serve`."""
        async with self.body(request) as (caller, body):
            context = self.context
            answering = self._answer(context.service, caller, body, is_strict=context.config.strict_fields)
            whole, ignored = await while_connected(request.receive, answering)
        note_ignored(request, ignored)
        await Response(whole, media_type=JSON)(request.scope, request.receive, send)
