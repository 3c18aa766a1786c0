"""Processor priority of a background process."""

import os
from contextlib import suppress
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Lower the priority of this process, which becomes the leader of a new session if it can.

    Where Linux groups processes by session (`kernel.sched_autogroup_enabled`), the processor is first divided between
    sessions, and niceness applies within one session only: sched(7), "The autogroup feature". A process in the session
    of a busy one would thus take processor time from all other sessions. So the session gets the niceness too.

    Args:
        niceness: 0 to 19; added to that of the process.
    """
    os.nice(niceness)
    with suppress(OSError):  # the leader of a process group cannot create a session
        os.setsid()
        _AUTOGROUP.write_text(str(niceness), "ascii")
