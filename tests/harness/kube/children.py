"""Starts and kills the processes of a cluster. They are recorded in a state file, and each has a log file."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable, UsageError

_END_SECONDS = 10.0
_POLL_SECONDS = 0.02
LOG_TAIL_LINES = 30


class Process(msgspec.Struct, frozen=True):
    """A process; its start time distinguishes it from a later process with the same PID."""

    pid: int
    start: int


class BoxState(msgspec.Struct, frozen=True):
    """State of the node's `Box`."""

    number: int
    inner: Process | None = None
    """The box's init process; `None` while it starts."""


class State(msgspec.Struct):
    """Content of the state file, which `down` and `attach` read."""

    processes: dict[str, Process] = msgspec.field(default_factory=dict)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds from the start until each stage was reached, by stage."""
    url: str = ""
    box: BoxState | None = None

    def write(self, folder: Path) -> None:
        """Write the state file into the cluster's folder, atomically."""
        fresh = folder / "state.json.new"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        os.replace(fresh, folder / "state.json")

    @classmethod
    def read(cls, folder: Path) -> "State":
        """Read the state file of a cluster's folder.

        Raises:
            UsageError: the folder has no valid state file.
        """
        try:
            return msgspec.json.decode((folder / "state.json").read_bytes(), type=cls)
        except FileNotFoundError:
            raise UsageError(f"no cluster in {folder} (it has no state.json)", field="DIR") from None
        except msgspec.DecodeError as error:
            raise UsageError(f"{folder}/state.json is not a cluster's state file: {error}", field="DIR") from error


@dataclass(slots=True)
class Children:
    """Starts processes and records them in the state file."""

    folder: Path
    state: State
    clock: Clock
    lasting: bool = False
    """Whether the processes continue after this process exits; otherwise the kernel kills them."""
    _ours: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def spawn(self, name: str, words: Sequence[object], env: Mapping[str, str] | None = None) -> Process:
        """Start a process with its output in log/NAME.log, and record it."""
        tie = () if self.lasting else ("setpriv", "--pdeathsig", "KILL", "--")
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*tie, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self._ours[name] = process
        record = Process(process.pid, start_of(process.pid) or 0)
        self.state.processes[name] = record
        self.state.write(self.folder)
        return record

    def check(self, name: str) -> None:
        """Check that process `name` is still running.

        Raises:
            Unavailable: the process has exited; the message contains the end of its log.
        """
        process = self._ours.get(name)
        if process is not None and process.poll() is not None:
            raise Unavailable(f"{name} ended with status {process.returncode}:\n{log_tail(self.folder, name)}")

    def end_all(self) -> None:
        """Kill all processes and wait for their exit. Their data is discarded, so no clean stop is needed."""
        for record in self.state.processes.values():
            kill(record)
        for process in self._ours.values():
            process.wait(_END_SECONDS)
        for name, record in self.state.processes.items():
            wait_gone(record, name, self.clock)


def start_of(pid: int) -> int | None:
    """Return the start time of a process in kernel ticks; `None` if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def is_alive(record: Process) -> bool:
    """Return whether the recorded process is running; a later process with the same PID does not count."""
    return start_of(record.pid) == record.start


def kill(record: Process) -> None:
    """Kill the recorded process if it is still running."""
    if is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)


def wait_gone(record: Process, name: str, clock: Clock) -> None:
    """Wait until the recorded process has exited.

    Raises:
        Unavailable: the process is still running after ten seconds.
    """
    pause = threading.Event()
    deadline = clock.monotonic() + _END_SECONDS
    while is_alive(record):
        if clock.monotonic() > deadline:
            raise Unavailable(f"{name} (pid {record.pid}) is still running {_END_SECONDS:.0f} s after SIGKILL")
        pause.wait(_POLL_SECONDS)


def log_tail(folder: Path, name: str, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a process's log."""
    try:
        return "\n".join((folder / "log" / f"{name}.log").read_text("utf-8", "replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error.strerror})"
