"""Checks constraints before a worker compiles them, in a process that can be killed.

A short schema can take minutes to compile, and a library that compiles cannot be interrupted. The process compiles each
constraint first, within limits of time and memory; workers compile only constraints that passed. Verdicts are kept, so
that a client that repeats a request waits only once, and a costly constraint is not compiled again.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvferry.core.constraint import Constraint, ConstraintKind
from kvferry.core.errors import InvalidRequest
from kvferry.serving.text_model import TextModel
from kvferry.serving.text_process import JobEndedProcess, TextLimits, TextProcess

MAX_VERDICTS = 1024
CHECK_SECONDS = 2.0
_WALL_SECONDS = 30.0
_COSTLY = "CONSTRAINT_TOO_COSTLY"
_MEMORY_BYTES = 1 << 30
_MAX_WAITING = 64
_NICENESS = 10


@dataclass(slots=True, eq=False)
class _Running:
    """A check, and the number of requests that wait for it. Without them it is cancelled."""

    task: asyncio.Task[InvalidRequest | int]
    num_waiting: int = 0


class ConstraintCheck:
    """Checks the constraints of one model's requests. Used on one event loop."""

    def __init__(self, open_model: Callable[[], TextModel]) -> None:
        """
        Args:
            open_model: creates the model in the process; see `TextProcess`. The process starts with the first
                constraint.
        """
        self._process = TextProcess(
            open_model,
            TextLimits(
                job_seconds=CHECK_SECONDS,
                wall_seconds=_WALL_SECONDS,
                memory_bytes=_MEMORY_BYTES,
                max_waiting=_MAX_WAITING,
                niceness=_NICENESS,
                field="constraint",
                reason=_COSTLY,
                remedy="simplify the constraint",
            ),
            prepare=prepare,
        )
        self._verdicts: OrderedDict[bytes, InvalidRequest | int] = OrderedDict()
        """The memory of valid constraints in bytes, and the errors of others."""
        self._running: dict[tuple[str, bytes], _Running] = {}
        """Checks by owner and constraint, since each runs at the turn of its owner."""

    async def check(self, constraint: Constraint, owner: str) -> int:
        """Check that workers can compile a constraint; return its memory in bytes. Owners take turns; requests of an
        owner that wait for the same constraint wait for one check.

        Args:
            constraint: constraint of a request.
            owner: owner of the check; see `request.ClientIdentity.owner`.

        Raises:
            InvalidRequest: the constraint is invalid, uses an unsupported feature, or takes too much time or memory.
            Overloaded: too many constraints are waiting, or the machine is too busy.
            Unavailable: the process does not respond.
        """
        digest = hashlib.sha256(repr(constraint).encode("utf-8", "backslashreplace")).digest()
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            known = self._verdicts[digest]
        else:
            key = owner, digest
            running = self._running.get(key)
            if running is None:
                running = self._running[key] = _Running(asyncio.create_task(self._decide(digest, constraint, owner)))
            running.num_waiting += 1
            try:
                known = await asyncio.shield(running.task)
            finally:
                running.num_waiting -= 1
                if not running.num_waiting:
                    running.task.cancel()  # no effect if it has ended
                    if self._running.get(key) is running:
                        del self._running[key]
        if isinstance(known, InvalidRequest):
            raise InvalidRequest(known.message, field=known.field, reason=known.reason)
        return known

    async def _decide(self, digest: bytes, constraint: Constraint, owner: str) -> InvalidRequest | int:
        """Compile a constraint in the process, and keep the verdict."""
        verdict: InvalidRequest | int
        try:
            verdict = await self._process.run(owner, len(constraint.source), compile_constraint, constraint)
        except InvalidRequest as error:
            if isinstance(error, JobEndedProcess) and error.was_killed:
                raise  # the constraint may be valid: no verdict is kept
            verdict = error
        self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def stop(self) -> None:
        """Stop the process."""
        await self._process.stop()


def compile_constraint(model: TextModel, constraint: Constraint) -> int:
    """Compile a constraint for the model's vocabulary; return its memory in bytes.

    Raises:
        InvalidRequest: the constraint is invalid or uses an unsupported feature.
    """
    return model.check_constraint(constraint)


def prepare(model: TextModel) -> None:
    """Prepare the vocabulary of the model, which would otherwise take time from the first constraint. If it cannot be
    prepared, each check reports that."""
    with suppress(InvalidRequest):
        model.check_constraint(Constraint(ConstraintKind.JSON_OBJECT, ""))
