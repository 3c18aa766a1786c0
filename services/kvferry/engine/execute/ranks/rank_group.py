"""Starts and watches the processes of a model's ranks, and sends them their messages."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

from kvferry.core.errors import InvariantBroken, KvferryError, ModelFileError, UsageError
from kvferry.core.process.config import child_environment, environment
from kvferry.core.process.exit_threads import start_thread
from kvferry.core.process.logs import LOG_NAME_VARIABLE
from kvferry.core.process.memory_file import MemoryFile
from kvferry.engine.execute.ranks.messages import (
    Message,
    ModelPlan,
    Packed,
    RankPages,
    RankReady,
    RankStart,
    RankStep,
    receive,
    send,
    socket_pair,
)
from kvferry.engine.execute.ranks.share_model import sent_adapter, share_of_adapter
from kvferry.kernels import compiled
from kvferry.weights.adapters.adapter_folder import Adapter
from kvferry.weights.config import ModelConfig
from kvferry.weights.shares import Share

_log = logging.getLogger(__name__)
_MODULE = "kvferry.engine.execute.ranks.rank_process"
_REPLY_SECONDS = 60.0
"""How long a rank may take to map pages."""
_LOAD_SECONDS = 600.0
"""How much longer than the first rank another one may take to load its share."""
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Member:
    """The process of a rank, and the ends of its sockets."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int
    """Write end of a pipe; the process exits when it is closed."""


@dataclass(slots=True)
class _Health:
    """Whether the ranks of a model can compute."""

    model: str
    failure: str = ""
    """Why they cannot; empty while they can."""
    owner: int = field(default_factory=os.getpid)
    """The process that has started the ranks."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set before the processes are stopped on purpose."""
    fail: Callable[[int], None] = lambda _: None
    """Ends the waits of all ranks because of one of them."""
    listeners: list[Callable[[InvariantBroken], None]] = field(default_factory=list)
    """Called when a process has ended unexpectedly."""

    @property
    def is_owner(self) -> bool:
        """Whether this process has started the ranks; a forked child leaves them to its parent."""
        return os.getpid() == self.owner

    def end(self, rank: int, reason: str) -> InvariantBroken:
        """Record that the ranks cannot compute because of one of them, and end all waits and the engines."""
        is_known = bool(self.failure)
        error = self.note(reason)
        if not is_known:
            _log.error("%s", error)
            self.fail(rank)
            for listener in self.listeners:
                listener(error)
        return error

    def note(self, reason: str) -> InvariantBroken:
        """Record why the ranks cannot compute, unless it is known; return the error of this and all later steps."""
        self.failure = self.failure or reason
        return InvariantBroken(f"the ranks of model {self.model} stop: {self.failure}")


class RankGroup:
    """The other ranks of a model, whose first rank is this process. `send_step` is called from one thread at a time."""

    def __init__(self, plan: ModelPlan, config: ModelConfig, cores: Sequence[Sequence[int]]) -> None:
        """Start the processes, which begin to load their shares.

        Args:
            plan: the model, and how ranks compute it.
            config: configuration of the model, as served.
            cores: CPU cores of each rank; an empty sequence for all cores.
        """
        self._config, self._size = config, plan.size
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()
        self._health = _Health(config.name)
        num_bytes = compiled.ranks_bytes(plan.size, config.hidden_size, plan.step_rows)
        self._file = MemoryFile("kvferry-ranks", num_bytes)
        self.sums: memoryview = self._file.memory
        """Memory for sums over ranks."""
        self._members: list[_Member] = []
        self._close = weakref.finalize(self, _stop, self._members, self._health)
        for rank in range(1, plan.size):
            self._members.append(_started(rank))
        for member in self._members:
            start = RankStart(plan, member.rank, tuple(cores[member.rank]), self._file.place, _log.getEffectiveLevel())
            send(member.connection, start)

    def watch(self, fail: Callable[[int], None]) -> None:
        """Watch the processes from now on.

        Args:
            fail: called with the rank whose process has ended unexpectedly, on another thread.
        """
        self._health.fail = fail
        for member in self._members:
            start_thread(
                partial(_watch, member, self._health), f"rank-{member.rank}", partial(_kill, member, self._health)
            )

    def notify(self, failed: Callable[[InvariantBroken], None]) -> None:
        """Have a function called, on another thread, when a process has ended unexpectedly."""
        self._health.listeners.append(failed)
        if self._health.failure:
            failed(self.failed(""))

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded their shares.

        Raises:
            ModelFileError: a rank cannot load its share of the files.
            UsageError: a rank's share is not possible.
            InvariantBroken: a process has ended, or takes too long.
        """
        for member in self._members:
            self._answer(member, _LOAD_SECONDS)

    def add_pages(self, pages: RankPages) -> None:
        """Have all ranks map the pages of an engine.

        Raises:
            InvariantBroken: a process has ended, or takes too long.
        """
        with self._sending:
            self._send(pages)
            for member in self._members:
                self._answer(member, _REPLY_SECONDS)

    def add_adapter(self, adapter: Adapter) -> int:
        """Send an adapter to all ranks; return its number.

        Raises:
            InvariantBroken: a process has ended or does not read.
        """
        number = next(self._numbers)
        with self._sending:
            forgotten = self._take_forgotten()
            for member in self._members:
                share = share_of_adapter(adapter, self._config, Share(member.rank, self._size))
                self._send(sent_adapter(share, number, forgotten), [member])
        return number

    def forget_adapter(self, number: int) -> None:
        """Let all ranks forget an adapter with the next step. Callable from finalizers."""
        self._forgotten.append(number)

    def send_step(self, index: int, batch: tuple[Packed, ...], adapters: tuple[int, ...]) -> None:
        """Send a step to all ranks, which compute it.

        Args:
            index: number of the engine.
            batch: `messages.packed_batch`.
            adapters: numbers of the step's adapters.

        Raises:
            InvariantBroken: a process has ended or does not read.
        """
        with self._sending:
            self._send(RankStep(index, batch, adapters, self._take_forgotten()))

    def failed(self, reason: str) -> InvariantBroken:
        """Return the error of a step that could not be computed, and of all later steps.

        Args:
            reason: why, if no rank's process is known to have ended.
        """
        return self._health.note(reason)

    def close(self) -> None:
        """Stop the processes; idempotent. A step in progress fails at once. No effect in a forked child."""
        if not self._health.is_owner:
            return
        self._health.stopping.set()
        self._health.note("the model was closed; load it again")
        if self._close.alive:
            self._health.fail(0)
        self._close()

    def _take_forgotten(self) -> tuple[int, ...]:
        return tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))

    def _send(self, message: Message, members: Sequence[_Member] | None = None) -> None:
        if self._health.failure:
            raise self.failed("")
        for member in self._members if members is None else members:
            try:
                send(member.connection, message)
            except OSError as error:
                raise self._health.end(member.rank, _end_of(member)) from error

    def _answer(self, member: _Member, seconds: float) -> None:
        try:
            if not member.connection.poll(seconds):
                raise InvariantBroken(f"rank {member.rank} does not answer within {seconds:.0f} s")
            answer = receive(member.connection, RankReady)
        except (EOFError, OSError) as error:
            raise InvariantBroken(_end_of(member)) from error
        if answer.error:
            raise _error_of(answer, member.rank)


def _error_of(answer: RankReady, rank: int) -> KvferryError:
    if answer.error_field:
        return UsageError(answer.error, field=answer.error_field)
    return ModelFileError(f"rank {rank}: {answer.error}")


def _started(rank: int) -> _Member:
    connection, other = socket_pair()
    ends, lifeline = os.pipe()
    name = environment().get(LOG_NAME_VARIABLE)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(other.fileno()), str(ends)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(other.fileno(), ends),
            env=child_environment({LOG_NAME_VARIABLE: name} if name else {}),
            start_new_session=True,  # signals of the terminal reach only the first rank
        )
    finally:
        other.close()
        os.close(ends)
    return _Member(rank, process, connection, lifeline)


def _watch(member: _Member, health: _Health) -> None:
    """Wait for the end of a process, and end the waits of the other ranks."""
    member.process.wait()
    if not health.stopping.is_set():
        health.end(member.rank, _end_of(member))


def _kill(member: _Member, health: _Health) -> None:
    if not health.is_owner:
        return
    health.stopping.set()
    member.process.kill()


def _end_of(member: _Member) -> str:
    """Return how the process of a rank ended, or that it does not read."""
    try:
        status = member.process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return f"rank {member.rank} does not answer"
    if status < 0:
        return f"rank {member.rank} was ended by {signal.Signals(-status).name}"
    return f"rank {member.rank} ended with status {status}; its log says why"


def _stop(members: list[_Member], health: _Health) -> None:
    if not health.is_owner:
        return
    health.stopping.set()
    for member in members:
        member.connection.close()
        os.close(member.lifeline)
    for member in members:
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(0 if health.failure else _STOP_SECONDS)
        member.process.kill()  # no effect on a process that has ended
        member.process.wait()
