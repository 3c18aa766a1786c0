"""What our own long-running processes say and do when a supervisor started them."""

import json
import sys
from collections.abc import Mapping

from kvferry.core.config import environment
from kvferry.core.parent import die_with_parent


def follow_parent() -> None:
    """If a supervisor started us, end with it."""
    parent = environment().get("KVFERRY_PARENT_PID", "")
    if parent.isdecimal():
        die_with_parent(int(parent))


def announce(event: Mapping[str, object]) -> None:
    """One line of JSON on standard output, for a supervisor or a script."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
