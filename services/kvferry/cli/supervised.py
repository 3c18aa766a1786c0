"""Behavior of kvferry's long-running processes under a supervisor: parent tracking, signals, announcements."""

import json
import os
import signal
import sys
from collections.abc import Mapping

from kvferry.core.process.config import environment
from kvferry.core.process.parent import die_with_parent


def follow_parent() -> None:
    """Exit together with the supervisor that started this process, if there is one."""
    parent = environment().get("KVFERRY_PARENT_PID", "")
    if parent.isdecimal():
        die_with_parent(int(parent))


def leave_on_signals() -> None:
    """Exit on SIGTERM or SIGINT until the final handlers are installed. Otherwise the first process of a container
    would ignore these signals during its imports, which take seconds."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def announce(event: Mapping[str, object]) -> None:
    """Print an event as one line of JSON on standard output, for a supervisor or a script."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
