"""Admin routes of pinned prefixes: POST /pin_prefix, POST /unpin_prefix, GET /pins."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.core.errors import KvferryError
from kvferry.gateway.decide.config import HttpConfig
from kvferry.gateway.fleet.pins.fleet_pins import FleetPins, WorkerPin
from kvferry.gateway.fleet.pins.pin_book import Prefix
from kvferry.gateway.http.body_route import BodyBudget, BufferedBody, check_media, read_body
from kvferry.gateway.http.client_api import error_response
from kvferry.gateway.http.encoding.pin_bodies import PinBody, PrefixBody, read_prefix
from kvferry.gateway.http.openai import reply
from kvferry.serving.request import ClientIdentity
from kvferry.serving.text_service import TextService

_JSON = "application/json"
_ADMINISTRATOR = ClientIdentity("administrator")
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
PATHS = ("POST /pin_prefix", "POST /unpin_prefix", "/pins")


@dataclass(frozen=True, slots=True)
class PinRoutes:
    """Handlers of the routes and their dependencies."""

    service: TextService
    pins: FleetPins
    config: HttpConfig
    """Limits of the bodies, those of the client API."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        budget = BodyBudget(self.config.max_buffered_bytes)
        return [
            Route("/pin_prefix", partial(self._answer, self._pin, budget), methods=["POST"]),
            Route("/unpin_prefix", partial(self._answer, self._unpin, budget), methods=["POST"]),
            Route("/pins", self._list, methods=["GET"]),
        ]

    async def _answer(
        self, act: Callable[[bytes], Awaitable[dict[str, object]]], budget: BodyBudget, request: Request
    ) -> Response:
        try:
            check_media(request)
            with BufferedBody(budget) as buffered:
                answer = await act(await read_body(request, self.config, buffered))
        except KvferryError as error:
            return error_response(error)
        return Response(reply.encode(answer), headers=_HEADERS, media_type=_JSON)

    async def _list(self, _request: Request) -> Response:
        return Response(reply.encode(self.pins.report()), headers=_HEADERS, media_type=_JSON)

    async def _pin(self, body: bytes) -> dict[str, object]:
        ids, fields = await self.service.read(_ADMINISTRATOR, read_prefix, len(body), body, has_ttl=True)
        assert isinstance(fields, PinBody)
        made, waiting = await self.pins.pin(self._prefix(ids, fields), fields.ttl_seconds)
        return {"workers": _listed(made), "waiting": waiting}

    async def _unpin(self, body: bytes) -> dict[str, object]:
        ids, fields = await self.service.read(_ADMINISTRATOR, read_prefix, len(body), body, has_ttl=False)
        return {"workers": _listed(await self.pins.unpin(self._prefix(ids, fields)))}

    def _prefix(self, ids: Sequence[int], fields: PrefixBody) -> Prefix:
        """Return the prefix of a body.

        Raises:
            UnknownModel: neither the model nor an adapter has this name.
        """
        adapter = self.service.adapter_of(fields.model)
        return Prefix.of(ids, fields.tenant, fields.cache_salt or "", "" if adapter is None else adapter.name)


def _listed(pins: Sequence[WorkerPin]) -> list[dict[str, object]]:
    return [asdict(pin) for pin in pins]
