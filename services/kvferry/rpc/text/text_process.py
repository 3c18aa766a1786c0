"""A separate process for large requests, because parsing, rendering and encoding text hold the GIL.

    event loop   submits a job ──────────────► awaits it, other streams continue
    text process           one job at a time   exits if a job takes too long or too much memory

If a job kills the process, only that job fails: the next job gets a new process.
"""

import asyncio
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvferry.core.errors import InvalidRequest, KvferryError, Overloaded, Unavailable
from kvferry.core.process.parent import die_with_parent
from kvferry.core.process.priority import lower_priority
from kvferry.rpc.text.text_model import TextModel

_log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
_START_SECONDS = 30.0
"""Seconds allowed for starting the process, in addition to the time of the job."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of the text process, and the error for a job that exceeds them."""

    job_seconds: float = 10.0
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
        self._turn = asyncio.Lock()
        self._num_jobs = 0
        """Number of jobs that are waiting or running."""
        self._running: set[asyncio.Task[Any]] = set()
        self._children: set[BaseProcess] = set()

    def start(self) -> None:
        """Start the process in the background, so that the first job does not wait for it."""
        self._process()

    async def run(self, job: Callable[Concatenate[TextModel, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `job(model, ...)` in the process; `job` must be a module-level function with picklable arguments.

        Raises:
            KvferryError: raised by the job.
            InvalidRequest: the job exceeds the limits of time or memory.
            Overloaded: too many jobs are waiting.
            Unavailable: the process does not respond.
        """
        if self._num_jobs >= self._limits.max_waiting:
            raise Overloaded(
                f"{self._num_jobs} requests are already waiting for their {self._limits.field} to be checked; retry "
                "later",
                retry_after_seconds=1.0,
            )
        self._num_jobs += 1
        try:
            await self._turn.acquire()  # a caller that is cancelled here leaves no job
        except BaseException:
            self._num_jobs -= 1
            raise
        task = asyncio.create_task(self._execute(lambda: self._process().submit(_run, self._limits, job, args, kwargs)))
        self._running.add(task)
        task.add_done_callback(self._discard)
        result: R = await asyncio.shield(task)  # a running job occupies its turn even if its caller is cancelled
        return result

    def _discard(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        self._num_jobs -= 1
        self._turn.release()
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, in case the caller was cancelled

    async def _execute(self, submit: Callable[[], Any]) -> Any:
        """Run a job. If the process exits, run it once more in a new process: the old one may have been killed between
        two jobs."""
        begun = asyncio.get_running_loop().time()
        for is_last in (False, True):
            try:
                async with asyncio.timeout(self._limits.job_seconds + _START_SECONDS):
                    return await asyncio.wrap_future(submit())
            except TimeoutError:
                self._abandon()
                raise Unavailable("the text process did not respond; it is restarted") from None
            except BrokenProcessPool:
                self._executor = None
                took_all = asyncio.get_running_loop().time() - begun >= self._limits.job_seconds
                if is_last or took_all:
                    break
        _log.warning("the text process exited during a job; the next job starts a new process")
        raise InvalidRequest(
            f"reading the {self._limits.field} took more than {self._limits.job_seconds:g} s or "
            f"{self._limits.memory_bytes >> 20} MiB; {self._limits.remedy}",
            field=self._limits.field,
            reason=self._limits.reason,
        )

    def _abandon(self) -> None:
        """Kill a process that does not respond, for example because it is stopped."""
        _log.warning("the text process does not respond and is killed")
        for child in self._children:
            child.kill()
        self._executor = None

    def _process(self) -> ProcessPoolExecutor:
        if self._executor is None:
            others = set(multiprocessing.active_children())
            self._executor = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(), self._open_model, self._limits, self._prepare),
            )
            self._executor.submit(_ready)  # starts the process
            self._children = set(multiprocessing.active_children()) - others
        return self._executor

    async def stop(self) -> None:
        """Stop the process after the job in progress."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)


# ---------------------------------------------------------------------- in the process

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
    _model = open_model()
    if prepare is not None:
        prepare(_model)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))


def _ready() -> None:
    """Do nothing; used as the first job of a process, to start it."""


def _run(limits: TextLimits, job: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    # The signal kills the process, even while it runs library code.
    signal.setitimer(signal.ITIMER_REAL, limits.job_seconds)
    try:
        return job(_model, *args, **kwargs)
    except KvferryError:
        raise
    except MemoryError:
        os._exit(1)
    except Exception as error:
        raise InvalidRequest(f"the request cannot be processed: {type(error).__name__}", reason="UNREADABLE") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
