"""Sends the requests of batches to the client API of this process, without a connection."""

import asyncio
from typing import Any

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from kvferry.gateway.batches.batch_run import LineAnswer
from kvferry.gateway.http.body_route import BATCH_TENANT, JSON


class _Error(Struct):
    code: str = ""


class _ErrorBody(Struct):
    error: _Error


_decoder = msgspec.json.Decoder(_ErrorBody)


class InnerCall:
    """Implements `LineCall`: a request takes the way of a client's request, except for its authentication."""

    def __init__(self, app: ASGIApp) -> None:
        """
        Args:
            app: the client API.
        """
        self._app = app

    async def __call__(self, tenant: str, path: str, body: bytes) -> LineAnswer:
        """See `LineCall.__call__`."""
        exchange = _Exchange(body)
        headers = [
            (b"content-type", JSON.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            BATCH_TENANT: tenant,
        }
        await self._app(scope, exchange.receive, exchange.send)
        return exchange.answer()


class _Exchange:
    """One request and its answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers = Headers()
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """Return the body; the client never disconnects: the task is cancelled instead."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Keep a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = Headers(raw=message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def answer(self) -> LineAnswer:
        """Return the whole answer."""
        body, code = b"".join(self._parts), ""
        if self._status >= 400:
            try:
                code = _decoder.decode(body).error.code
            except msgspec.MsgspecError:
                body = msgspec.json.encode({"error": {"message": "internal error", "code": "internal"}})
        wait = self._headers.get("retry-after", "")
        seconds = float(wait) if wait.isdecimal() else None
        return LineAnswer(self._status, self._headers.get("x-request-id", ""), body, seconds, code)
