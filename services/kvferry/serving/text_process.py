"""A separate process for large requests, because parsing, rendering and encoding text hold the GIL.

    event loop   submits a job ──────────────► awaits it, other streams continue
    text process           one job at a time   exits if a job takes too long or too much memory

If a job kills the process, only that job fails: the next job gets another process. From the first such job on, a spare
process is kept, so that no job waits for the start of a process that another one has killed.
"""

import asyncio
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded, Unavailable
from kvferry.core.process.parent import die_with_parent
from kvferry.core.process.priority import lower_priority
from kvferry.serving.job_turns import JobTurns, Turn
from kvferry.serving.text_model import TextModel

_log = logging.getLogger(__name__)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_EXIT_TRIES, _EXIT_SECONDS = 100, 0.05
_Pool = tuple[ProcessPoolExecutor, set[BaseProcess]]
P = ParamSpec("P")
R = TypeVar("R")
_START_SECONDS = 30.0
"""Seconds allowed for starting the process, in addition to the time of the job."""


class JobEndedProcess(InvalidRequest):
    """The process ended during a job, which exceeded a limit of time or memory, or crashed it, twice."""

    was_killed = False
    """Whether the process ended by SIGKILL or SIGTERM, for example because the machine ran out of memory."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of the text process, and the error for a job that exceeds them."""

    job_seconds: float = 10.0
    """Maximum processor time of a job, which does not depend on other processes."""
    wall_seconds: float = 40.0
    """Maximum duration of a job. It is longer than `job_seconds`, since the process has a low priority."""
    memory_bytes: int = 2 << 30
    """Maximum writable memory of the process in bytes."""
    max_waiting: int = 16
    """Maximum number of waiting and running jobs; additional jobs are rejected."""
    niceness: int = 5
    """Niceness of the process, which gives it a lower priority than the event loop and the engines."""
    field: str = "prompt"
    """Request field in the error for a job that exceeds the limits."""
    reason: str = "PROMPT_TOO_COSTLY"
    """Reason in that error."""
    remedy: str = "send a shorter prompt"
    """Remedy in that error."""


class TextProcess:
    """Runs jobs that use a text model in a separate process. Used on one event loop."""

    def __init__(
        self,
        open_model: Callable[[], TextModel],
        limits: TextLimits | None = None,
        *,
        prepare: Callable[[TextModel], None] | None = None,
    ) -> None:
        """
        Args:
            open_model: creates the model in the process; a module-level function, or a `functools.partial` of one.
            limits: limits of the process; `TextLimits()` by default.
            prepare: module-level function called in the process before its first job; its time does not count towards
                that job.
        """
        self._open_model = open_model
        self._limits = limits or TextLimits()
        self._prepare = prepare
        self._executor: ProcessPoolExecutor | None = None
        self._last_started: ProcessPoolExecutor | None = None
        """The last process that is known to have started."""
        self._spare: _Pool | None = None
        self._turns = JobTurns(self._limits.max_waiting, self._limits.field)
        self._running: set[asyncio.Task[Any]] = set()
        self._children: set[BaseProcess] = set()

    def start(self) -> None:
        """Start the process in the background, so that the first job does not wait for it."""
        self._process()

    async def run(
        self,
        owner: str,
        size: int,
        job: Callable[Concatenate[TextModel, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run `job(model, ...)` in the process, at the turn of its owner; see `JobTurns`.

        Args:
            owner: whose job it is; see `request.ClientIdentity.owner`.
            size: estimated cost of the job, for example its bytes.
            job: module-level function, called as `job(model, *args, **kwargs)`.
            *args, **kwargs: picklable arguments of the job.

        Raises:
            KvferryError: raised by the job.
            JobEndedProcess: the job exceeds the limits of time or memory.
            Overloaded: too many jobs are waiting, or the machine is too busy for the job.
            Unavailable: the process does not respond.
        """
        turn = await self._turns.enter(owner, size)  # a caller that is cancelled here leaves no job
        execution = self._execute(turn, lambda: self._process().submit(_run, self._limits, job, args, kwargs))
        task = asyncio.create_task(execution)
        self._running.add(task)
        task.add_done_callback(lambda done: self._discard(done, turn))
        result: R = await asyncio.shield(task)  # a running job occupies its turn even if its caller is cancelled
        return result

    def _discard(self, task: "asyncio.Task[Any]", turn: Turn) -> None:
        self._running.discard(task)
        self._turns.leave(turn)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, in case the caller was cancelled

    async def _execute(self, turn: Turn, submit: Callable[[], Any]) -> Any:
        """Run a job. If the process exits, run it once more in a new process: the old one may have been killed between
        two jobs."""
        begun = asyncio.get_running_loop().time()
        codes: list[int | None] = []
        for is_last in (False, True):
            try:
                async with asyncio.timeout(self._limits.wall_seconds + _START_SECONDS):
                    await self._wait_started(turn)
                    return await asyncio.wrap_future(submit())
            except TimeoutError:
                self._abandon()
                raise Unavailable("the text process did not respond; it is restarted") from None
            except BrokenProcessPool:
                codes = [await _exit_code(child) for child in self._children]
                self._replace()
                if -signal.SIGALRM in codes:
                    raise Overloaded(
                        f"the machine is too busy to check the {self._limits.field}; retry later",
                        retry_after_seconds=5.0,
                    ) from None
                took_all = asyncio.get_running_loop().time() - begun >= self._limits.job_seconds
                if is_last or took_all:
                    break
        _log.warning("the text process exited during a job (%s); the next job starts a new process", codes)
        ended = JobEndedProcess(
            f"reading the {self._limits.field} {_cause(codes, self._limits)}; {self._limits.remedy}",
            field=self._limits.field,
            reason=self._limits.reason,
        )
        ended.was_killed = any(code in (-signal.SIGKILL, -signal.SIGTERM) for code in codes)
        raise ended

    async def _wait_started(self, turn: Turn) -> None:
        """Wait until the process has started, whose start does not count as time of the job."""
        executor = self._process()
        if executor is not self._last_started:
            await asyncio.wrap_future(executor.submit(_ready))
            self._last_started = executor
            turn.begun = asyncio.get_running_loop().time()

    def _abandon(self) -> None:
        """Kill a process that does not respond, for example because it is stopped."""
        _log.warning("the text process does not respond and is killed")
        for child in self._children:
            child.kill()
        self._replace()

    def _replace(self) -> None:
        """Continue with the spare process, if there is one, after the process has ended; start another spare."""
        self._executor, self._children = self._spare or (None, set())
        self._spare = self._started()

    def _process(self) -> ProcessPoolExecutor:
        if self._executor is None:
            self._executor, self._children = self._started()
        return self._executor

    def _started(self) -> "_Pool":
        others = set(multiprocessing.active_children())
        executor = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(os.getpid(), self._open_model, self._limits, self._prepare),
        )
        executor.submit(_ready)  # starts the process
        return executor, set(multiprocessing.active_children()) - others

    async def stop(self) -> None:
        """Stop the process after the job in progress."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        executors = [self._executor, None if self._spare is None else self._spare[0]]
        self._executor = self._spare = None
        for executor in executors:
            if executor is not None:
                await asyncio.to_thread(executor.shutdown, cancel_futures=True)


def _cause(codes: Sequence[int | None], limits: TextLimits) -> str:
    """Return why a job ended its process, from the exit codes of its attempts."""
    if -signal.SIGPROF in codes:
        return f"took more than {limits.job_seconds:g} s of processor time"
    crashes = [signal.Signals(-code).name for code in codes if code is not None and -code in _CRASHES]
    if crashes:
        return f"ended the process that reads it ({crashes[-1]})"
    return f"took more than {limits.job_seconds:g} s of processor time or {limits.memory_bytes >> 20} MiB"


async def _exit_code(child: BaseProcess) -> int | None:
    """Return the exit code of a process that has ended. The executor's thread may wait for it at the same time, and
    sets the code then."""
    for _ in range(_EXIT_TRIES):
        await asyncio.to_thread(child.join, _EXIT_SECONDS)
        if child.exitcode is not None:
            return child.exitcode
    return None


# ---------------------------------------------------------------------- code of the child process

_model: TextModel


def _begin(
    parent_pid: int,
    open_model: Callable[[], TextModel],
    limits: TextLimits,
    prepare: Callable[[TextModel], None] | None,
) -> None:
    global _model  # each process has one model
    die_with_parent(parent_pid)
    # The terminal signals the whole process group, but the parent stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(limits.niceness)
    _model = replace(open_model(), is_off_loop=True)
    if prepare is not None:
        prepare(_model)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))


def _ready() -> None:
    """Do nothing; used as the first job of a process, to start it."""


def _run(limits: TextLimits, job: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    # The signals kill the process, even while it runs library code.
    signal.setitimer(signal.ITIMER_PROF, limits.job_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    try:
        return job(_model, *args, **kwargs)
    except KvferryError:
        raise
    except MemoryError:
        os._exit(1)
    except Exception as error:
        raise InvalidRequest(f"the request cannot be processed: {type(error).__name__}", reason="UNREADABLE") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
