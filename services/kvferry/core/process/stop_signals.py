"""Signals that stop a process: the first begins a graceful stop, a later one ends it at once."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_STOP_SECONDS = 0.5
"""Time after the first signal during which others are ignored. A service manager, `timeout` or a terminal signals each
process of a group, and a supervisor then signals its children too: this is one stop, not two."""


class SignalLoop(Protocol):
    """The methods of an asyncio event loop that are used here."""

    def add_signal_handler(self, sig: int, callback: Callable[[], object], /) -> None: ...
    def remove_signal_handler(self, sig: int, /) -> bool: ...
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any: ...


@contextmanager
def stop_signals(
    loop: SignalLoop,
    on_stop: Callable[[], object],
    *,
    on_again: Callable[[], object] | None = None,
    numbers: Sequence[signal.Signals] = STOP_SIGNALS,
) -> Iterator[None]:
    """Handle signals during the `with` block.

    Args:
        loop: the running event loop.
        on_stop: called at the first signal.
        on_again: called at each later signal; after the block, signals have no effect until the loop is closed. `None`
            selects the signals' default effect, which ends the process.
        numbers: the signals.
    """
    stopping: list[Any] = []

    def first() -> None:
        if not stopping:
            stopping.append(loop.call_later(SAME_STOP_SECONDS, handle_again))
            on_stop()

    def handle_again() -> None:
        for number in numbers:
            if on_again is None:
                loop.remove_signal_handler(number)
            else:
                loop.add_signal_handler(number, on_again)

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for timer in stopping:
            timer.cancel()
        if on_again is None:
            for number in numbers:
                loop.remove_signal_handler(number)
        signal.set_wakeup_fd(-1)  # later signals must not write to the event loop that is being closed
