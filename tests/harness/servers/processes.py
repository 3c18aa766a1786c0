"""Real processes for tests: workers and whole stacks, started with the `kvferry` command and killed at the end."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from harness.servers.worker_channel import TEST_KEYS
from kvferry.core.clock import SystemClock
from kvferry.core.process.config import child_environment

START_SECONDS = 120.0
_MODULE = "kvferry.cli.main"


@dataclass(slots=True)
class RunningProcess:
    """A `kvferry` process and the events it has announced."""

    process: subprocess.Popen[bytes]
    events: dict[str, Mapping[str, object]]

    def wait_for(self, event: str, seconds: float = START_SECONDS) -> Mapping[str, object]:
        """Wait until the process announces an event; fail if it does not do so in time or exits."""
        clock = SystemClock()
        deadline = clock.monotonic() + seconds
        output = self.process.stdout
        assert output is not None
        while event not in self.events:
            readable, _, _ = select.select([output], [], [], max(0.0, deadline - clock.monotonic()))
            assert readable, f"no {event!r} within {seconds} s; heard {list(self.events)}"
            line = output.readline()
            assert line, f"the process ended with status {self.process.wait(10)} before {event!r}"
            found = json.loads(line)
            self.events[found["event"]] = found
        return self.events[event]

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal, wait for the exit, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def children(self, role: str) -> list[psutil.Process]:
        """Return the child processes of a stack with a role: `gateway`, or the role of its workers."""
        return [child for child in psutil.Process(self.process.pid).children() if role_of(child) == role]


def role_of(process: psutil.Process) -> str:
    """Return `gateway`, the role of a worker, or another command of a `kvferry` process; "" for other processes."""
    words = process.cmdline()
    if _MODULE not in words:
        return ""
    command, *flags = words[words.index(_MODULE) + 1 :]
    return flags[flags.index("--role") + 1] if command == "worker" else command


@contextmanager
def running(
    *arguments: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[RunningProcess]:
    """Run `kvferry ARGUMENTS...`; kill it at the end of the `with` block if it is still running.

    A stack has a prefill and a decode worker, unless `arguments` have other workers, whatever the number of cores, and
    a free admin port unless they have another.

    Args:
        prefix: command prefix that executes the command in the same process, for example `ip netns exec NAME`.
    """
    if arguments[0] == "up" and not set(arguments) & {"--prefill", "--decode", "--both", "--config"}:
        arguments = (*arguments, "--prefill", "1", "--decode", "1")
    if arguments[0] == "up" and not {"--admin", "--print-config"} & set(arguments):
        arguments = (*arguments, "--admin", "127.0.0.1:0")  # stacks of several tests run at the same time
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", _MODULE, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        bufsize=0,
        env=child_environment({**TEST_KEYS, "KVFERRY_PARENT_PID": str(os.getpid()), **(env or {})}),
    )
    try:
        yield RunningProcess(process, {})
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def connector_flags(name: str) -> tuple[str, ...]:
    """Return the flags of a connector, or of `tcp-encrypted`: connector `tcp` with encryption."""
    connector, _, mode = name.partition("-")
    return ("--connector", connector, *(("--kv-encryption", "true") if mode else ()))


@contextmanager
def a_worker(
    role: str, *arguments: str, model: str = "tiny", env: Mapping[str, str] | None = None
) -> Iterator[RunningProcess]:
    """Yield a ready worker; by default with the tiny model in float32, one thread, and load policy `always`."""
    engine = ("--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB", "--load-policy", "always")
    with running("worker", "--role", role, "--model", model, *engine, *arguments, env=env) as worker:
        worker.wait_for("ready")
        yield worker
