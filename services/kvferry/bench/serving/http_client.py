"""Streams completions from an OpenAI-compatible server and records when their events arrive."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvferry.bench.workload.measures import MeasuredAnswer
from kvferry.bench.workload.requests import BenchRequest
from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable, UsageError

if TYPE_CHECKING:
    import httpx

_MAX_ERROR_CHARS = 200
_MAX_LINE_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """The measured server."""

    url: str
    """Base URL, such as `http://127.0.0.1:8000`."""
    model: str = ""
    """Model name; if empty, the first one that the server lists."""
    api_key: str = ""
    timeout: float = 600.0
    """Timeout of a request in seconds."""


class CompletionClient:
    """Client of one server. Use it as an asynchronous context manager."""

    def __init__(self, target: Target, clock: Clock, *, max_connections: int) -> None:
        """
        Args:
            target: server and model.
            clock: clock of the measurements.
            max_connections: maximum number of open connections.

        Raises:
            UsageError: httpx is not installed, or the URL is invalid.
        """
        try:
            import httpx
        except ImportError:
            raise UsageError("kvferry bench serve needs httpx; install kvferry[bench]") from None
        if not target.url.startswith(("http://", "https://")):
            raise UsageError(f"url {target.url!r} must start with http:// or https://", field="url")
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.AsyncClient(
            base_url=target.url.rstrip("/"), headers=headers, timeout=target.timeout, limits=limits
        )
        self._failures: tuple[type[Exception], ...] = (
            httpx.HTTPError, httpx.InvalidURL, httpx.StreamError,
            ValueError, KeyError, IndexError, TypeError, AttributeError,
        )  # fmt: skip
        """Exceptions for a server that does not answer, or whose answer does not conform to the API."""
        self._target, self._clock = target, clock
        self.model = target.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def find_model(self) -> None:
        """Set `model` to the first model of the server, unless the target names one.

        Raises:
            Unavailable: the server does not answer, or lists no models.
        """
        if self.model:
            return
        try:
            response = await self._http.get("/v1/models")
            response.raise_for_status()
            self.model = str(response.json()["data"][0]["id"])
        except self._failures as error:
            raise Unavailable(f"{self._target.url}/v1/models cannot be read: {_short(error)}") from error

    async def complete(self, request: BenchRequest, began: float) -> MeasuredAnswer:
        """Send a request and read its answer; an error is part of the answer.

        Args:
            request: the request.
            began: start of the run, in the clock's seconds.
        """
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.num_output,
            "min_tokens": request.num_output,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = self._clock.monotonic() - began
        times: list[float] = []
        sizes = (len(request.prompt), 0)
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread())[:_MAX_ERROR_CHARS].decode(errors="replace")
                    return self._failed(request, sent, f"HTTP {response.status_code}: {text}")
                async for message in _messages(response):
                    if any(choice.get("text") for choice in message.get("choices") or ()):
                        times.append(self._clock.monotonic() - began)
                    if usage := message.get("usage"):
                        sizes = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
                    if "error" in message:
                        return self._failed(request, sent, str(message["error"])[:_MAX_ERROR_CHARS])
        except self._failures as error:
            return self._failed(request, sent, _short(error))
        if not times:
            return self._failed(request, sent, "the answer has no text")
        return MeasuredAnswer(request.at, sent, tuple(times), sizes[0], sizes[1] or len(times))

    def _failed(self, request: BenchRequest, sent: float, error: str) -> MeasuredAnswer:
        return MeasuredAnswer(request.at, sent, (), len(request.prompt), 0, error)


async def _messages(response: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in response.aiter_lines():
        if len(line) > _MAX_LINE_CHARS:
            raise ValueError(f"the server sent an event of {len(line)} characters")
        if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
            continue
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("the server sent an event that is not a JSON object")
        yield message


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
