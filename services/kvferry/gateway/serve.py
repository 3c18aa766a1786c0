"""One gateway process: HTTP and gRPC on one event loop, from the first port to the last drained stream."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import new_incarnation
from kvferry.gateway.api_keys import ApiKeys
from kvferry.gateway.config import DispatchConfig, GatewayConfig
from kvferry.gateway.dispatch import Dispatcher
from kvferry.gateway.endpoint_slices import EndpointSlices
from kvferry.gateway.fleet import Fleet
from kvferry.gateway.fleet_report import fleet_report
from kvferry.gateway.holding import Holding
from kvferry.gateway.http_side import HttpSide
from kvferry.gateway.instruments import Instruments
from kvferry.gateway.membership import Knowledge, Membership
from kvferry.gateway.pool_api import PoolApi
from kvferry.gateway.readiness import FleetCollector, PoolCollector, can_serve, notes
from kvferry.gateway.tls import Certificate
from kvferry.gateway.waiting_room import WaitingRoom
from kvferry.gateway.waking import Waker
from kvferry.rpc.inference import inference_service
from kvferry.rpc.server import RpcServer, start_server
from kvferry.rpc.text_model import TextModel
from kvferry.rpc.text_service import TextService

_log = logging.getLogger(__name__)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
_CERTIFICATE_SECONDS = 10.0
"""Between two looks whether the certificate was renewed."""
_WRITE_AFTER_END = "socket.send() raised exception."
"""What asyncio says, once for every event that was ready, when a client leaves in the middle of a stream."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients and load balancers keep idle connections, so that they close first and never meet a reset."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a gateway really listens."""

    http: str
    grpc: str


Announce = Callable[[Listening], None]


async def run_gateway(
    config: GatewayConfig,
    model: TextModel,
    *,
    announce: Announce | None = None,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then say so, linger, refuse new work, finish running streams, and return.

    Args:
        config: all settings.
        model: what is served, as text sees it; no weights.
        announce: called once both ports accept connections.
        clock: the system's when `None`.
        stop: ends the gateway when set; signals are only caught when it is `None`.

    Raises:
        UsageError: an address cannot be bound, the API keys cannot be read, or the pool's cluster cannot be asked.
    """
    gateway = await Gateway.start(config, model, clock or SystemClock())
    try:
        if announce is not None:
            announce(gateway.listening)
        if stop is not None:
            await stop.wait()
        else:
            await _signalled()
        await gateway.linger(config.linger_seconds)
        _log.info("draining for up to %g s", config.drain_seconds)
    finally:
        await gateway.stop()


class Gateway:
    """A running gateway; `start` makes it, `stop` drains it."""

    def __init__(self, config: GatewayConfig, model: TextModel, clock: Clock, pool: PoolApi | None = None) -> None:
        self._config = config
        self._pool = pool
        self._certificate = None if config.tls is None else Certificate(*config.tls)
        self._draining = False
        self._incarnation = new_incarnation()
        self.instruments = Instruments()
        self.fleet = Fleet(config.fleet, model.name)
        FleetCollector(self.fleet, model.name, self.instruments.registry)
        self.membership = Membership(self.fleet, None if pool is None else EndpointSlices(pool, clock))
        self._holding = Holding(config.hold, str(config.fleet.pool))
        self._waker = None if pool is None else Waker(pool, self._holding, clock)
        PoolCollector(self.membership, self._holding, self._waker, self.instruments.registry)
        self.dispatcher = Dispatcher(
            self.fleet,
            clock,
            DispatchConfig(config.routing, config.retry, config.max_streams),
            instruments=self.instruments,
            room=None if pool is None else WaitingRoom(self.fleet, self._holding, self._waker),
        )
        keys = ApiKeys.load(config.http.api_keys_file)
        self.service = TextService(
            self.dispatcher, model, clock, context_tokens=self.fleet.context_tokens, tenant_of=keys.tenant_of
        )
        self.http_side = HttpSide(
            self.service, config.http, self.instruments, self._readiness, self.dispatcher.journal, self._report
        )

    @classmethod
    async def start(cls, config: GatewayConfig, model: TextModel, clock: Clock) -> "Gateway":
        """Bind both ports, then begin to watch the workers.

        Raises:
            UsageError: an address cannot be bound, the API keys cannot be read, or the pool's cluster cannot be asked.
        """
        name = config.fleet.pool
        gateway = cls(config, model, clock, None if name is None else await asyncio.to_thread(PoolApi.connect, name))
        certificate = gateway._certificate
        credentials = None if certificate is None else certificate.grpc_credentials()
        gateway._rpc = await start_server(
            config.grpc_address, [inference_service(gateway.service)], credentials=credentials
        )
        try:
            gateway._http = await _HttpServer.start(gateway.http_side.app(), config, certificate)
        except BaseException:
            await gateway._rpc.stop(0)
            raise
        gateway.listening = Listening(gateway._http.address, gateway._rpc.address)
        gateway.fleet.start()
        gateway._following = [asyncio.create_task(gateway.membership.run(), name="membership")]
        if gateway._waker is not None:
            gateway._following.append(asyncio.create_task(gateway._waker.run(), name="waker"))
        if certificate is not None:
            gateway._following.append(asyncio.create_task(_renew(certificate), name="certificate"))
        gateway._health = asyncio.create_task(gateway._follow_readiness(), name="readiness")
        return gateway

    listening: Listening
    _rpc: RpcServer
    _http: "_HttpServer"
    _health: asyncio.Task[None]
    _following: list[asyncio.Task[None]]

    async def linger(self, seconds: float) -> None:
        """Say that this gateway is not ready, and serve on for so long."""
        self._draining = True
        await self._stop_tasks([self._health])
        await self._rpc.set_ready(False)
        if seconds:
            _log.info("lingering for %g s", seconds)
            await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """Readiness off, no new work, running streams to their end or the grace's, then everything closed."""
        await self.linger(0)
        await asyncio.gather(self._rpc.stop(self._config.drain_seconds), self._http.stop())
        await self.dispatcher.wait_idle()
        await self._stop_tasks(self._following)
        await self.fleet.stop()
        if self._pool is not None:
            self._pool.close()

    async def _stop_tasks(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _would_take(self) -> bool:
        """Whether a request is welcome. One for a pool without workers is: it is held, and wakes the pool."""
        if self._pool is not None:
            return self.membership.state.state is not Knowledge.UNKNOWN
        return can_serve(self.fleet)

    def _readiness(self) -> tuple[bool, Sequence[str]]:
        if self._draining:
            return False, ["this gateway drains"]
        found = [*self.membership.notes(), *notes(self.fleet)]
        if self._pool is not None and not can_serve(self.fleet):
            found.append(f"pool {self._pool.pool} has no worker that takes requests; {self._holding.num_held} wait")
        return self._would_take, found

    def _report(self) -> Mapping[str, object]:
        return fleet_report(
            self.fleet.views(),
            gateway=self._incarnation,
            pool=str(self._config.fleet.pool or ""),
            held=self._holding.num_held,
            source=self.membership.state,
            wake_trouble="" if self._waker is None else self._waker.trouble,
            handoffs=self.instruments.peer_load_counts(),
        )

    async def _follow_readiness(self) -> None:
        """Keep `grpc.health.v1.Health` saying what /ready says."""
        ready = False
        while True:
            await self.fleet.wait_until(lambda _, was=ready: self._would_take != was)  # type: ignore[misc]
            ready = not ready
            await self._rpc.set_ready(ready)
            _log.info("requests would %sbe served", "" if ready else "not ")


async def _renew(certificate: Certificate) -> None:
    while True:
        await asyncio.sleep(_CERTIFICATE_SECONDS)
        certificate.renew()


class _HttpServer:
    """Uvicorn inside our loop, with a socket and a stop of our own."""

    def __init__(self, server: "_QuietUvicorn", bound: socket.socket) -> None:
        self._server = server
        host, port = bound.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._serving = asyncio.create_task(server.serve(sockets=[bound]), name="http")

    @classmethod
    async def start(cls, app: ASGIApp, config: GatewayConfig, certificate: Certificate | None) -> "_HttpServer":
        logging.getLogger("asyncio").addFilter(_is_news)
        bound = _bind(config.http.address)
        settings = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
        )
        settings.load()
        if certificate is not None:
            settings.ssl = certificate.context
        server = _QuietUvicorn(settings)
        running = cls(server, bound)
        started = asyncio.create_task(server.is_up.wait())
        await asyncio.wait((started, running._serving), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if running._serving.done():
            running._serving.result()
        return running

    async def stop(self) -> None:
        """Stop listening, let running answers end within the grace period."""
        self._server.should_exit = True
        await self._serving


class _QuietUvicorn(uvicorn.Server):
    """Leaves signals to the process and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _is_news(record: logging.LogRecord) -> bool:
    return record.msg != _WRITE_AFTER_END


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise UsageError(f"{address!r} is not an address; write host:port, port 0 for any free one", field="http")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        return socket.create_server((bare, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error}", field="http") from error


async def _signalled() -> None:
    """Return at the first SIGTERM or SIGINT; a second one acts as if nobody listened."""
    caught = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, caught.set)
    try:
        await caught.wait()
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
