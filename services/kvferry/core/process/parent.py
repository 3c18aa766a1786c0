"""Makes this process exit together with its parent, even if the parent is killed."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent exits; exit immediately if the parent has already exited.

    Supported on Linux only; elsewhere the supervisor must stop its children.

    Args:
        parent_pid: process id of the parent; another parent means that it has already exited.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent exited before the call took effect
        os._exit(1)
