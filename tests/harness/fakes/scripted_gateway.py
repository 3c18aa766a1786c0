"""A whole gateway on free ports in front of scripted workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from harness.fakes.byte_model import byte_model
from harness.fakes.scripted_fleet import fleet_config
from harness.fakes.scripted_worker import ScriptedWorkers
from kvferry.core.clock import SystemClock
from kvferry.gateway.decide.config import GatewayConfig, HttpConfig
from kvferry.gateway.gateway import Gateway
from kvferry.serving.text_process import TextProcess


@dataclass
class ScriptedGateway:
    """A running gateway and its workers."""

    workers: ScriptedWorkers
    gateway: Gateway

    @property
    def url(self) -> str:
        """URL of the gateway's HTTP API."""
        return f"http://{self.gateway.listening.http}"

    @property
    def admin_url(self) -> str:
        """URL of the gateway's admin API."""
        return f"http://{self.gateway.listening.admin}"

    async def idle(self) -> None:
        """Return when no stream is open and no clean-up is in flight.

        Raises:
            TimeoutError: a stream or a clean-up task leaked.
        """
        async with asyncio.timeout(10):
            await self.gateway.dispatcher.wait_idle()
        await self.workers.idle()


@asynccontextmanager
async def scripted_gateway(
    *,
    prefill: int = 1,
    decode: int = 1,
    both: int = 0,
    http: HttpConfig | None = None,
    text_process: TextProcess | None = None,
    **settings: Any,
) -> AsyncIterator[ScriptedGateway]:
    """Start workers and gateway, wait until it is ready, and check for leaks at the end.

    Args:
        prefill: number of prefill workers.
        decode: number of decode workers.
        both: number of workers of role `both`.
        http: settings of the HTTP API; its address must have port 0.
        text_process: process in which large requests are read; `None` uses a thread.
        **settings: other fields of `GatewayConfig`.
    """
    async with ScriptedWorkers(prefill=prefill, decode=decode, both=both) as workers:
        config = GatewayConfig(
            fleet=fleet_config(workers),
            http=http or HttpConfig(address="127.0.0.1:0"),
            grpc_address="127.0.0.1:0",
            **{"drain_seconds": 10.0, **settings},
        )
        gateway = await Gateway.start(config, byte_model(), SystemClock(), text_process=text_process)
        try:
            await gateway.fleet.wait_until(lambda fleet: all(view.takes_work for view in fleet.views()))
            scripted = ScriptedGateway(workers, gateway)
            yield scripted
            await scripted.idle()
        finally:
            await gateway.stop()
