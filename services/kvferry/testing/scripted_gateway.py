"""A whole gateway process's worth, on free ports, in front of scripted workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import SystemClock
from kvferry.gateway.config import GatewayConfig, HttpConfig
from kvferry.gateway.serve import Gateway
from kvferry.testing.byte_model import byte_model
from kvferry.testing.scripted_fleet import fleet_config
from kvferry.testing.scripted_worker import ScriptedWorkers


@dataclass
class ScriptedGateway:
    """A running gateway and its workers."""

    workers: ScriptedWorkers
    gateway: Gateway

    @property
    def url(self) -> str:
        """Of its HTTP side."""
        return f"http://{self.gateway.listening.http}"

    async def idle(self) -> None:
        """Return when nothing is open or owed anywhere.

        Raises:
            TimeoutError: something leaked.
        """
        async with asyncio.timeout(10):
            await self.gateway.dispatcher.wait_idle()
        await self.workers.idle()


@asynccontextmanager
async def scripted_gateway(
    *, prefill: int = 1, decode: int = 1, both: int = 0, http: HttpConfig | None = None, **settings: Any
) -> AsyncIterator[ScriptedGateway]:
    """Start workers and gateway, wait until it is ready, check at the end that nothing leaked.

    Args:
        prefill: workers of this role; likewise `decode` and `both`.
        decode: see `prefill`.
        both: see `prefill`.
        http: settings of the HTTP side; its address must have port 0.
        **settings: further fields of `GatewayConfig`.
    """
    async with ScriptedWorkers(prefill=prefill, decode=decode, both=both) as workers:
        config = GatewayConfig(
            fleet=fleet_config(workers),
            http=http or HttpConfig(address="127.0.0.1:0"),
            grpc_address="127.0.0.1:0",
            **{"drain_seconds": 10.0, **settings},
        )
        gateway = await Gateway.start(config, byte_model(), SystemClock())
        try:
            await gateway.fleet.wait_until(lambda fleet: all(view.takes_work for view in fleet.views()))
            scripted = ScriptedGateway(workers, gateway)
            yield scripted
            await scripted.idle()
        finally:
            await gateway.stop()
