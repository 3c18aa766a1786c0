"""Waits for a condition that other processes bring about."""

import threading
from collections.abc import Callable

from kvferry.core.clock import SystemClock

_POLL_SECONDS = 0.02


def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Check repeatedly until it holds; fail after `seconds`."""
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.monotonic() + seconds
    while not holds():
        assert clock.monotonic() < deadline, f"not so within {seconds:.0f} s: {what}"
        pause.wait(_POLL_SECONDS)
