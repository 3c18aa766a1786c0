"""The processes of one cluster: a log each, written down before anybody waits, ended by what is written."""

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
    """A process; its start tells it from a later one with the same number."""

    pid: int
    start: int


class BoxState(msgspec.Struct, frozen=True):
    """The node's namespaces."""

    number: int
    inner: Process | None = None
    """Its first process; none yet while it starts."""


class State(msgspec.Struct):
    """What `down` needs to know, and `attach`."""

    processes: dict[str, Process] = msgspec.field(default_factory=dict)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """When each stage was reached."""
    url: str = ""
    box: BoxState | None = None

    def write(self, folder: Path) -> None:
        """Into the cluster's folder, whole or not at all."""
        fresh = folder / "state.json.new"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        os.replace(fresh, folder / "state.json")

    @classmethod
    def read(cls, folder: Path) -> "State":
        """What was written.

        Raises:
            UsageError: there is no cluster in the folder.
        """
        try:
            return msgspec.json.decode((folder / "state.json").read_bytes(), type=cls)
        except FileNotFoundError:
            raise UsageError(f"no cluster in {folder} (it has no state.json)", field="DIR") from None
        except msgspec.DecodeError as error:
            raise UsageError(f"{folder}/state.json is not ours: {error}", field="DIR") from error


@dataclass(slots=True)
class Children:
    """Starts processes and keeps the state file true."""

    folder: Path
    state: State
    clock: Clock
    lasting: bool = False
    """They outlive this process. Otherwise the kernel ends them with it, however it ends."""
    _ours: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def spawn(self, name: str, words: Sequence[object], env: Mapping[str, str] | None = None) -> Process:
        """Start `name`, its output in log/NAME.log, and write it down."""
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
        """It still runs.

        Raises:
            Unavailable: it does not; the message has the end of its log.
        """
        process = self._ours.get(name)
        if process is not None and process.poll() is not None:
            raise Unavailable(f"{name} ended with status {process.returncode}:\n{log_tail(self.folder, name)}")

    def end_all(self) -> None:
        """End all at once, and wait until they are gone. Their data is thrown away: nobody needs to stop cleanly."""
        for record in self.state.processes.values():
            kill(record)
        for process in self._ours.values():
            process.wait(_END_SECONDS)
        for name, record in self.state.processes.items():
            wait_gone(record, name, self.clock)


def start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; `None`: it is not there, or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def is_alive(record: Process) -> bool:
    """This very process runs."""
    return start_of(record.pid) == record.start


def kill(record: Process) -> None:
    """End it, unless it has ended and its number may be another's."""
    if is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)


def wait_gone(record: Process, name: str, clock: Clock) -> None:
    """Until it has ended.

    Raises:
        Unavailable: it is still there after ten seconds.
    """
    pause = threading.Event()
    deadline = clock.monotonic() + _END_SECONDS
    while is_alive(record):
        if clock.monotonic() > deadline:
            raise Unavailable(f"{name} (pid {record.pid}) is still there {_END_SECONDS:.0f} s after SIGKILL")
        pause.wait(_POLL_SECONDS)


def log_tail(folder: Path, name: str, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        return "\n".join((folder / "log" / f"{name}.log").read_text("utf-8", "replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error.strerror})"
