"""Waits for conditions that other processes or tasks fulfil."""

import asyncio
import threading
from collections.abc import Callable

from kvferry.core.clock import SystemClock

_POLL_SECONDS = 0.02


def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Check a condition repeatedly until it holds; fail after `seconds`."""
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + seconds
    while not holds():
        assert clock.monotonic() < deadline, f"not met within {seconds:.0f} s: {what}"
        pause.wait(_POLL_SECONDS)


async def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Let other tasks run until the condition holds.

    Raises:
        TimeoutError: it does not hold within `seconds`.
    """
    async with asyncio.timeout(seconds):
        for _ in iter(holds, True):
            await asyncio.sleep(0)
