"""Daemon threads that run compiled code, which end before the interpreter does.

CPython ends a daemon thread when it requests the GIL after finalization began. If C++ code requests it, for example a
kernel that returns from a call without the GIL, the end of the thread unwinds C++ frames that must not throw, and the
process aborts: the exit status is lost. Therefore these threads are stopped and joined at exit.
"""

import atexit
import logging
import threading
from collections.abc import Callable

from kvferry.core.clock import SystemClock

_JOIN_SECONDS = 10.0
_log = logging.getLogger(__name__)
_stops: dict[threading.Thread, Callable[[], object]] = {}


def start_thread(run: Callable[[], object], name: str, stop: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that is stopped at exit.

    Args:
        run: body of the thread.
        name: name of the thread.
        stop: function that makes `run` return soon; called at exit, from the main thread.
    """

    def body() -> None:
        try:
            run()
        finally:
            _stops.pop(thread, None)

    thread = threading.Thread(target=body, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


@atexit.register
def _stop_all() -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + _JOIN_SECONDS
    stopping = list(_stops.items())
    for _, stop in stopping:
        stop()
    for thread, _ in stopping:
        thread.join(max(0.0, deadline - clock.monotonic()))
        if thread.is_alive():
            _log.warning("thread %s did not end within %.0f s of exit", thread.name, _JOIN_SECONDS)
