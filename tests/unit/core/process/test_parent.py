"""A child process ends with its parent, even if the parent is killed."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from kvferry.core.process.parent import die_with_parent

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can send a signal at the exit of a parent")

CHILD = """
import sys
from kvferry.core.process.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
sys.stdin.read()
"""
# The parent holds the child's standard input open. The pipe that the test reads is therefore closed by the child's exit
# only.
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdin=subprocess.PIPE)
sys.stdin.read()
"""


@on_linux
def test_a_child_whose_parent_has_ended_already_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(os.getpid() + 1)], capture_output=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (1, b"")


@on_linux
def test_a_child_is_ended_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"tied\n"
        parent.kill()
        # The child holds the write end of this pipe, so the end of file shows that the child has ended.
        assert parent.stdout.read() == b""


class AskedKernel:
    """Stands in for the C library: records the calls of `prctl`."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def prctl(self, *arguments: int) -> int:
        self.asked.append(arguments)
        return 0


@pytest.mark.parametrize(
    ("platform", "parent_is_there", "asked"),
    [("linux", True, True), ("linux", False, True), ("darwin", True, False), ("darwin", False, False)],
)
def test_prctl_is_called_before_the_parent_is_checked(
    platform: str, parent_is_there: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If the parent were checked first, one that exits before prctl is called would be missed.
    kernel, exits = AskedKernel(), []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: kernel)
    monkeypatch.setattr(os, "getppid", lambda: 5 if kernel.asked else 6)
    monkeypatch.setattr(os, "_exit", exits.append)
    die_with_parent(5 if parent_is_there else 4)
    assert kernel.asked == ([(1, signal.SIGKILL)] if asked else [])
    assert exits == ([1] if asked and not parent_is_there else [])
