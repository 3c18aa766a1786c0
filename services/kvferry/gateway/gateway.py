"""A running gateway: its servers and tasks; starts and drains it."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.process.open_files import max_connections
from kvferry.gateway.build.gateway_parts import GatewayParts, build_gateway
from kvferry.gateway.decide.config import GatewayConfig
from kvferry.gateway.fleet.pool_api import PoolApi
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.gateway.http.server.http_server import HttpServer
from kvferry.gateway.http.server.tls import Certificate
from kvferry.gateway.observe.dashboard.history import INTERVAL_SECONDS
from kvferry.rpc.channel import MAX_CLIENT_MESSAGE_BYTES
from kvferry.rpc.inference.inference import inference_service
from kvferry.rpc.server import MAX_CONNECTIONS, RpcServer, start_server
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess

_log = logging.getLogger(__name__)
_SHARE_OF_FILES = 0.25
"""Share of the open files that is reserved for clients' gRPC connections."""
_IDLE_SECONDS = 60.0
"""Seconds without a call after which a client's gRPC connection is closed; its next call opens a new one."""
_CERTIFICATE_SECONDS = 10.0
"""Interval in seconds between checks for a renewed certificate."""
_RECORD_SECONDS = 2.0
"""Maximum number of seconds for which a gateway that stops writes records of streams."""
_TENANTS_SECONDS = 1.0
"""Interval in seconds between checks for a changed tenants file."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses that a gateway listens on, each `host:port`."""

    http: str
    grpc: str
    admin: str


@dataclass(frozen=True, slots=True)
class _Servers:
    """The bound servers of a gateway."""

    rpc: RpcServer
    http: HttpServer
    admin: HttpServer

    @classmethod
    async def bind(cls, parts: GatewayParts) -> "_Servers":
        """Bind all ports, or none.

        Raises:
            UsageError: an address cannot be bound.
        """
        config, certificate = parts.config, parts.certificate
        async with AsyncExitStack() as bound:
            rpc = await start_server(
                config.grpc_address,
                [inference_service(parts.service)],
                credentials=None if certificate is None else certificate.grpc_credentials,
                max_request_bytes=MAX_CLIENT_MESSAGE_BYTES,
                max_connections=max_connections(MAX_CONNECTIONS, _SHARE_OF_FILES),
                idle_seconds=_IDLE_SECONDS,
                shares_port=config.shares_ports,
            )
            bound.push_async_callback(rpc.stop, 0)
            http = await HttpServer.start(
                parts.client_app,
                config.http.address,
                field="http",
                drain_seconds=config.drain_seconds,
                certificate=certificate,
                keepalive_seconds=config.http.http_keepalive_seconds,
                shares_port=config.shares_ports,
            )
            bound.push_async_callback(http.stop)
            admin = await HttpServer.start(
                parts.admin_api.app(), config.admin_address, field="admin", drain_seconds=1.0
            )
            bound.pop_all()
        return cls(rpc, http, admin)

    @property
    def listening(self) -> Listening:
        return Listening(self.http.address, self.rpc.address, self.admin.address)


class Gateway:
    """A running gateway: create it with `start`, drain it with `stop`."""

    def __init__(self, parts: GatewayParts, servers: _Servers) -> None:
        """Start the tasks of a gateway on the running event loop.

        Args:
            parts: the finished parts.
            servers: the servers that serve them.
        """
        self.parts = parts
        self._servers = servers
        self.listening = servers.listening
        self.fleet, self.gate, self.dispatcher, self.pins = parts.fleet, parts.gate, parts.dispatcher, parts.pins
        self.cache_map, self.cache_feeds, self.client_api = parts.cache_map, parts.cache_feeds, parts.client_api
        self.service, self.instruments = parts.service, parts.instruments
        if parts.service.process is not None:
            parts.service.process.start()
        parts.fleet.start()
        following: dict[str, Coroutine[Any, Any, None]] = {
            "membership": parts.membership.run(),
            "cache feeds": parts.cache_feeds.run(),
            "history": self._follow_totals(),
            "pins": parts.pins.run(),
            "generation": parts.generation.run(),
        }
        if parts.waker is not None:
            following["waker"] = parts.waker.run()
        if parts.config.tenants_file is not None:
            following["tenants"] = self._follow_tenants()
        if parts.shared is not None:
            following["stream records"] = parts.shared.resumption.records.run()
            following["quotas"] = parts.shared.quotas.run()
        if parts.certificate is not None:
            following["certificate"] = _renew(parts.certificate)
        if parts.pool_tls is not None:
            following["pool tls"] = parts.pool_tls.follow()
        self._batches = (
            None if parts.batch_runner is None else asyncio.create_task(parts.batch_runner.run(), name="batches")
        )
        self._following = [asyncio.create_task(work, name=name) for name, work in following.items()]
        self._health = asyncio.create_task(self._follow_readiness(), name="readiness")

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        model: TextModel,
        clock: Clock,
        *,
        keys: WorkerKeys | None = None,
        text_process: TextProcess | None = None,
        constraints: ConstraintCheck | None = None,
    ) -> "Gateway":
        """Bind all ports, then start polling the workers.

        Args:
            config: configuration of the gateway.
            model: tokenizer, chat template and limits of the served model.
            clock: clock of all parts.
            keys: sign the calls to workers; `None` for workers that do not check them, in tests.
            text_process: reads large requests; started and stopped with the gateway. `None` uses a thread.
            constraints: checks constraints; stopped with the gateway. `None` uses a thread.

        Raises:
            UsageError: an address cannot be bound, the API keys cannot be read, or the cluster cannot be accessed.
        """
        name = config.fleet.pool
        pool = None if name is None else await asyncio.to_thread(PoolApi.connect, name)
        parts = build_gateway(
            config, model, clock, pool=pool, text_process=text_process, constraints=constraints, keys=keys
        )
        return cls(parts, await _Servers.bind(parts))

    async def linger(self, seconds: float) -> None:
        """Report not ready, but accept requests for another `seconds` seconds."""
        self.parts.status.is_draining = True
        await self._stop_tasks([self._health])
        await self._servers.rpc.set_ready(False)
        if seconds:
            _log.info("lingering for %g s", seconds)
            await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """Report not ready, reject new requests, wait for running streams up to `drain_seconds`, close all servers."""
        parts = self.parts
        await self.linger(0)
        if self._batches is not None:
            await self._stop_tasks([self._batches])
        drain_seconds = parts.config.drain_seconds
        await asyncio.gather(
            self._servers.rpc.stop(drain_seconds),
            self._servers.http.stop(),
            parts.client_api.responses.stop(drain_seconds),
        )
        if parts.service.process is not None:
            await parts.service.process.stop()
        if parts.service.constraints is not None:
            await parts.service.constraints.stop()
        if parts.batches is not None:
            parts.batches.close()
        await parts.dispatcher.wait_idle()
        if parts.shared is not None:
            await parts.shared.resumption.records.drain(_RECORD_SECONDS)
        await self._servers.admin.stop()
        await self._stop_tasks(self._following)
        if parts.shared is not None:
            await parts.shared.quotas.leave()
            await parts.shared.client.close()
        await parts.gate.stop()
        await parts.fleet.stop()
        if parts.pool is not None:
            parts.pool.close()
        if parts.tracer is not None:
            await asyncio.to_thread(parts.tracer.close)
        if parts.request_trace is not None:
            await asyncio.to_thread(parts.request_trace.close)

    async def _stop_tasks(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_totals(self) -> None:
        """Add a reading of the instruments to the history at regular intervals, until cancelled."""
        while True:
            self.parts.status.note_totals()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _follow_tenants(self) -> None:
        """Read the tenants file again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(_TENANTS_SECONDS)
            table = await asyncio.to_thread(self.parts.tenants.read)
            if table is not None:
                self.parts.gate.use_tenants(table)

    async def _follow_readiness(self) -> None:
        """Keep the status of `grpc.health.v1.Health` equal to that of /ready."""
        ready, status = False, self.parts.status
        while True:
            await self.parts.fleet.wait_until(lambda _, was=ready: status.would_take != was)  # type: ignore[misc]
            ready = not ready
            await self._servers.rpc.set_ready(ready)
            _log.info("readiness changed: requests can %sbe served", "" if ready else "not ")


async def _renew(certificate: Certificate) -> None:
    while True:
        await asyncio.sleep(_CERTIFICATE_SECONDS)
        certificate.renew()
