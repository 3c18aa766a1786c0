"""Admin routes that pause generation and change the weights: /pause, /resume, /is_paused and /weights, and the routes
with the names and meanings of other servers.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.core.clock import Clock
from kvferry.core.errors import InvalidRequest, KvferryError, encodable, shortened
from kvferry.core.pausing import PauseMode
from kvferry.gateway.fleet.pool_generation import PoolGeneration
from kvferry.gateway.http.admin_access import WHO
from kvferry.gateway.http.client_api import error_response
from kvferry.gateway.http.fields.query import known, single_fields
from kvferry.gateway.http.openai import reply

PATHS = (
    "POST /pause",
    "POST /resume",
    "/is_paused",
    "/weights",
    "POST /weights",
    "POST /pause_generation",
    "POST /continue_generation",
    "POST /update_weights_from_disk",
)
_JSON = "application/json"
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_MAX_BODY_BYTES = 64 << 10
_DEFAULT_SECONDS = 60.0
"""Time for running requests to end or stop, without `timeout_seconds`."""
_MAX_SECONDS = 3600.0
_FORMATS = ("auto", "safetensors")
_MODES = {"abort": PauseMode.ABORT, "retract": PauseMode.KEEP, "in_place": PauseMode.KEEP}
"""Modes of /pause_generation. Both of the latter stop requests and keep their tokens; KV is computed again if, and only
if, the weights change."""
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GenerationRoutes:
    """Handlers of the routes and their dependencies."""

    generation: PoolGeneration
    reset_caches: Callable[[], Awaitable[Mapping[str, int]]]
    """Empties the prefix caches of all workers."""
    clock: Clock

    def routes(self) -> list[Route]:
        """Return the routes."""
        changes: dict[str, Callable[[Request], Awaitable[object]]] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/weights": self._change_weights,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_from_disk,
        }
        return [
            *(Route(path, partial(_answer, act), methods=["POST"]) for path, act in changes.items()),
            Route("/is_paused", partial(_answer, self._is_paused), methods=["GET"]),
            Route("/weights", partial(_answer, self._weights), methods=["GET"]),
        ]

    async def _pause(self, request: Request) -> object:
        given = _queried(request, ("mode", "clear_cache", "timeout_seconds"))
        known(await _object(request), ())
        mode = _mode(given.get("mode", "abort"), {mode.value: mode for mode in PauseMode})
        clear = _flag(given.get("clear_cache", "true"), "clear_cache")
        await self.generation.pause(mode, _who(request), _seconds(given.get("timeout_seconds", _DEFAULT_SECONDS)))
        if clear:
            await self.reset_caches()
        return {"status": "paused", **self._state()}

    async def _resume(self, request: Request) -> object:
        _queried(request)
        known(await _object(request), ())
        await self.generation.resume(_who(request))
        return {"status": "resumed", **self._state()}

    async def _is_paused(self, request: Request) -> object:
        _queried(request)
        return self._state()

    async def _weights(self, request: Request) -> object:
        _queried(request)
        weights = self.generation.rule.weights
        return {
            "version": weights.version,
            "revision": weights.revision,
            "digest": weights.digest,
            "path": weights.path,
        }

    async def _change_weights(self, request: Request) -> object:
        given = await _body(request, ("path", "version", "mode", "timeout_seconds"))
        mode = _mode(given.get("mode", "keep"), {mode.value: mode for mode in PauseMode})
        path, version = _text(given, "path"), _text({"version": "", **given}, "version", is_required=False)
        seconds = _seconds(given.get("timeout_seconds", _DEFAULT_SECONDS))
        await self.generation.update(path, version, mode, _who(request), seconds)
        return await self._weights(request)

    async def _pause_generation(self, request: Request) -> object:
        given = await _body(request, ("mode",))
        await self.generation.pause(_mode(given.get("mode", "abort"), _MODES), _who(request), _DEFAULT_SECONDS)
        return {"status": "ok", "message": "Generation paused successfully."}

    async def _continue_generation(self, request: Request) -> object:
        await _body(request, ())
        await self.generation.resume(_who(request))
        return {"status": "ok", "message": "Generation continued successfully."}

    async def _update_from_disk(self, request: Request) -> object:
        fields = ("model_path", "load_format", "flush_cache", "abort_all_requests", "weight_version")
        given = await _body(request, fields)
        if given.get("load_format") not in (None, *_FORMATS):
            raise InvalidRequest(f"load_format must be one of {', '.join(_FORMATS)}, or null", field="load_format")
        if not _flag(given.get("flush_cache", True), "flush_cache"):
            raise InvalidRequest(
                "flush_cache must be true: KV of the previous weights is never used again", field="flush_cache"
            )
        aborts = _flag(given.get("abort_all_requests", False), "abort_all_requests")
        version = _text({"weight_version": given.get("weight_version") or ""}, "weight_version", is_required=False)
        mode = PauseMode.ABORT if aborts else PauseMode.WAIT
        by = _who(request)
        if aborts and self.generation.rule.pause.mode is not None:
            await self.generation.pause(mode, by, _DEFAULT_SECONDS)
        await self.generation.update(_text(given, "model_path"), version, mode, by, _MAX_SECONDS)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _state(self) -> dict[str, object]:
        pause = self.generation.rule.pause
        return {
            "is_paused": pause.mode is not None,
            "mode": None if pause.mode is None else pause.mode.value,
            "by": pause.by if pause.mode is not None else "",
            "seconds": 0.0 if pause.mode is None else round(max(0.0, self.clock.wall() - pause.since), 3),
        }


async def _answer(act: Callable[[Request], Awaitable[object]], request: Request) -> Response:
    try:
        body = await act(request)
    except KvferryError as error:
        return error_response(error)
    return Response(reply.encode(body), headers=_HEADERS, media_type=_JSON)


def _who(request: Request) -> str:
    return str(request.scope.get(WHO, ""))


def _queried(request: Request, names: Sequence[str] = ()) -> Fields:
    """Return the parameters of a request's query, which has no other ones."""
    return known(single_fields(request.query_params), names)


async def _body(request: Request, names: Sequence[str]) -> Fields:
    """Return the fields of a request's body, which has no other ones; nor has its query any, which would be ignored."""
    _queried(request)
    return known(await _object(request), names)


async def _object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body; an empty body has no fields.

    Raises:
        InvalidRequest: the body is too large or not a JSON object.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequest(f"the body has more than {_MAX_BODY_BYTES} bytes; send only the documented fields")
    try:
        given = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest("the body must be a JSON object")
    return given


def _text(given: Fields, name: str, *, is_required: bool = True) -> str:
    value = given.get(name)
    if not isinstance(value, str) or (is_required and not value):
        raise InvalidRequest(f"{name} must be a {'non-empty ' if is_required else ''}string", field=name)
    if encodable(value) != value:
        raise InvalidRequest(f"{name} is not valid Unicode (an unpaired surrogate)", field=name)
    return value


def _mode(value: object, modes: Mapping[str, PauseMode]) -> PauseMode:
    if not isinstance(value, str) or value not in modes:
        raise InvalidRequest(f"mode must be one of {', '.join(modes)}, not {shortened(str(value))!r}", field="mode")
    return modes[value]


def _flag(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "True", "1", "false", "False", "0"):
        return value in ("true", "True", "1")
    raise InvalidRequest(f"{name} must be true or false", field=name)


def _seconds(value: object) -> float:
    seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        seconds = float(value)
    if not 0.0 <= seconds <= _MAX_SECONDS:
        raise InvalidRequest(
            f"timeout_seconds must be from 0 to {_MAX_SECONDS:.0f}, not {shortened(str(value))!r}",
            field="timeout_seconds",
        )
    return seconds
