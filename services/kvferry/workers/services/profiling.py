"""Records steps of this worker's engine for `WorkerAdmin.Profile`."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress

from kvferry.core.errors import InvalidRequest, Overloaded
from kvferry.engine.loop.record_steps import RecordingSettings
from kvferry.engine.observe.log_file import write_log
from kvferry.engine.observe.recording import MAX_STEPS, Recording
from kvferry.engine.observe.timeline import chrome_trace, with_gaps
from kvferry.v1 import worker_admin_pb2
from kvferry.workers.calls.context import WorkerContext

_MAX_SECONDS = 600.0
_PART_BYTES = 1 << 18
_ALIVE_SECONDS = 5.0


class Profiling:
    """Recordings of one engine, one at a time."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._is_recording = False

    async def record(self, request: worker_admin_pb2.ProfileRequest) -> AsyncIterator[worker_admin_pb2.ProfilePart]:
        """Record steps and yield the trace and the log, in parts. A cancelled call ends its recording.

        Raises:
            InvalidRequest: a number is out of range.
            Overloaded: another call is recording.
        """
        _check(request)
        if self._is_recording:
            raise Overloaded(
                "another call is recording this engine; retry when that call has ended", retry_after_seconds=1.0
            )
        self._is_recording = True
        task = asyncio.create_task(self._record(request), name="profile")
        try:
            while not (await asyncio.wait({task}, timeout=_ALIVE_SECONDS))[0]:
                yield worker_admin_pb2.ProfilePart()  # gRPC would close a connection on which only pings arrive
            parts = iter(_parts(task.result()))
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                yield part
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._is_recording = False

    async def _record(self, request: worker_admin_pb2.ProfileRequest) -> Recording:
        own, here, full = self._context, asyncio.get_running_loop(), asyncio.Event()
        recording = await own.loop.begin_recording(
            RecordingSettings(
                own.clock,
                request.steps,
                own.model,
                has_tokens=request.tokens,
                resets_cache=request.reset_prefix_cache,
                on_full=lambda: here.call_soon_threadsafe(full.set),
            )
        )
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.timeout_seconds):
                    await full.wait()
        finally:
            await asyncio.shield(own.loop.end_recording(recording))
        return recording


def _check(request: worker_admin_pb2.ProfileRequest) -> None:
    if not 1 <= request.steps <= MAX_STEPS:
        raise InvalidRequest(f"steps must be between 1 and {MAX_STEPS}, not {request.steps}", field="steps")
    seconds = request.timeout_seconds
    if not (math.isfinite(seconds) and 0.0 < seconds <= _MAX_SECONDS):
        raise InvalidRequest(
            f"timeout_seconds must be above 0 and at most {_MAX_SECONDS:.0f}, not {seconds}", field="timeout_seconds"
        )


def _parts(recording: Recording) -> Iterator[worker_admin_pb2.ProfilePart]:
    trace = json.JSONEncoder(separators=(",", ":")).iterencode(
        chrome_trace(with_gaps(recording.timeline.spans), recording.log.steps)
    )
    for data in _joined(trace):
        yield worker_admin_pb2.ProfilePart(trace=data)
    for data in _joined(write_log(recording.log)):
        yield worker_admin_pb2.ProfilePart(log=data)


def _joined(texts: Iterable[str]) -> Iterator[bytes]:
    """Join strings into parts of about `_PART_BYTES`."""
    held: list[bytes] = []
    size = 0
    for text in texts:
        held.append(text.encode())
        size += len(held[-1])
        if size >= _PART_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
