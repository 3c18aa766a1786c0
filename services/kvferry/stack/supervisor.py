"""Starts processes, hears what they announce, restarts those that die, stops all of them in order.

A supervised process prints one JSON object a line on standard output: `{"event": "listening", ...}` with the
addresses it bound, later `{"event": "ready", ...}`. Its standard error is passed through.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.core.clock import Clock
from kvferry.core.config import child_environment
from kvferry.core.errors import Unavailable
from kvferry.stack.restarts import RestartHistory, RestartPolicy

_log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 1 << 16
_NOT_RUN = -1
_WRONG_USAGE = 2
_MAX_FIRST_STARTS = 3
"""A process that never listened is not tried more often; one that did is restarted for ever."""

Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the stack."""

    name: str
    arguments: Sequence[str]
    """After `kvferry`; may hold `{key}` where a later start must repeat what the first one bound."""
    environment: Mapping[str, str] = field(default_factory=dict)


class SupervisedProcess:
    """One process, started again whenever it dies, until stopped."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        clock: Clock,
        policy: RestartPolicy | None = None,
        on_death: Callable[[str, int, float], None] | None = None,
    ) -> None:
        """
        Args:
            on_death: told the name, the exit status and the seconds until the restart.
        """
        self.spec = spec
        self._clock = clock
        self._policy = policy or RestartPolicy()
        self._on_death = on_death or (lambda *_: None)
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._listening: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._bound: dict[str, str] = {}
        """Addresses of the first start; later ones take the same, because others know them."""
        self.num_starts = 0

    def prefer(self, addresses: Mapping[str, str]) -> None:
        """Addresses for the first start; where none is given it binds any free port."""
        self._bound.update(addresses)

    @property
    def pid(self) -> int | None:
        """Of the running process; `None` between two lives."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name=f"supervise {self.spec.name}")

    async def wait_listening(self, timeout: float) -> Event:
        """What it announced when it listened.

        Raises:
            Unavailable: it did not within `timeout` seconds.
        """
        return await self._wait(self._listening, "listen", timeout)

    async def wait_ready(self, timeout: float) -> Event:
        """What it announced when it was ready.

        Raises:
            Unavailable: it was not within `timeout` seconds.
        """
        return await self._wait(self._ready, "become ready", timeout)

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end, wait, then make it. Idempotent."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_seconds):
                    await process.wait()
            except TimeoutError:
                _log.warning("%s did not end within %.0f s and is killed", self.spec.name, grace_seconds)
                _signal(process, signal.SIGKILL)
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _wait(self, announced: asyncio.Future[Event], what: str, timeout: float) -> Event:
        # Not asyncio.wait_for: until Python 3.12 it can lose a cancellation.
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
            except (OSError, ValueError):  # it could not be started, or printed what is no line
                _log.exception("%s could not be run", self.spec.name)
                status = _NOT_RUN
            if self._stopping:
                return
            if not self._listening.done() and (status == _WRONG_USAGE or self.num_starts >= _MAX_FIRST_STARTS):
                # Wrong usage will be wrong again, and so will a damaged file.
                self._listening.set_exception(Unavailable(f"{self.spec.name} cannot start; its message is above"))
                return
            history, pause = history.after_death(self._policy, self._clock.monotonic() - started)
            self._on_death(self.spec.name, status, pause)
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        arguments = [a.format_map(_Bound(self._bound)) for a in self.spec.arguments]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvferry.cli.main",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment({**self.spec.environment, "KVFERRY_PARENT_PID": str(os.getpid())}),
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches us alone; we stop the others in order
        )
        self.num_starts += 1
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
        elif event.get("event") == "ready" and not self._ready.done():
            self._ready.set_result(event)


class _Bound(dict[str, str]):
    """Addresses bound before; port 0 for those that were not yet."""

    def __missing__(self, key: str) -> str:
        return "127.0.0.1:0"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        return
