"""The HTTP server of a gateway: uvicorn on the gateway's event loop, one instance for each listening address."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvferry.core.addresses import join_address, listen_address
from kvferry.core.errors import cannot_listen
from kvferry.core.process.open_files import max_connections
from kvferry.gateway.http.server.http_protocol import ConnectionLimits, protocol_under
from kvferry.gateway.http.server.tls import Certificate

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 64
"""Number of connections that asyncio accepts before it runs their protocols, which close connections above the
limit."""
_SHARE_OF_FILES = 0.75
"""Share of the open files that is reserved for HTTP connections; the rest is for the gRPC server."""
_ACCEPT_LOG_SECONDS = 60.0
_SUPPRESSED = frozenset(
    {
        # asyncio's warning for each write after a client has disconnected during a stream.
        "socket.send() raised exception.",
        # uvicorn's warnings for each connection that does not send valid HTTP.
        "Invalid HTTP request received.",
        "Unsupported upgrade request.",
        (
            "No supported WebSocket library detected. Please use \"pip install 'uvicorn[standard]'\", or install "
            "'websockets' or 'wsproto' manually."
        ),
    }
)
_KEEP_ALIVE_SECONDS = 120.0
"""Default of the time in seconds after which an idle connection is closed. Longer than the idle timeouts of clients and
load balancers, so that they close first and never receive a reset."""


class HttpServer:
    """A uvicorn server on the running event loop, with its own listening socket."""

    def __init__(self, server: "_QuietUvicorn", bound: socket.socket) -> None:
        self._server = server
        host, port = bound.getsockname()[:2]
        self.address = join_address(host, port)
        self._serving = asyncio.create_task(server.serve(sockets=[bound]), name="http")

    @classmethod
    async def start(
        cls,
        app: ASGIApp,
        address: str,
        *,
        field: str,
        drain_seconds: float,
        certificate: Certificate | None = None,
        limits: ConnectionLimits | None = None,
        keepalive_seconds: float = _KEEP_ALIVE_SECONDS,
        shares_port: bool = False,
    ) -> "HttpServer":
        """Listen at `address` and serve `app` on the running event loop.

        Args:
            app: the ASGI application.
            address: `host:port`; port 0 selects a free port.
            field: name of the setting with the address, for error messages.
            drain_seconds: time limit for running responses in `stop`.
            certificate: enables TLS; `None` serves plain HTTP.
            limits: connection limits; by default `ConnectionLimits()`, with `max_connections` reduced to fit the limit
                of open files.
            keepalive_seconds: time after which an idle connection is closed.
            shares_port: whether other processes of this user may listen on the same address.

        Raises:
            UsageError: the address is invalid or cannot be bound.
        """
        logging.getLogger("asyncio").addFilter(_is_relevant)
        logging.getLogger("uvicorn.error").addFilter(_is_relevant)
        asyncio.get_running_loop().set_exception_handler(_RareAcceptErrors())
        bound = _bind(address, field, shares_port=shares_port)
        settings = uvicorn.Config(
            app,
            http=protocol_under(limits or _limits_here()),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_ACCEPTED_AT_ONCE,
            timeout_keep_alive=keepalive_seconds,  # type: ignore[arg-type]  # passed to call_later
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        settings.load()
        if certificate is not None:
            settings.ssl = certificate.context
        server = _QuietUvicorn(settings)
        running = cls(server, bound)
        started = asyncio.create_task(server.is_up.wait())
        await asyncio.wait((started, running._serving), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        bound.listen(_BACKLOG)  # uvicorn's own call of listen used a smaller backlog
        if running._serving.done():
            running._serving.result()
        return running

    async def stop(self) -> None:
        """Stop listening, and wait for running responses up to `drain_seconds`."""
        self._server.should_exit = True
        await self._serving


class _QuietUvicorn(uvicorn.Server):
    """Uvicorn server that installs no signal handlers and sets `is_up` after startup."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _is_relevant(record: logging.LogRecord) -> bool:
    return record.msg not in _SUPPRESSED


def _limits_here() -> ConnectionLimits:
    limits = ConnectionLimits()
    return replace(limits, max_connections=max_connections(limits.max_connections, _SHARE_OF_FILES))


class _RareAcceptErrors:
    """Event loop exception handler that logs errors of `accept` at most once a minute, since they repeat while the
    process is out of file descriptors."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_at:
            self._next_at = loop.time() + _ACCEPT_LOG_SECONDS
            _log.error("connections cannot be accepted: %s; raise the limit of open files", context.get("exception"))


def _bind(address: str, field: str, *, shares_port: bool) -> socket.socket:
    host, port = listen_address(address, field)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not socket.create_server, which leaves the protocol 0: asyncio sets TCP_NODELAY on accepted connections only if
    # the protocol is IPPROTO_TCP, and without it a response in two writes waits 40 ms for a delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
        return bound
    except OSError as error:
        bound.close()
        raise cannot_listen(field, address, error) from error
