"""What our own long-running processes say and do when a supervisor started them."""

import json
import os
import signal
import sys
from collections.abc import Mapping

from kvferry.core.config import environment
from kvferry.core.parent import die_with_parent


def follow_parent() -> None:
    """If a supervisor started us, end with it."""
    parent = environment().get("KVFERRY_PARENT_PID", "")
    if parent.isdecimal():
        die_with_parent(int(parent))


def leave_on_signals() -> None:
    """Until somebody else takes care of signals, end at once at the first. The first process of a container would
    ignore them otherwise, and what we import at the start takes seconds."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def announce(event: Mapping[str, object]) -> None:
    """One line of JSON on standard output, for a supervisor or a script."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
