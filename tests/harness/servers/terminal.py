"""A `kvferry` command in a terminal: what is typed reaches it as from a keyboard, what it shows is read back."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvferry.core.clock import SystemClock
from kvferry.core.process.config import child_environment

_SECONDS = 60.0
_AGAIN_SECONDS = 1.0
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Terminal:
    """The user's side of a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = b""
        self.shown = b""
        """All that was shown so far."""

    def keys(self, text: str) -> None:
        """Type keys."""
        os.write(self._descriptor, text.encode())

    def until(self, mark: str) -> str:
        """Return what is shown next up to and including `mark`; fail after a minute."""
        deadline = SystemClock().monotonic() + _SECONDS
        while mark.encode() not in self._unread:
            assert self._read(deadline), f"the command ended before it showed {mark!r}, after {self._unread!r}"
        before, _, self._unread = self._unread.partition(mark.encode())
        return (before + mark.encode()).decode()

    def end(self, key: str = "") -> int:
        """Return the command's status when it has ended; fail after a minute.

        Args:
            key: typed again while nothing is shown: Python misses a signal that arrives as it begins to wait for a key.
        """
        deadline = SystemClock().monotonic() + _SECONDS
        self.keys(key)
        while self._is_open(deadline, key):
            pass
        return self.process.wait(_SECONDS)

    def _is_open(self, deadline: float, key: str) -> bool:
        while key and not select.select([self._descriptor], [], [], _AGAIN_SECONDS)[0]:
            assert SystemClock().monotonic() < deadline, f"did not end within {_SECONDS} s, after {self.shown[-500:]!r}"
            self.keys(key)
        return self._read(deadline)

    def _read(self, deadline: float) -> bool:
        remaining = max(0.0, deadline - SystemClock().monotonic())
        readable, _, _ = select.select([self._descriptor], [], [], remaining)
        assert readable, f"nothing more was shown within {_SECONDS} s, after {self.shown[-500:]!r}"
        try:
            more = os.read(self._descriptor, 1 << 16)
        except OSError:  # the command has closed the terminal
            return False
        self.shown += more
        self._unread += more
        return bool(more)


@contextmanager
def terminal(*arguments: str, env: Mapping[str, str]) -> Iterator[Terminal]:
    """Run `kvferry ARGUMENTS...` in a terminal; kill it at the end of the `with` block if it is still running."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        # The terminal becomes the controlling one, so that Ctrl-C is a signal.
        ["setsid", "--ctty", sys.executable, "-m", "kvferry.cli.main", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=child_environment({"TERM": "xterm", "KVFERRY_PARENT_PID": str(os.getpid()), **env}),
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(_SECONDS)
        os.close(ours)
