"""Parent side of an engine's child process: start, call, end, each with a deadline."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
from peers.cells import Outcome, Request

from kvferry.core.clock import Clock

_END_SECONDS = 10.0


class EngineFailed(Exception):
    """An engine failed and takes no further part; the message has the reason."""


class Child:
    """A running engine, whose processes form one process group that `close` ends."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, seconds: float, clock: Clock
    ) -> None:
        """
        Args:
            command: command line.
            environment: all of the child's variables.
            log: file for standard error.
            seconds: time limit of the start.
            clock: for deadlines and timings.

        Raises:
            EngineFailed: the engine did not become ready.
        """
        self._clock = clock
        self._log = log
        self._unread = b""
        begun = clock.monotonic()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                bufsize=0,
                start_new_session=True,
            )
        try:
            self.facts = self._hear(seconds)["ready"]
            """Facts that the engine reports about itself."""
        except BaseException:
            self.kill()
            raise
        self.start_seconds = clock.monotonic() - begun

    def ask(self, requests: Sequence[Request], seconds: float) -> Outcome:
        """Send requests that are served concurrently; return the outcome.

        Raises:
            EngineFailed: the child ended, or did not answer in time.
        """
        line = json.dumps({"requests": [asdict(request) for request in requests]}) + "\n"
        sink = self._process.stdin
        assert sink is not None
        try:
            sink.write(line.encode())  # the child waits in a read, so this does not wait for the engine
        except (OSError, ValueError) as error:  # ValueError: the pipe was closed
            raise EngineFailed(f"the engine process exited; its log ends: {self._last_words()}") from error
        return Outcome(**self._hear(seconds))

    def cpu_seconds(self) -> float:
        """Return the processor time of the engine process and its children in seconds."""
        total = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """Request the engine's exit, wait, and then kill its remaining processes."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the engine and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _hear(self, seconds: float) -> dict[str, object]:
        output = self._process.stdout
        assert output is not None
        deadline = self._clock.monotonic() + seconds
        while b"\n" not in self._unread:
            readable, _, _ = select.select([output], [], [], max(0.0, deadline - self._clock.monotonic()))
            if not readable:
                raise EngineFailed(f"no answer within {seconds:.0f} s; its log ends: {self._last_words()}")
            piece = output.read(1 << 16)
            if not piece:
                raise EngineFailed(f"the engine process exited; its log ends: {self._last_words()}")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def _last_words(self) -> str:
        return last_line(self._log)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, shortened."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()] if log.exists() else []
    kept = [line for line in lines if line]
    return kept[-1][:300] if kept else "nothing was said"
