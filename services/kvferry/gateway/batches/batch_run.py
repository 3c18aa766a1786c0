"""The computation of one batch: checks its input, computes its lines, and makes the files of the results visible.

A run can be ended at any point; the next run of the batch continues after the lines that are in the files of results.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Raw

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, Unavailable
from kvferry.gateway.batches import lines
from kvferry.gateway.batches.batch_errors import NoSuchFile, ResultsLost
from kvferry.gateway.batches.batch_usage import BatchUsage, usage_of
from kvferry.gateway.batches.line_slots import LineSlots
from kvferry.gateway.batches.lines import InputLine, LineFailure, LineResponse, Validation
from kvferry.gateway.batches.records import BatchRecord, FileRecord, LineError, result_ids
from kvferry.gateway.batches.result_file import ResultWriter
from kvferry.gateway.batches.states import BatchEvent, BatchState
from kvferry.gateway.batches.storage import BatchStorage, ResultLines
from kvferry.gateway.decide.config import BatchConfig

_log = logging.getLogger(__name__)
_MAX_HELD_BYTES = 64 << 20
"""Maximum size of the bodies of a batch's lines that are in memory, unless one line alone is larger."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """Answer of the HTTP API to the request of a line."""

    status: int
    request_id: str
    body: bytes
    retry_after_seconds: float | None = None
    code: str = ""
    """Code of the error; empty if there is none."""

    @property
    def is_transient(self) -> bool:
        """Whether the gateway had no room for the request, so that it is sent again later."""
        return self.status in (429, 503) or self.code == "deadline_in_queue"


class LineCall(Protocol):
    """Function that computes a line."""

    async def __call__(self, tenant: str, path: str, body: bytes) -> LineAnswer:
        """Answer a request as the HTTP API does.

        Args:
            tenant: tenant of the batch.
            path: path of the route.
            body: body of the request, JSON.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the runs of all batches share."""

    storage: BatchStorage
    config: BatchConfig
    clock: Clock
    slots: LineSlots
    call: LineCall
    check_model: Callable[[str, str], None]
    """Function that raises UnknownModel if a tenant may not use a model."""
    has_tenant: Callable[[str], bool]
    """Function that returns whether a tenant still exists."""
    tenant_lines: Callable[[str], int]
    """Function that returns how many lines of a tenant may run at a time."""
    on_line: Callable[[str], None] = lambda _: None
    """Called with the outcome of each line, and with `retried`."""
    on_state: Callable[[BatchState], None] = lambda _: None
    """Called with each state that a batch enters."""
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits for some seconds."""


@dataclass(frozen=True, slots=True)
class _Results:
    """The open files of the results."""

    output: ResultWriter
    errors: ResultWriter

    @property
    def num_bytes(self) -> int:
        return self.output.file.size + self.errors.file.size

    @property
    def done(self) -> set[str]:
        return self.output.file.done | self.errors.file.done


class BatchRun:
    """A run of one batch."""

    def __init__(self, record: BatchRecord, parts: RunParts, lease: int) -> None:
        """
        Args:
            record: the batch.
            parts: what all runs share.
            lease: number of the lease under which it runs; see `BatchStorage.try_lock`.
        """
        self.record = record
        self._parts, self._lease = parts, lease
        self._stopped = asyncio.Event()
        self._reason: BatchEvent | None = None
        """Why the rest of the lines is not computed; `None` if all are."""
        self._results: _Results | None = None
        self._stored_bytes = 0
        self._has_complained = False
        """Whether the log has an error of the storage."""

    def stop(self, reason: BatchEvent) -> None:
        """End the batch without the lines that are not computed yet.

        Args:
            reason: `EXPIRE` or `CANCEL`.
        """
        if self._reason is None:
            self._reason = reason
            self._stopped.set()

    def counts(self) -> dict[str, int]:
        """Return the numbers of lines with a result, by the name of the field; empty before the lines are computed."""
        if self._results is None:
            return {}
        return {"completed": self._results.output.file.count, "failed": self._results.errors.file.count}

    async def run(self) -> None:
        """Run the batch until it is over.

        Raises:
            KvferryError: the storage cannot be used, or another gateway runs the batches.
            OSError: a file of the batch cannot be read.
        """
        if self.record.status is BatchState.VALIDATING and self._reason is None:
            await self._validate()
        if self.record.is_over:
            return
        if self.record.status is BatchState.CANCELLING:
            self.stop(BatchEvent.CANCEL)
        if self.record.status is BatchState.VALIDATING:  # it expired before it began
            await self._change(BatchEvent.EXPIRE)
            return
        if self.record.total:
            self._stored_bytes = await self._parts.storage.run(
                self._parts.storage.records.stored_bytes, self.record.tenant
            )
            async with self._opened() as results:
                await self._compute(results)
            if self._reason is not None:
                await self._refuse_rest()
        await self._finish()

    # -- input -------------------------------------------------------------------------------------------------

    async def _validate(self) -> None:
        try:
            found = await self._parts.storage.run_long(self._read_all)
        except NoSuchFile:
            found = Validation([LineError("file_not_found", "the input file does not exist any more", "input_file_id")])
        if not found.errors:
            try:
                self._parts.check_model(self.record.tenant, found.model or "")
            except KvferryError as error:
                found.errors.append(LineError("model_not_found", error.message, "body.model", 1))
        if found.errors:
            await self._change(BatchEvent.REFUSE, errors=tuple(found.errors))
        else:
            await self._change(BatchEvent.ACCEPT, total=found.total, model=found.model)

    def _read_all(self) -> Validation:
        with self._parts.storage.open_content(self.record.input_file_id) as file:
            return lines.validate(file, self.record.endpoint, self._parts.config.max_body_bytes)

    # -- lines -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[_Results]:
        output, errors = await self._parts.storage.run_long(self._open_both)
        run = self._parts.storage.run
        results = self._results = _Results(ResultWriter(output, run), ResultWriter(errors, run))
        try:
            yield results
        finally:
            await asyncio.gather(results.output.close(), results.errors.close())

    def _open_both(self) -> tuple[ResultLines, ResultLines]:
        output, errors = result_ids(self.record.id)
        first = self._parts.storage.open_results(output, self._lease)
        try:
            return first, self._parts.storage.open_results(errors, self._lease)
        except BaseException:
            first.close()
            raise

    @asynccontextmanager
    async def _input(self) -> AsyncIterator[Iterator[InputLine]]:
        storage = self._parts.storage
        file = await storage.run_long(storage.open_content, self.record.input_file_id)
        try:
            yield lines.valid_lines(file, self.record.endpoint, self._parts.config.max_body_bytes)
        finally:
            # A cancelled task may leave a read on a thread: the file is closed after it.
            await storage.run_long(file.close)

    async def _compute(self, results: _Results) -> None:
        """Compute the lines that have no result, until all have one or the run is stopped."""
        done = results.done
        running: dict[asyncio.Task[None], int] = {}
        stopped = asyncio.create_task(self._stopped.wait(), name="batch stopped")
        async with self._input() as reader:
            try:
                while not stopped.done():
                    line = await self._parts.storage.run_long(_next, reader, done)
                    if line is None:
                        break
                    while self._is_full(running, len(line.body)) and not stopped.done():
                        await _one_of(running, stopped)
                    if not stopped.done():
                        task = asyncio.create_task(self._line(line, results), name="batch line")
                        running[task] = len(line.body)
                while running and not stopped.done():
                    await _one_of(running, stopped)
            finally:
                stopped.cancel()
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, stopped, return_exceptions=True)

    def _is_full(self, running: dict[asyncio.Task[None], int], size: int) -> bool:
        limit = min(self._parts.slots.limit(), self._parts.tenant_lines(self.record.tenant))
        return len(running) >= max(1, limit) or bool(running and sum(running.values()) + size > _MAX_HELD_BYTES)

    async def _line(self, line: InputLine, results: _Results) -> None:
        """Compute a line, and write its result."""
        answer = await self._answer(line, results)
        if isinstance(answer, LineFailure):
            await self._write(results.errors, lines.result_line(line.custom_id, None, answer))
            self._parts.on_line("failed")
            return
        response = LineResponse(answer.status, answer.request_id, Raw(answer.body))
        is_good = answer.status < 400
        await self._write(results.output if is_good else results.errors, lines.result_line(line.custom_id, response))
        self._parts.on_line("completed" if is_good else "failed")

    async def _answer(self, line: InputLine, results: _Results) -> LineAnswer | LineFailure:
        """Send the request of a line until the gateway has room for it."""
        if line.is_stream:
            return lines.STREAMED
        parts, pause = self._parts, _FIRST_PAUSE_SECONDS
        while True:
            async with parts.slots.taken():
                if not parts.has_tenant(self.record.tenant):
                    return lines.TENANT_GONE
                if self._stored_bytes + results.num_bytes >= parts.config.tenant_file_bytes:
                    return lines.TOO_LARGE
                answer = await parts.call(self.record.tenant, self.record.endpoint, line.body)
            if not answer.is_transient:
                return answer
            parts.on_line("retried")
            await parts.pause(max(pause, answer.retry_after_seconds or 0.0))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    async def _write(self, writer: ResultWriter, line: bytes) -> None:
        """Write a result; while the storage is full or does not answer, try again."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                await writer.add(line)
                return
            except (OSError, Unavailable) as error:
                if not self._has_complained:
                    _log.error("batch %s: a result cannot be written: %s; it is tried again", self.record.id, error)
                self._has_complained = True
            await self._parts.pause(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    # -- end ---------------------------------------------------------------------------------------------------

    async def _refuse_rest(self) -> None:
        """Write an error for each line without a result."""
        error, outcome = lines.EXPIRED, "expired"
        if self._reason is BatchEvent.CANCEL:
            error, outcome = lines.CANCELLED, "cancelled"
        async with self._opened() as results:
            count = await self._parts.storage.run_long(self._append_errors, results.done, results.errors.file, error)
        for _ in range(count):
            self._parts.on_line(outcome)

    def _append_errors(self, done: set[str], errors: ResultLines, error: LineFailure) -> int:
        """Append an error for each line that is not in `done`; return their number."""
        count, made = 0, list[bytes]()
        with suppress(NoSuchFile), self._parts.storage.open_content(self.record.input_file_id) as file:
            for line in lines.valid_lines(file, self.record.endpoint, self._parts.config.max_body_bytes):
                if line.custom_id not in done:
                    made.append(lines.result_line(line.custom_id, None, error))
                    count += 1
        if made:
            errors.append(b"".join(made))
        return count

    async def _finish(self) -> None:
        """Make the files of the results visible, and enter the final state."""
        if self.record.status is BatchState.IN_PROGRESS and self._reason is None:
            await self._change(BatchEvent.FINISH, (), **self.counts())
        files, fields = await self._parts.storage.run_long(self._result_files)
        if self._results is not None and sum(file.num_bytes for file in files) != self._results.num_bytes:
            raise ResultsLost("results were lost after their lines were computed; these are computed again")
        ends = {BatchState.FINALIZING: BatchEvent.COMPLETE, BatchState.CANCELLING: BatchEvent.STOP}
        event = ends.get(self.record.status, BatchEvent.EXPIRE)
        await self._change(event, files, **fields, **self.counts())
        if not self.record.is_over:  # cancelled meanwhile
            await self._change(BatchEvent.STOP, files, **fields, **self.counts())

    def _result_files(self) -> tuple[list[FileRecord], dict[str, Any]]:
        """Return the records of the files, and the fields of the batch that follow from the files."""
        now, found, fields = int(self._parts.clock.wall()), list[FileRecord](), dict[str, Any](usage=BatchUsage())
        kinds = ("output", "error")
        for kind, file_id in zip(kinds, result_ids(self.record.id), strict=True):
            size = self._parts.storage.content_size(file_id)
            if not size:
                self._parts.storage.discard(file_id, self._lease)
                continue
            fields[f"{kind}_file_id"] = file_id
            if kind == "output":
                with self._parts.storage.open_content(file_id) as lines_of_file:
                    fields["usage"] = usage_of(lines_of_file)
            name = f"{self.record.id}_{kind}.jsonl"
            expires = now + self.record.output_seconds
            found.append(FileRecord(file_id, self.record.tenant, "batch_output", name, size, now, expires))
        return found, fields

    async def _change(self, event: BatchEvent, files: Sequence[FileRecord] = (), **fields: Any) -> None:
        """Apply an event. If another process has cancelled the batch, take over its state instead."""
        records, now = self._parts.storage.records, self._parts.clock.wall()
        changed = await self._parts.storage.run(
            records.change, self.record.id, event, now, files, lease=self._lease, **fields
        )
        if changed is None:
            self.record = await self._parts.storage.run(records.batch, self.record.tenant, self.record.id)
        else:
            self.record = changed
            self._parts.on_state(changed.status)


def _next(reader: Iterator[InputLine], done: set[str]) -> InputLine | None:
    """Return the next line that has no result; `None` at the end."""
    return next((line for line in reader if line.custom_id not in done), None)


async def _one_of(running: dict[asyncio.Task[None], int], stopped: "asyncio.Task[bool]") -> None:
    """Wait until a line has ended, or the run is stopped; drop the ended lines, and raise the error of one."""
    ended, _ = await asyncio.wait((*running, stopped), return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        if task is not stopped:
            running.pop(task)  # type: ignore[arg-type]  # the others are lines
            task.result()
