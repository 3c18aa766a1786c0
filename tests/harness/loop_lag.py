"""Measures the lag of an event loop: the time by which it runs callbacks late."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvferry.core.clock import Clock

_TICK_SECONDS = 0.005


@dataclass
class LoopLag:
    """The longest lag so far."""

    seconds: float = 0.0
    """Elapsed time by which a callback ran late; includes time that other processes used."""
    busy_seconds: float = 0.0
    """CPU time of the loop's thread between two of its turns, which does not depend on other processes."""
    process_seconds: float = 0.0
    """CPU time of all of this process's threads between two of the loop's turns: it includes threads that hold the
    GIL, and does not depend on other processes."""


@asynccontextmanager
async def watch_lag(clock: Clock) -> AsyncIterator[LoopLag]:
    """Measure the lag of the running loop during the `with` block."""
    lag = LoopLag()

    async def tick() -> None:
        while True:
            before, busy, process = clock.monotonic(), time.thread_time(), time.process_time()
            await asyncio.sleep(_TICK_SECONDS)
            lag.busy_seconds = max(lag.busy_seconds, time.thread_time() - busy)
            lag.process_seconds = max(lag.process_seconds, time.process_time() - process)
            lag.seconds = max(lag.seconds, clock.monotonic() - before - _TICK_SECONDS)

    ticking = asyncio.create_task(tick())
    try:
        yield lag
    finally:
        ticking.cancel()
