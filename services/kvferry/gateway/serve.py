"""The gateway process: runs a gateway until it receives a signal, then drains it."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.process.memory import MemoryGrowth, free_memory, resident_memory
from kvferry.core.process.stop_signals import stop_signals
from kvferry.gateway.decide.config import GatewayConfig
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.gateway.gateway import Gateway, Listening
from kvferry.serving.constraint_check import ConstraintCheck
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import TextProcess

_log = logging.getLogger(__name__)
_MEMORY_SECONDS = 5.0
"""Interval in seconds between checks of the process's memory."""
_IDLE_GROWTH_BYTES, _BUSY_GROWTH_BYTES = 8 << 20, 256 << 20
"""Growth after which freed memory is returned to the system: without open streams, and with open streams, which wait
meanwhile."""

Announce = Callable[[Listening], None]


async def run_gateway(
    config: GatewayConfig,
    model: TextModel,
    *,
    keys: WorkerKeys | None = None,
    text_process: TextProcess | None = None,
    constraints: ConstraintCheck | None = None,
    announce: Announce | None = None,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then report not ready, linger, reject new requests and drain.

    Args:
        config: all settings.
        model: the served model's tokenizer, chat template and limits, without weights.
        keys: sign the calls to workers; `None` for workers that do not check them, in tests.
        text_process: reads large requests; `None` uses a thread.
        constraints: checks the constraints of requests; `None` uses a thread.
        announce: called when all ports accept connections.
        clock: time source; `None` selects the system clock.
        stop: stops the gateway when set; signals are handled only if it is `None`.

    Raises:
        UsageError: an address cannot be bound, the API keys cannot be read, or the cluster cannot be accessed.
    """
    gateway = await Gateway.start(
        config, model, clock or SystemClock(), keys=keys, text_process=text_process, constraints=constraints
    )
    memory = asyncio.create_task(_keep_memory_low(gateway), name="memory")
    signalled = asyncio.Event()
    with nullcontext() if stop is not None else stop_signals(asyncio.get_running_loop(), signalled.set):
        try:
            if announce is not None:
                announce(gateway.listening)
            await (stop or signalled).wait()
            await gateway.linger(config.linger_seconds)
            _log.info("draining for up to %g s", config.drain_seconds)
        finally:
            memory.cancel()
            await gateway.stop()


async def _keep_memory_low(gateway: Gateway) -> None:
    """Return freed memory to the system whenever the process has grown, until cancelled."""
    first = resident_memory()
    growth = MemoryGrowth(_IDLE_GROWTH_BYTES, _BUSY_GROWTH_BYTES, idle_base=first, busy_base=first)
    while True:
        await asyncio.sleep(_MEMORY_SECONDS)
        busy = gateway.dispatcher.open_streams > 0
        if growth.is_due(resident_memory(), busy=busy):
            free_memory()
            growth.returned(resident_memory(), busy=busy)
