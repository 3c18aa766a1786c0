"""A gRPC server as every process runs it: own services, standard health, reflection, an honest stop."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.core.errors import UsageError
from kvferry.rpc.calls import CallInterceptor, OpenCalls
from kvferry.rpc.channel import KEEPALIVE_SECONDS, MAX_MESSAGE_BYTES, PING_OPTIONS, Options

_FLUSH_SECONDS = 0.25
"""After the last of our calls: time for its answer to leave before what remains (health watches) is cut."""

_SERVER_OPTIONS: Options = (
    *PING_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Our own clients ask every KEEPALIVE_SECONDS; by default a server would drop them for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    # Two processes on one port is a mistake to report, not a load balancer.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class Service:
    """One service to serve."""

    name: str
    """Full name, for health and reflection: `kvferry.v1.Prefill`."""
    add_to: Callable[[grpc.aio.Server], None]
    """Registers the servicer: `lambda server: add_PrefillServicer_to_server(servicer, server)`."""


class RpcServer:
    """A running server. `start_server` makes it; `stop` must be awaited before the loop ends."""

    def __init__(
        self, server: grpc.aio.Server, calls: OpenCalls, names: Sequence[str], statuses: health.aio.HealthServicer
    ) -> None:
        self._server = server
        self._names = names
        self._health = statuses
        self.calls = calls
        """Of our own services; health and reflection do not count."""
        self.address = ""
        """Host and port really bound."""

    async def set_ready(self, ready: bool, *names: str) -> None:
        """Say over `grpc.health.v1.Health` whether these services (all, and the server itself, when none is named)
        take work. Everything starts as not serving."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names or ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let running ones end for up to `grace_seconds`, then cancel the rest. Idempotent."""
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(grace_seconds))
        # Health watches never end by themselves; they must not use up the grace of an idle server.
        idle = asyncio.create_task(self.calls.wait_idle())
        await asyncio.wait((stopping, idle), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if not stopping.done():
            await asyncio.wait((stopping,), timeout=_FLUSH_SECONDS)
        await self._server.stop(None)
        await stopping


async def start_server(
    address: str, services: Sequence[Service], *, credentials: grpc.ServerCredentials | None = None
) -> RpcServer:
    """Serve `services`, health and reflection on `address` (`host:port`; port 0 takes a free one).

    Args:
        credentials: for TLS; `None`: in the clear.

    Raises:
        UsageError: the address cannot be bound.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 0xFFFF:
        raise UsageError(f"{address!r} is not an address; write host:port, port 0 for any free one", field="grpc")
    calls = OpenCalls()
    server = grpc.aio.server(interceptors=(CallInterceptor(calls),), options=_SERVER_OPTIONS)
    for service in services:
        service.add_to(server)
    names = [service.name for service in services]
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise UsageError(
            f"cannot listen on {address}: {error}; is it taken by another process?", field="grpc"
        ) from error
    running = RpcServer(server, calls, names, statuses)
    running.address = f"{host}:{bound}"
    await running.set_ready(False)
    await server.start()
    return running
