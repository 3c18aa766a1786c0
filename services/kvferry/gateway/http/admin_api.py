"""The admin HTTP API: metrics, fleet, ended requests. For operators; bound to loopback unless configured otherwise."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvferry.core.errors import KvferryError, shortened
from kvferry.core.ids import RequestId
from kvferry.gateway.dispatch.journal import Journal
from kvferry.gateway.http import openai_reply
from kvferry.gateway.http.client_api import NoSuchRoute, error_response

_JSON = "application/json"
_PATHS = ("/metrics", "/fleet", "/debug/requests/{id}", "POST /reset_prefix_cache", "/health")


@dataclass(frozen=True, slots=True)
class AdminApi:
    """Handlers of the admin API and their dependencies."""

    registry: CollectorRegistry
    journal: Journal
    report: Callable[[], Mapping[str, object]]
    """Function that returns the body of `GET /fleet`."""
    reset_caches: Callable[[], Awaitable[Mapping[str, int]]]
    """Empties the prefix caches of all workers; returns the number of dropped blocks by worker address."""

    def app(self) -> ASGIApp:
        """Create the ASGI application of the admin API."""
        routes = [
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/fleet", self._fleet, methods=["GET"]),
            Route("/debug/requests/{request_id}", self._request, methods=["GET"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _on_http_exception})

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _fleet(self, _request: Request) -> Response:
        return Response(openai_reply.encode(self.report()), media_type=_JSON)

    async def _request(self, request: Request) -> Response:
        request_id = RequestId(request.path_params["request_id"])
        found = self.journal.find_any(request_id)
        if not found:
            return error_response(
                NoSuchRoute(
                    f"request {shortened(request_id)!r} not found: it is still running, was served by another gateway, "
                    "or is older than the last 1,024 requests",
                    field="request_id",
                    reason="REQUEST_NOT_FOUND",
                )
            )
        body = {"request_id": request_id, "tenants": [{"tenant": name, "samples": samples} for name, samples in found]}
        return Response(openai_reply.encode(body), media_type=_JSON)

    async def _reset_prefix_cache(self, _request: Request) -> Response:
        try:
            dropped = await self.reset_caches()
        except KvferryError as error:
            return error_response(error)
        workers = [{"address": address, "num_blocks": count} for address, count in dropped.items()]
        return Response(openai_reply.encode({"workers": workers}), media_type=_JSON)

    async def _health(self, _request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type=_JSON)


async def _on_http_exception(request: Request, _error: Exception) -> Response:
    what = f"{request.method} {request.url.path[:200]} is not served on the admin port; it serves {', '.join(_PATHS)}"
    return error_response(NoSuchRoute(what))
