"""A gateway in this process, with tokenizer and chat template of model `tiny`, for workers that already run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.servers.worker_channel import TEST_KEYS
from kvferry.core.clock import SystemClock
from kvferry.gateway.decide.config import GatewayConfig
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.gateway.gateway import Gateway
from kvferry.model.source import open_model
from kvferry.serving.model_text import text_model_of

_READY_SECONDS = 30


@asynccontextmanager
async def real_gateway(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Yield a gateway all of whose workers accept requests, and stop it at the end of the `with` block."""
    gateway = await Gateway.start(
        config,
        text_model_of(open_model("tiny")),
        SystemClock(),
        keys=WorkerKeys(lambda: [TEST_KEYS["KVFERRY_GATEWAY_KEY"].encode()]),
    )
    try:
        async with asyncio.timeout(_READY_SECONDS):
            await gateway.fleet.wait_until(lambda fleet: all(view.takes_work for view in fleet.views()))
        yield gateway
    finally:
        await gateway.stop()
