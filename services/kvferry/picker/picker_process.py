"""The picker process: serves until a signal, then drains."""

import asyncio
import logging
import wsgiref.simple_server
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health
from prometheus_client import start_http_server

from kvferry.core.addresses import join_address, listen_address
from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import cannot_listen
from kvferry.core.process.stop_signals import stop_signals
from kvferry.gateway.http.server.tls import Certificate
from kvferry.picker.config import PickerConfig
from kvferry.picker.ext_proc_service import ExtProcService
from kvferry.picker.picker_metrics import PickerMetrics
from kvferry.picker.picker_tls import picker_credentials
from kvferry.picker.pool_members import PoolMembers
from kvferry.picker.pool_picker import PoolPicker
from kvferry.picker.scraping import MetricsScraper
from kvferry.rpc.server import RpcServer, Service, start_server
from kvferry.v1.ext_proc_pb2_grpc import add_ExternalProcessorServicer_to_server

_log = logging.getLogger(__name__)
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS, LIVENESS = "readiness", "liveness"
"""Names of the health checks of the endpoint picker protocol, besides that of the service."""
_MAX_CONNECTIONS = 4096
_HEAD_BYTES = 1 << 20
"""Room for headers and metadata in a message, besides a buffered body."""
_CHECK_SECONDS = 0.1
_RENEW_SECONDS = 5.0
_FIRST_SCRAPES_SECONDS = 5.0
"""Longest time for which readiness waits for the first scrapes."""


@dataclass(frozen=True, slots=True)
class PickerListening:
    """Bound addresses, `host:port`; empty if not served."""

    grpc: str
    health: str
    metrics: str


class Picker:
    """One running picker, created by `start`; `stop` must be awaited."""

    def __init__(self, config: PickerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self.metrics = PickerMetrics()
        self.pool = PoolPicker(config, clock, self.metrics)
        self.members = PoolMembers(config, self.pool.states, clock)
        self.scraper = MetricsScraper(config.scrape, self.pool.states, clock, self.metrics, self.pool.loads_changed)
        self.service = ExtProcService(config, self.pool, self.metrics)
        self._statuses = health.aio.HealthServicer()
        self._servers: list[RpcServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._page: wsgiref.simple_server.WSGIServer | None = None
        self._is_stopping = False
        self.listening = PickerListening("", "", "")

    @classmethod
    async def start(cls, config: PickerConfig, clock: Clock) -> "Picker":
        """Start all parts.

        Raises:
            UsageError: an address cannot be bound, or a certificate or the cluster cannot be used.
        """
        picker = cls(config, clock)
        try:
            await picker._start()
        except BaseException:
            await picker.stop()
            raise
        return picker

    async def _start(self) -> None:
        config = self._config
        self.members.connect()
        credentials, certificate = picker_credentials(config, self._clock)
        service = Service(EXT_PROC, lambda server: add_ExternalProcessorServicer_to_server(self.service, server))
        main = await start_server(
            config.listen,
            [service],
            credentials=credentials,
            max_request_bytes=config.max_body_bytes + _HEAD_BYTES,
            max_connections=_MAX_CONNECTIONS,
            statuses=self._statuses,
            shares_port=config.shares_port,
        )
        self._servers.append(main)
        if config.health:
            self._servers.append(await start_server(config.health, [], statuses=self._statuses))
        self._run(self.members.run(), "members")
        self._run(self.scraper.run(), "scraper")
        self._run(self._follow_readiness(), "readiness")
        if certificate is not None:
            self._run(_renew(certificate), "certificate")
        metrics = self._serve_metrics() if config.metrics else ""
        bound = [server.address for server in self._servers]
        self.listening = PickerListening(bound[0], bound[1] if len(bound) > 1 else "", metrics)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    def _serve_metrics(self) -> str:
        host, port = listen_address(self._config.metrics, "metrics")
        try:
            self._page, _ = start_http_server(port, host, self.metrics.registry)
        except OSError as error:
            raise cannot_listen("metrics", self._config.metrics, error) from error
        return join_address(host, self._page.server_port)

    @property
    def is_ready(self) -> bool:
        """Whether the pool's endpoints are known."""
        return self.members.is_known and not self._is_stopping

    async def _follow_readiness(self) -> None:
        """Report ready when the endpoints are listed and were scraped once, or do not answer."""
        await self._servers[0].set_ready(True, LIVENESS)
        deadline = self._clock.monotonic() + _FIRST_SCRAPES_SECONDS
        reported: bool | None = None
        while True:
            scraped = self.scraper.num_rounds > 0 or self._clock.monotonic() > deadline
            ready = self.is_ready and (scraped or not self.pool.states.by_address)
            if ready is not reported:
                await self._servers[0].set_ready(ready, "", EXT_PROC, READINESS)
                reported = ready
            await asyncio.sleep(_CHECK_SECONDS)

    async def stop(self) -> None:
        """Report not ready, wait for running streams, and end all parts. Idempotent."""
        self._is_stopping = True
        async with AsyncExitStack() as stack:
            for task in self._tasks:
                stack.push_async_callback(_end, task)
            if self._page is not None:
                stack.callback(_close, self._page)
                self._page = None
            for server in self._servers:
                await server.stop(self._config.drain_seconds)
        self.members.close()


async def run_picker(
    config: PickerConfig,
    *,
    announce: Callable[[PickerListening], None] | None = None,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then report not ready and drain.

    Args:
        config: all settings.
        announce: called when all ports accept connections.
        clock: time source; `None` selects the system clock.
        stop: stops the picker when set; signals are handled only if it is `None`.

    Raises:
        UsageError: an address cannot be bound, or a certificate or the cluster cannot be used.
    """
    picker = await Picker.start(config, clock or SystemClock())
    signalled = asyncio.Event()
    with nullcontext() if stop is not None else stop_signals(asyncio.get_running_loop(), signalled.set):
        try:
            if announce is not None:
                announce(picker.listening)
            await (stop or signalled).wait()
            _log.info("draining for up to %g s", config.drain_seconds)
        finally:
            await picker.stop()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is not None:
        _log.error("task %s failed", task.get_name(), exc_info=task.exception())


def _close(page: wsgiref.simple_server.WSGIServer) -> None:
    page.shutdown()
    page.server_close()


async def _renew(certificate: Certificate) -> None:
    """Reload the certificate whenever its files change, until cancelled."""
    while True:
        await asyncio.sleep(_RENEW_SECONDS)
        certificate.renew()
