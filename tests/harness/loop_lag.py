"""Measures the lag of an event loop: the time by which it runs callbacks late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvferry.core.clock import Clock

_TICK_SECONDS = 0.005


@dataclass
class LoopLag:
    """The longest lag so far, in seconds."""

    seconds: float = 0.0


@asynccontextmanager
async def watch_lag(clock: Clock) -> AsyncIterator[LoopLag]:
    """Measure the lag of the running loop during the `with` block."""
    lag = LoopLag()

    async def tick() -> None:
        while True:
            before = clock.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            lag.seconds = max(lag.seconds, clock.monotonic() - before - _TICK_SECONDS)

    ticking = asyncio.create_task(tick())
    try:
        yield lag
    finally:
        ticking.cancel()
