"""The gRPC server of every process: kvferry's services, standard health, reflection, graceful stop."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.core.addresses import listen_address
from kvferry.core.errors import UsageError
from kvferry.core.limits import MAX_MESSAGE_BYTES
from kvferry.rpc.access.call_keys import CallVerifier
from kvferry.rpc.access.guard import CallGuard
from kvferry.rpc.call_interceptor import CallInterceptor, OpenCalls
from kvferry.rpc.channel import KEEPALIVE_SECONDS, PING_OPTIONS, Options
from kvferry.rpc.unknown_methods import registered_methods_server

_log = logging.getLogger(__name__)
_REBIND_SECONDS = 0.02
_FLUSH_SECONDS = 0.25
"""Seconds to flush the last call's response before remaining streams (health watches) are closed."""

MAX_CONNECTIONS = 1024
"""Maximum number of connections to one server."""

_REUSEPORT = "grpc.so_reuseport"
_SERVER_OPTIONS: Options = (
    *PING_OPTIONS,
    # Connections without calls are pinged, too: a dead peer's connection would otherwise keep a file descriptor open.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every KEEPALIVE_SECONDS; by default, a server closes connections that ping so often.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    # Time after which a connection that has not sent its HTTP/2 preface is closed; two minutes by default.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two processes on one port are a configuration error; without SO_REUSEPORT the second bind fails.
    (_REUSEPORT, 0),
)


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service and its registration function."""

    name: str
    """Full name for health and reflection, for example `kvferry.v1.Prefill`."""
    add_to: Callable[[grpc.aio.Server], None]
    """Function that registers the servicer, for example `lambda server: add_PrefillServicer_to_server(servicer,
    server)`."""


class RpcServer:
    """A running server, created by `start_server`. Await `stop` before the event loop ends."""

    def __init__(
        self,
        build: Callable[[], grpc.aio.Server],
        bind: Callable[[grpc.aio.Server, str], int],
        calls: OpenCalls,
        names: Sequence[str],
        statuses: health.aio.HealthServicer,
    ) -> None:
        """
        Args:
            build: creates the gRPC server with all services; called again after gRPC has ended the server by itself.
            bind: binds a server to an address; returns the port, or raises `RuntimeError`.
            calls: calls in flight, counted by the server's interceptor.
            names: full names of the services, for health.
            statuses: statuses of the services in `grpc.health.v1.Health`.
        """
        self._build = build
        self._bind = bind
        self._names = names
        self._health = statuses
        self._server = build()
        self._serving: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.statuses = statuses
        """Statuses of the services in `grpc.health.v1.Health`, which another server may report too."""
        self.calls = calls
        """Calls in flight, except those of health and reflection."""
        self.address = ""
        """Bound address, `host:port`."""

    async def start(self, address: str) -> None:
        """Bind and serve.

        Raises:
            UsageError: the address cannot be bound.
        """
        try:
            bound = self._bind(self._server, address)
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {address}: {error}; another process may be using the port", field="grpc"
            ) from error
        self.address = f"{address.rpartition(':')[0]}:{bound}"
        await self.set_ready(False)
        await self._server.start()
        self._serving = asyncio.create_task(self._keep_serving(), name=f"grpc {self.address}")

    async def _keep_serving(self) -> None:
        """Serve again after gRPC has ended the server by itself, which an error in its loop does."""
        while True:
            try:
                await self._server.wait_for_termination()  # never cancelled: that would cancel what `stop` waits for
                return
            except Exception as error:
                _log.error("the gRPC server on %s ended: %r; it is started again", self.address, error)
            self._server = self._build()
            await self._rebind()
            if not self._is_stopping:
                await self._server.start()
            if self._is_stopping:  # `stop` may have ended only the earlier server
                await self._server.stop(None)
                return

    async def _rebind(self) -> None:
        """Bind the address again as soon as the ended server has closed it."""
        while not self._is_stopping:
            try:
                self._bind(self._server, self.address)
                return
            except RuntimeError:
                await asyncio.sleep(_REBIND_SECONDS)

    async def set_ready(self, ready: bool, *names: str) -> None:
        """Set the status of these services in `grpc.health.v1.Health`; without names, of all services and the server
        as a whole. The initial status is NOT_SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names or ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Reject new calls, wait up to `grace_seconds` for running calls, then cancel the rest. Idempotent."""
        self._is_stopping = True
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(grace_seconds))
        # Health watches never end; an idle server must not wait for them.
        idle = asyncio.create_task(self.calls.wait_idle())
        await asyncio.wait((stopping, idle), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if not stopping.done():
            await asyncio.wait((stopping,), timeout=_FLUSH_SECONDS)
        await self._server.stop(None)
        await stopping
        if self._serving is not None:
            await self._serving


async def start_server(
    address: str,
    services: Sequence[Service],
    *,
    credentials: Callable[[], grpc.ServerCredentials] | None = None,
    verifier: CallVerifier | None = None,
    advertised_hosts: Sequence[str] = (),
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int = MAX_CONNECTIONS,
    idle_seconds: float | None = None,
    statuses: health.aio.HealthServicer | None = None,
    shares_port: bool = False,
) -> RpcServer:
    """Serve `services`, health and reflection.

    Args:
        address: `host:port`; port 0 selects a free port.
        services: the services, each with a different name.
        credentials: makes TLS credentials, which gRPC can use for one server only; `None` disables TLS.
        verifier: checks the tokens of calls; `None` for a server for clients, which authenticate with API keys.
        advertised_hosts: further hosts, besides that of `address`, under which callers reach this server.
        max_request_bytes: limit of one request message.
        max_connections: further connections are closed at once.
        idle_seconds: connections without a call for this time are closed, and clients open new ones when they need
            them; `None`: never.
        statuses: statuses of another server that this one reports; `None` for its own.
        shares_port: whether other processes of this user may listen on the same address.

    Raises:
        UsageError: the address cannot be bound.
    """
    listen_address(address, "grpc")
    calls = OpenCalls()
    options: Options = (
        *_SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
    )
    if shares_port:
        options = (*(option for option in options if option[0] != _REUSEPORT), (_REUSEPORT, 1))
    if idle_seconds is not None:
        options = (*options, ("grpc.max_connection_idle_ms", round(idle_seconds * 1000)))
    guards = () if verifier is None else (CallGuard(verifier),)
    names = [service.name for service in services]
    shown = health.aio.HealthServicer() if statuses is None else statuses

    def build() -> grpc.aio.Server:
        server = registered_methods_server((*guards, CallInterceptor(calls)), options)
        for service in services:
            service.add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(shown, server)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def bind(server: grpc.aio.Server, address: str) -> int:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials())

    running = RpcServer(build, bind, calls, names, shown)
    await running.start(address)
    if verifier is not None:
        verifier.listen_at(running.address, *advertised_hosts)
    return running
