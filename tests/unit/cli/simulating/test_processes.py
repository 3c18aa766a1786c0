"""A simulation in several processes stops at once, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FLEET = """
pools = 8
[workload]
requests = 4000000
rate = 1000.0
[device]
step_ms = 8.0
token_us = 20.0
[[role]]
role = "both"
replicas = 4
"""


def group_of(leader: int) -> list[int]:
    """Return the running processes of a process group, without its leader."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return [pid for pid in found if pid != leader]


def has_within(leader: int, seconds: float, wanted: int) -> bool:
    """Return whether a process group has at least `wanted` processes, or none if that is 0, within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(group_of(leader)) >= wanted > 0 or (not wanted and not group_of(leader)):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("number", "is_group", "status"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, -15),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_stopped_simulation_leaves_no_process(
    number: signal.Signals, is_group: bool, status: int, tmp_path: Path
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    command = [sys.executable, "-m", "kvferry.cli.main", "simulate", str(fleet), "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as started:
        try:
            assert has_within(started.pid, 20.0, 3)  # two workers, and the process that tracks their resources
            time.sleep(1.0)
            (os.killpg if is_group else os.kill)(started.pid, number)
            output = started.communicate(timeout=10.0)[0].decode()
            assert started.returncode == status
            assert "Traceback" not in output
            assert has_within(started.pid, 5.0, 0)
        finally:
            for pid in (*group_of(started.pid), *([started.pid] if started.poll() is None else [])):
                os.kill(pid, signal.SIGKILL)
