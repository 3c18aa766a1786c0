"""An HTTP connection with limits that uvicorn's protocol lacks.

| limit | action when exceeded |
| --- | --- |
| bytes and number of headers | response 431, connection closed |
| bytes of chunk framing and trailers | connection closed; trailers are dropped: they must not authenticate |
| seconds until the headers are complete, or a body to which the response was sent | connection closed |
| seconds during which a client reads nothing | connection aborted; same effect as a client's disconnect |
| number of connections | the connection that has been idle longest is closed; if none is idle, the new one is closed |
"""

import asyncio
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the HTTP connections of one server."""

    max_connections: int = 4096
    max_header_bytes: int = 32 << 10
    """Maximum bytes of request line and headers."""
    max_headers: int = 100
    max_framing_bytes: int = 64 << 10
    """Maximum bytes of chunk sizes and trailers, in addition to `_FRAMING_PER_BYTE` bytes per byte of the body."""
    header_seconds: float = 10.0
    """Maximum number of seconds from opening the connection, or from the first byte of a later request, to the end of
    the headers."""
    max_pipelined: int = 16
    """Maximum number of requests on one connection that wait for the answers to earlier ones."""
    read_seconds: float = 30.0
    """Maximum number of seconds for which a client may read nothing of a pending response."""


_FRAMING_PER_BYTE = 6
"""Framing allowed per byte of the body, in bytes; a chunk of one byte has five bytes of framing."""


_UPGRADE = re.compile(rb"((?:^|\n)[ \t]*)upgrade:", re.IGNORECASE)
"""Header that offers another protocol. It is ignored (RFC 9110, section 7.8), since the parser would stop there and
drop the body."""


def _without_upgrade(data: bytes) -> bytes:
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(rb"\1ignored:", head) + end + rest


class _Refused(Exception):
    """A request exceeds a limit; `status` is the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class BoundedProtocol(HttpToolsProtocol):
    """A connection with `limits`, a class attribute that subclasses set, since uvicorn creates the instances."""

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._framing_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._refused: _Refused | None = None
        self.idle_since = 0.0
        """Event loop time in seconds at which the last request ended, or the connection was opened."""

    @property
    def is_idle(self) -> bool:
        """Whether no requests are in progress on the connection."""
        return self._head_bytes == 0 and (self.cycle is None or self.cycle.response_complete)

    # -- connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        self.idle_since = self.loop.time()
        if len(self.connections) >= self.limits.max_connections and not self._evict_idle():
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.limits.header_seconds, self._close_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def _evict_idle(self) -> bool:
        idle = [c for c in self.connections if isinstance(c, BoundedProtocol) and c.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda c: c.idle_since)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _close_silent(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._read_timer = None

    # -- request ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused is not None or self.transport.is_closing():
            return
        was_in_head = self._in_head
        if was_in_head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.limits.header_seconds, self._close_silent)
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)  # `on_body` subtracts the bytes of the body
        super().data_received(_without_upgrade(data) if was_in_head else data)
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(self._too_large())
        elif not self._in_head and self._framing_bytes > self.limits.max_framing_bytes:
            self._refuse(_Refused(431, "the chunks' framing and trailers are too large"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # otherwise this is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.limits.max_header_bytes or len(self.headers) > self.limits.max_headers:
            self._refused = self._too_large()
            raise self._refused  # the parser stops; `send_400_response` sends the response
        self._refused = self._misframed()
        if self._refused is not None:
            raise self._refused
        if len(self.pipeline) >= self.limits.max_pipelined:
            self._refused = _Refused(400, f"more than {self.limits.max_pipelined} pipelined requests")
            raise self._refused
        self._in_head = False
        self._head_bytes = self._framing_bytes = 0
        self._cancel_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) * (1 + _FRAMING_PER_BYTE)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._cancel_head_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        if not self._in_head and self._head_timer is None:  # the body is no longer needed, but may never end
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._close_silent)
        super().on_response_complete()

    def _misframed(self) -> _Refused | None:
        """Return the error of a request that a proxy and this server could read differently (RFC 9112, sections 3.2,
        6.1); `None` if there is none. The parser rejects a Content-Length with a Transfer-Encoding itself."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            return _Refused(501, "Transfer-Encoding must be chunked; send the body without other transfer codings")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return _Refused(400, f"the request has {hosts} Host headers; send exactly one")
        return None

    # -- error responses -------------------------------------------------------------------------------------------

    def _too_large(self) -> _Refused:
        return _Refused(
            431,
            f"the headers have more than {self.limits.max_header_bytes} bytes or {self.limits.max_headers} fields",
        )

    def _refuse(self, refused: _Refused) -> None:
        self._refused = refused
        self.send_400_response(refused.message)

    def send_400_response(self, msg: str) -> None:
        """Send an error in OpenAI's format, with the status of the exceeded limit or 400, and close the connection."""
        refused = self._refused or _Refused(400, "the request is not valid HTTP")
        self._refused = refused
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # a response to an earlier request is being sent
            return
        code = "headers_too_large" if refused.status == 431 else "invalid_http"
        error = {"message": refused.message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[refused.status] + head + body)
        self.transport.close()

    # -- slow readers ----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._read_timer = self.loop.call_later(self.limits.read_seconds, self._abort_reader)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()

    def _abort_reader(self) -> None:
        self._read_timer = None
        _log.info("a client read nothing for %g s; its connection is closed", self.limits.read_seconds)
        self.transport.abort()


def protocol_under(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """Create a subclass of `BoundedProtocol` with these limits."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
