"""Supervises processes: starts them, reads their announcements, restarts them after an exit, stops them.

A supervised process prints one JSON object per line on standard output: `{"event": "listening", ...}` with its bound
addresses, later `{"event": "ready", ...}`, and `{"event": "failed", "message": ...}` if it ends with an error. Its
standard error is passed through; its name is in its environment and precedes the lines of its log.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping

from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable, UsageError
from kvferry.core.process.config import child_environment
from kvferry.core.process.logs import LOG_NAME_VARIABLE
from kvferry.stack.plan.processes import ProcessSpec
from kvferry.stack.plan.restarts import RestartHistory, RestartPolicy, death_text

_log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 1 << 16
_NOT_RUN = -1
_WRONG_USAGE = 2
_MAX_FIRST_STARTS = 3
"""Maximum number of starts of a process that has never listened; a process that has listened is always restarted."""

Event = Mapping[str, object]


class SupervisedProcess:
    """A process that is restarted whenever it exits, until `stop` is called."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        clock: Clock,
        policy: RestartPolicy | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            spec: command and name of the process.
            clock: clock of restarts.
            policy: delays before restarts; default: `RestartPolicy()`.
            on_death: called after an exit that is followed by a restart, with the line to print about it.
        """
        self.spec = spec
        self._clock = clock
        self._policy = policy or RestartPolicy()
        self._on_death = on_death or (lambda _: None)
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._listening: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._bound: dict[str, str] = {}
        """Addresses bound by the first start; restarts reuse them, since other processes are configured with them."""
        self._reason = ""
        """Error with which the latest run ended; empty if it announced none."""
        self.num_starts = 0

    def prefer(self, addresses: Mapping[str, str]) -> None:
        """Set addresses for the first start; addresses that are not set use a free port."""
        self._bound.update(addresses)

    @property
    def pid(self) -> int | None:
        """PID of the running process; `None` between two runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise {self.spec.name}")

    async def wait_listening(self, timeout: float) -> Event:
        """Wait for the process's `listening` event.

        Raises:
            Unavailable: the process did not listen within `timeout` seconds.
        """
        return await self._wait(self._listening, "listen", timeout)

    async def wait_ready(self, timeout: float) -> Event:
        """Wait for the process's `ready` event.

        Raises:
            Unavailable: the process was not ready within `timeout` seconds.
        """
        return await self._wait(self._ready, "become ready", timeout)

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, wait up to `grace_seconds`, then kill the process. Idempotent."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_seconds):
                    await process.wait()
            except TimeoutError:
                _log.warning("%s did not exit within %.0f s and is killed", self.spec.name, grace_seconds)
                _signal(process, signal.SIGKILL)
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _wait(self, announced: asyncio.Future[Event], what: str, timeout: float) -> Event:
        # Not asyncio.wait_for: before Python 3.12 it can lose a cancellation.
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(announced)
        except TimeoutError:
            raise Unavailable(f"{self.spec.name} did not {what} within {timeout:.0f} s; see its log above") from None

    async def _keep_running(self) -> None:
        history = RestartHistory()
        while not self._stopping:
            started = self._clock.monotonic()
            try:
                status = await self._run_once()
            except (OSError, ValueError):  # the process could not be started, or its output is invalid
                _log.exception("%s could not be run", self.spec.name)
                status = _NOT_RUN
            if self._stopping:
                return
            if not self._listening.done() and (status == _WRONG_USAGE or self.num_starts >= _MAX_FIRST_STARTS):
                # A usage error or a damaged file will fail again.
                kind = UsageError if status == _WRONG_USAGE else Unavailable
                reason = self._reason or "see its message above"
                self._listening.set_exception(kind(f"{self.spec.name} cannot start: {reason}"))
                return
            history, pause = history.after_death(self._policy, self._clock.monotonic() - started)
            self._on_death(death_text(self.spec.name, status, pause, self._reason))
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        arguments = [a.format_map(_Bound(self._bound)) for a in self.spec.arguments]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # otherwise a file in the current folder could take the place of a module
            "-m",
            "kvferry.cli.main",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(
                {**self.spec.environment, "KVFERRY_PARENT_PID": str(os.getpid()), LOG_NAME_VARIABLE: self.spec.name}
            ),
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C signals only the supervisor, which stops the processes in order
        )
        self.num_starts += 1
        self._reason = ""
        output = self._process.stdout
        try:
            while output is not None and (line := await output.readline()):
                self._hear(line)
            return await self._process.wait()
        finally:
            if self._process.returncode is None:
                _signal(self._process, signal.SIGKILL)
            self._process = None

    def _hear(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            _log.info("%s: %s", self.spec.name, line.decode(errors="replace").rstrip())
            return
        if event.get("event") == "listening":
            self._bound.update({k: str(v) for k, v in event.items()})
            if not self._listening.done():
                self._listening.set_result(event)
        elif event.get("event") == "failed":
            self._reason = str(event.get("message", ""))
        elif event.get("event") == "ready" and not self._ready.done():
            self._ready.set_result(event)


class _Bound(dict[str, str]):
    """Addresses bound by an earlier start; port 0 for all others."""

    def __missing__(self, key: str) -> str:
        return "127.0.0.1:0"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # Not `send_signal`: it may read the exit status itself, which asyncio then reports as 255 with a warning.
    if process.returncode is not None:
        return
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return
