"""The admin HTTP API: dashboard, metrics, fleet, running and ended requests.

For operators; bound to loopback unless configured otherwise. Reading is open; changes need access (`admin_access`).
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvferry.core.errors import InvalidRequest, KvferryError, encodable, shortened
from kvferry.core.ids import RequestId
from kvferry.gateway.dispatch.journal import MAX_LISTED, Journal
from kvferry.gateway.http.admin_access import AdminAccess, ChangeGuard
from kvferry.gateway.http.browsers import BrowserGuard, BrowserRules
from kvferry.gateway.http.client_api import error_response
from kvferry.gateway.http.fields.query import known, single_fields
from kvferry.gateway.http.generation_routes import PATHS as GENERATION_PATHS
from kvferry.gateway.http.generation_routes import GenerationRoutes
from kvferry.gateway.http.ledger_route import PATHS as LEDGER_PATHS
from kvferry.gateway.http.ledger_route import LedgerRoute
from kvferry.gateway.http.openai import reply as openai_reply
from kvferry.gateway.http.page_files import PageFiles
from kvferry.gateway.http.pin_routes import PATHS as PIN_PATHS
from kvferry.gateway.http.pin_routes import PinRoutes
from kvferry.gateway.http.route_errors import NoSuchRoute, no_such_request
from kvferry.gateway.http.status_bodies import Ready
from kvferry.gateway.observe.dashboard.running import RunningSample

_JSON = "application/json"
_MAX_BODY_BYTES = 64 << 10
PATHS = (
    "/",
    "/metrics",
    "/fleet",
    "/debug/overview",
    "/debug/requests",
    "/debug/requests/{id}",
    "POST /reset_prefix_cache",
    *PIN_PATHS,
    *GENERATION_PATHS,
    *LEDGER_PATHS,
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "/health",
    "/ready",
)
_DEFAULT_LISTED = 50
"""Number of requests in a list without `limit`."""
_RESET_OPTIONS = ("reset_running_requests", "reset_external")
"""Parameters of vLLM's /reset_prefix_cache; both are false by default."""
_PRIVATE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
"""Headers of responses that must not be cached, since they change continuously and contain names of tenants."""


@dataclass(frozen=True, slots=True)
class AdminApi:
    """Handlers of the admin API and their dependencies."""

    registry: CollectorRegistry
    journal: Journal
    report: Callable[[], Mapping[str, object]]
    """Function that returns the body of `GET /fleet`."""
    reset_caches: Callable[[], Awaitable[Mapping[str, int]]]
    """Empties the prefix caches of all workers; returns the number of dropped blocks by worker address."""
    load_adapter: Callable[[str, str], Awaitable[Mapping[str, str]]]
    """Loads an adapter, given its name and path, on all workers; returns its digest by worker address."""
    unload_adapter: Callable[[str], Awaitable[Mapping[str, str]]]
    """Removes an adapter, given its name, from all workers; returns the digest that it had by worker address."""
    overview: Callable[[], Mapping[str, object]]
    """Function that returns the body of `GET /debug/overview`."""
    running: Callable[[], tuple[Sequence[RunningSample], int]]
    """Function that returns the oldest samples that run or wait, and the number of those left out."""
    readiness: Callable[[], tuple[bool, Sequence[str]]]
    """Function that returns whether requests are accepted, and the reasons."""
    pins: PinRoutes
    """Routes of pinned prefixes."""
    generation: GenerationRoutes
    """Routes that pause generation and change the weights."""
    ledger: LedgerRoute
    """Route of the tokens of each tenant."""
    rules: BrowserRules
    """Requests of browsers that are accepted."""
    access: AdminAccess
    """Who may make changes."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        page = PageFiles.dashboard()
        return [
            Route("/", page.index, methods=["GET"]),
            Route("/page/{file}", page.file, methods=["GET"]),
            Route("/debug/overview", self._overview, methods=["GET"]),
            Route("/debug/requests", self._requests, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/fleet", self._fleet, methods=["GET"]),
            Route("/debug/requests/{request_id}", self._request, methods=["GET"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            *self.pins.routes(),
            *self.generation.routes(),
            *self.ledger.routes(),
            Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
        ]

    def app(self) -> ASGIApp:
        """Create the ASGI application of the admin API."""
        app = Starlette(routes=self.routes(), exception_handlers={HTTPException: _on_http_exception})
        return BrowserGuard(ChangeGuard(app, self.access), self.rules, lambda _scope, error: error_response(error))

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _fleet(self, _request: Request) -> Response:
        return Response(openai_reply.encode(self.report()), headers=_PRIVATE, media_type=_JSON)

    async def _overview(self, _request: Request) -> Response:
        return Response(openai_reply.encode(self.overview()), headers=_PRIVATE, media_type=_JSON)

    async def _requests(self, request: Request) -> Response:
        try:
            given = known(single_fields(request.query_params), ("limit",)).get("limit", str(_DEFAULT_LISTED))
        except InvalidRequest as error:
            return error_response(error)
        if not (given.isascii() and given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= MAX_LISTED):
            return error_response(
                InvalidRequest(
                    f"limit must be a number from 1 to {MAX_LISTED}, not {shortened(given)!r}", field="limit"
                )
            )
        running, num_further = self.running()
        body = {
            "running": running,
            "num_further_running": num_further,
            "requests": self.journal.recent(int(given)),
        }
        return Response(openai_reply.encode(body), headers=_PRIVATE, media_type=_JSON)

    async def _request(self, request: Request) -> Response:
        request_id = RequestId(request.path_params["request_id"])
        found = self.journal.find_any(request_id)
        if not found:
            return error_response(no_such_request(self.journal.why_missing(request_id)))
        body = {"request_id": request_id, "tenants": [{"tenant": name, "samples": samples} for name, samples in found]}
        return Response(openai_reply.encode(body), headers=_PRIVATE, media_type=_JSON)

    async def _reset_prefix_cache(self, request: Request) -> Response:
        try:
            for name, value in known(single_fields(request.query_params), _RESET_OPTIONS).items():
                if value.lower() not in ("false", "0"):
                    raise InvalidRequest(f"{name} must be false: requests that run, and tiers, keep KV", field=name)
            dropped = await self.reset_caches()
        except KvferryError as error:
            return error_response(error)
        workers = [{"address": address, "num_blocks": count} for address, count in dropped.items()]
        return Response(openai_reply.encode({"workers": workers}), media_type=_JSON)

    async def _load_adapter(self, request: Request) -> Response:
        return await self._change_adapter(request, ("lora_name", "lora_path"), self.load_adapter)

    async def _unload_adapter(self, request: Request) -> Response:
        return await self._change_adapter(request, ("lora_name",), self.unload_adapter)

    async def _change_adapter(
        self, request: Request, names: Sequence[str], change: Callable[..., Awaitable[Mapping[str, str]]]
    ) -> Response:
        try:
            known(single_fields(request.query_params), ())
            changed = await change(*await _texts(request, names))
        except KvferryError as error:
            return error_response(error)
        workers = [{"address": address, "digest": digest} for address, digest in changed.items()]
        return Response(openai_reply.encode({"workers": workers}), media_type=_JSON)

    async def _ready(self, _request: Request) -> Response:
        is_ready, why = self.readiness()
        return Response(openai_reply.encode(Ready(is_ready, list(why))), 200 if is_ready else 503, media_type=_JSON)

    async def _health(self, _request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type=_JSON)


async def _texts(request: Request, names: Sequence[str]) -> list[str]:
    """Return the string fields of a request's JSON body.

    Raises:
        InvalidRequest: the body is too large or not a JSON object with exactly these fields.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequest(f"the body has more than {_MAX_BODY_BYTES} bytes; send only {', '.join(names)}")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest(f"the body must be a JSON object with the fields {', '.join(names)}")
    for name in given:
        if name not in names:
            raise InvalidRequest(
                f"{shortened(name)!r} is not a field of this request; remove it", field=shortened(name)
            )
    for name in names:
        if not isinstance(given.get(name), str) or not given[name]:
            raise InvalidRequest(f"{name} must be a non-empty string", field=name)
        if encodable(given[name]) != given[name]:
            raise InvalidRequest(f"{name} is not valid Unicode (an unpaired surrogate)", field=name)
    return [given[name] for name in names]


async def _on_http_exception(request: Request, _error: Exception) -> Response:
    what = f"{request.method} {request.url.path[:200]} is not served on the admin port; it serves {', '.join(PATHS)}"
    return error_response(NoSuchRoute(what))
