"""Engine loop: runs an engine on a dedicated thread; asyncio code uses it through streams.

Commands are put into a queue that the engine's thread drains before each step; outputs are passed to the event loop
with one call per step, independent of the number of sequences. Only the engine's thread accesses the engine.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvferry.core.errors import STEP_FAILED, InvariantBroken, KvferryError, Unavailable
from kvferry.core.ids import AdapterId, RequestId
from kvferry.core.load import WorkerLoad
from kvferry.core.pausing import PauseMode, WeightVersion
from kvferry.core.process.exit_threads import start_thread
from kvferry.engine.engine import Engine
from kvferry.engine.loop.engine_stream import EngineStream, StreamItem
from kvferry.engine.loop.record_steps import (
    BeginRecording,
    EndRecording,
    RecordingSettings,
    begin_recording,
    end_recording,
)
from kvferry.engine.loop.stream_interval import Delivery, StreamInterval
from kvferry.engine.observe.recording import Recording
from kvferry.engine.schedule.adapters.adapter_store import LoadedAdapter
from kvferry.engine.schedule.blocks.prefix_index import CacheChange
from kvferry.engine.schedule.loads.kv_prefetch import KvPrefetchRequest
from kvferry.engine.schedule.messages import (
    Abort,
    AdapterLoaded,
    ChangeAdapter,
    ChangeWeights,
    ClosePins,
    Command,
    EngineRequest,
    MaskReady,
    ModelFailed,
    NewWeights,
    PauseGeneration,
    PinnedPrefix,
    PinPrefix,
    ReleaseExport,
    ResetPrefixCache,
    StepOutput,
    UnpinPrefix,
)
from kvferry.kv.interface.connector import LoadOutcome

_log = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0
T = TypeVar("T")


def _step_failed() -> InvariantBroken:
    return InvariantBroken("the step that was processing this request failed; the engine stops", reason=STEP_FAILED)


def _stopped() -> Unavailable:
    return Unavailable("the engine has stopped")


@dataclass(frozen=True, slots=True)
class _Stop:
    """Command that ends the engine's thread."""


CommandQueue = queue.SimpleQueue[Command | BeginRecording | EndRecording | _Stop]
"""Queue of commands to an engine. Loaders and tiers are created before the engine and put messages into it from their
threads.
"""


class EngineLoop:
    """An engine and its thread. `start` must be called on a running event loop; all other methods run on that loop's
    thread."""

    def __init__(
        self,
        engine: Engine,
        commands: CommandQueue,
        *,
        name: str,
        on_failure: Callable[[BaseException], None],
        on_cache_changes: Callable[[list[CacheChange]], None] = lambda _: None,
        on_weights: Callable[[WeightVersion], None] = lambda _: None,
        stream_interval: int = 1,
    ) -> None:
        """
        Args:
            engine: the engine; only its thread may use it after `start`.
            commands: command queue of the engine; loaders and tiers put their messages into it.
            name: name of the engine's thread.
            on_failure: called on the event loop after the engine has raised an unexpected error; the process should
                exit.
            on_cache_changes: called on the event loop with changes of the prefix cache.
            on_weights: called on the event loop when the weights have changed, after all events of earlier steps were
                delivered and before those of later ones.
            stream_interval: see `StreamInterval`.
        """
        self._engine = engine
        self._name = name
        self._on_failure = on_failure
        self._on_cache_changes = on_cache_changes
        self._on_weights = on_weights
        self._commands = commands
        self._interval = StreamInterval(stream_interval)
        self._streams: dict[RequestId, EngineStream] = {}
        self._prefetches: dict[RequestId, asyncio.Future[LoadOutcome]] = {}
        self._replies: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.load: WorkerLoad = engine.load()
        """Latest snapshot of the engine's load; the engine's thread replaces it after each step."""
        self.adapters = engine.adapter_infos
        """The registered adapters; the engine's thread replaces the tuple after each change."""
        self.is_pause_settled = False
        """Whether generation is paused and nothing is in flight; the engine's thread updates it after each step."""
        self.weights = engine.weights
        """The weights of the items that are delivered."""

    @property
    def num_steps(self) -> int:
        """Number of steps that the engine has made so far."""
        return self._engine.statistics.num_steps

    def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = start_thread(self._run, self._name, stop=lambda: self._commands.put(_Stop()))

    def cut(self, error: KvferryError) -> None:
        """End all streams with `error` and reject new streams; resources are freed when the loop stops."""
        self._failure = self._failure or error
        self._fail_streams(error)

    async def stop(self) -> None:
        """Stop after the step in progress. Open streams end with `Unavailable`. Idempotent."""
        ending = Unavailable("the worker is shutting down")
        self._failure = self._failure or ending  # rejects later streams, which would never get an event
        self._commands.put(_Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        self._fail_streams(ending)

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, request: EngineRequest) -> EngineStream:
        """Submit a request. The stream raises if the engine rejects it (`InvalidRequest`, `Overloaded`).

        Raises:
            Unavailable: the engine has stopped.
        """
        self._check_runs()
        stream = EngineStream(request.request_id, self.close)
        self._streams[request.request_id] = stream
        self._commands.put(request)
        return stream

    def close(self, stream: EngineStream) -> None:
        """Close a stream: abort the request if it is running, and free exports that were not consumed."""
        self._streams.pop(stream.request_id, None)
        if not stream.finished:
            self._commands.put(Abort(stream.request_id))
        for item in stream.take_ready():
            if item.export is not None:
                self.release_export(item.export)

    async def prefetch_kv(self, request: KvPrefetchRequest) -> LoadOutcome:
        """Fetch blocks into the prefix cache and return the outcome. Cancelling the calling task aborts the fetch.

        Raises:
            Unavailable: the engine has stopped.
        """
        self._check_runs()
        outcome: asyncio.Future[LoadOutcome] = asyncio.get_running_loop().create_future()
        self._prefetches[request.request_id] = outcome
        self._commands.put(request)
        try:
            return await outcome
        except asyncio.CancelledError:
            self._commands.put(Abort(request.request_id))
            raise
        finally:
            del self._prefetches[request.request_id]

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache and return the number of dropped blocks.

        Raises:
            Unavailable: the engine has stopped.
        """
        return await self._ask(ResetPrefixCache)

    async def change_adapter(self, name: str, loaded: LoadedAdapter | None) -> AdapterId:
        """Register, replace or remove an adapter; see `Engine.change_adapter`.

        Raises:
            Unavailable: the engine has stopped.
            KvferryError: see `Engine.change_adapter`.
        """
        outcome: AdapterId | KvferryError = await self._ask(partial(ChangeAdapter, name, loaded))
        if isinstance(outcome, KvferryError):
            raise outcome
        return outcome

    async def pause_generation(self, mode: PauseMode | None) -> None:
        """Pause generation, change the mode of the pause, or resume; see `schedule.pausing`.

        Args:
            mode: `None` to resume.

        Raises:
            Unavailable: the engine has stopped.
        """
        await self._ask(partial(PauseGeneration, mode))

    async def change_weights(self, weights: NewWeights) -> int:
        """Compute with other weights; see `Engine.change_weights`.

        Raises:
            Unavailable: the engine has stopped, or generation is not paused.
        """
        outcome: int | KvferryError = await self._ask(partial(ChangeWeights, weights))
        if isinstance(outcome, KvferryError):
            raise outcome
        return outcome

    async def pin_prefix(self, request: EngineRequest, ttl_seconds: float) -> PinnedPrefix:
        """Compute a prompt and pin its full blocks; see `Pinning.pin`. Cancelling the calling task aborts the request.

        Raises:
            Unavailable: the engine has stopped.
            KvferryError: see `Pinning.pin`.
        """
        try:
            outcome: PinnedPrefix | KvferryError = await self._ask(partial(PinPrefix, request, ttl_seconds))
        except asyncio.CancelledError:
            self._commands.put(Abort(request.request_id))
            raise
        if isinstance(outcome, KvferryError):
            raise outcome
        return outcome

    async def _ask(self, command: Callable[[Callable[[T], None]], Command | BeginRecording | EndRecording]) -> T:
        """Queue a command and return its reply."""
        self._check_runs()
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._replies.add(reply)

        def give(answer: T) -> None:
            if not reply.done():
                reply.set_result(answer)

        self._commands.put(command(lambda answer: self._call_soon(give, answer)))
        try:
            return await reply
        finally:
            self._replies.discard(reply)

    async def unpin_prefix(self, scope: str, token_ids: list[int]) -> PinnedPrefix | None:
        """End the pin of a prefix; see `Pinning.unpin`.

        Raises:
            Unavailable: the engine has stopped.
        """
        return await self._ask(partial(UnpinPrefix, scope, token_ids))

    async def close_pins(self) -> None:
        """End all pins and refuse new ones.

        Raises:
            Unavailable: the engine has stopped.
        """
        await self._ask(ClosePins)

    async def begin_recording(self, settings: RecordingSettings) -> Recording:
        """Begin recording the engine's steps.

        Raises:
            Unavailable: the engine has stopped.
        """
        return await self._ask(partial(BeginRecording, settings))

    async def end_recording(self, recording: Recording) -> None:
        """End a recording, full or not.

        Raises:
            Unavailable: the engine has stopped.
        """
        await self._ask(partial(EndRecording, recording))

    def release_export(self, number: int) -> None:
        """Free the pages of export `number`."""
        self._commands.put(ReleaseExport(number))

    def _check_runs(self) -> None:
        if self._failure is not None:
            raise _stopped()

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            idle = True
            while True:
                if not self._take_commands(wait=idle):
                    return
                output = (
                    self._engine.step(self._announce)
                    if self._engine.has_work
                    else StepOutput([], {}, [], [], [], [], {}, ran=False)
                )
                self._hand_out(output)
                idle = not output.ran
                self.load = self._engine.load()
                self.is_pause_settled = self._engine.is_pause_settled
        except BaseException as error:
            _log.exception("the engine stopped")
            self._call_soon(self._fail, error, self._engine.failed_step)

    def _take_commands(self, *, wait: bool) -> bool:
        """Execute queued commands; return whether to continue. If the engine is idle, wait for a command, at most until
        a pin expires."""
        try:
            command = self._commands.get(block=wait, timeout=self._engine.pin_seconds_left if wait else None)
            while not isinstance(command, _Stop):
                self._carry_out(command)
                command = self._commands.get(block=False)
        except queue.Empty:
            return True
        return False

    def _carry_out(self, command: Command | BeginRecording | EndRecording) -> None:
        match command:
            case EngineRequest():
                try:
                    self._engine.add(command)
                except InvariantBroken:
                    raise
                except KvferryError as error:
                    self._call_soon(self._deliver_error, command.request_id, error)
            case KvPrefetchRequest():
                self._engine.prefetch_kv(command)
            case ReleaseExport(number):
                self._engine.release_export(number)
            case Abort(request_id):
                self._interval.drop(request_id)
                self._engine.abort(request_id)
            case ResetPrefixCache(reply):
                reply(self._engine.reset_prefix_cache())
            case PinPrefix(request, ttl_seconds, reply):
                self._engine.pinning.pin(request, ttl_seconds, reply)
            case ChangeAdapter():
                self._change_adapter(command)
            case PauseGeneration(mode, done):
                if mode is None:
                    self._engine.pausing.resume()
                else:
                    self._engine.pausing.pause(mode)
                self.is_pause_settled = False  # until the next look, so that a caller never sees an earlier pause's
                done(None)
            case ChangeWeights():
                self._change_weights(command)
            case UnpinPrefix(scope, token_ids, unpinned):
                unpinned(self._engine.pinning.unpin(scope, token_ids))
            case ClosePins(closed):
                self._engine.close_pins()
                closed(None)
            case BeginRecording(settings, begun):
                begun(begin_recording(self._engine, settings))
            case EndRecording(recording, ended):
                end_recording(self._engine, recording)
                ended(None)
            case AdapterLoaded(adapter, loaded):
                self._engine.adapter_loaded(adapter, loaded)
            case ModelFailed(error):
                raise error
            case MaskReady():
                pass  # the next step finds the mask
            case message:
                self._engine.post(message)

    def _change_adapter(self, command: ChangeAdapter) -> None:
        try:
            outcome: AdapterId | KvferryError = self._engine.change_adapter(command.name, command.loaded)
        except KvferryError as error:
            outcome = error
        self.adapters = self._engine.adapter_infos
        command.reply(outcome)

    def _change_weights(self, command: ChangeWeights) -> None:
        try:
            outcome: int | KvferryError = self._engine.change_weights(command.weights)
        except KvferryError as error:
            outcome = error
        else:
            self._call_soon(self._changed_weights, self._engine.weights)
        command.reply(outcome)

    def _hand_out(self, output: StepOutput) -> None:
        items: list[Delivery] = [(load.request_id, StreamItem(load=load), False) for load in output.loads]
        items += [(request_id, StreamItem(decision=made), False) for request_id, made in output.decisions]
        items += [(made.request_id, StreamItem(progress=made), False) for made in output.progress]
        for update in output.updates:
            if update.error is not None:
                self._interval.drop(update.request_id)
                self._call_soon(self._deliver_error, update.request_id, update.error)
                continue
            export = output.exports.get(update.request_id)
            over = export is not None or update.finish_reason is not None
            retention = output.retained.get(update.request_id)
            item = StreamItem(update=update, export=export, retention=retention, weights=self._engine.weights)
            items.append((update.request_id, item, over))
        if items := self._interval.due(items):
            self._call_soon(self._deliver, items)
        if output.cache_changes:
            self._call_soon(self._on_cache_changes, output.cache_changes)

    def _announce(self, started: list[RequestId]) -> None:
        self._call_soon(self._deliver, [(request_id, StreamItem(is_started=True), False) for request_id in started])

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # ------------------------------------------------------------------ the event loop's thread

    def _deliver(self, items: list[Delivery]) -> None:
        for request_id, item, over in items:
            stream = self._streams.get(request_id)
            waiting = self._prefetches.get(request_id)
            if waiting is not None and item.load is not None and not waiting.done():
                waiting.set_result(item.load)
            if stream is None:
                if item.export is not None:  # the stream was closed during the last step: free the pages
                    self.release_export(item.export)
                continue
            stream.finished = stream.finished or over
            stream.put(item)

    def _changed_weights(self, weights: WeightVersion) -> None:
        self.weights = weights
        self._on_weights(weights)

    def _deliver_error(self, request_id: RequestId, error: KvferryError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.finished = True
            stream.put(error)

    def _fail(self, error: BaseException, failed_step: frozenset[RequestId]) -> None:
        self._failure = error
        for request_id in failed_step:
            self._deliver_error(request_id, _step_failed())
        self._fail_streams(_stopped())
        self._on_failure(error)

    def _fail_streams(self, error: KvferryError) -> None:
        for stream in list(self._streams.values()):
            if not stream.finished:
                stream.finished = True
                stream.put(error)
        waiting: list[asyncio.Future[Any]] = [*self._prefetches.values(), *self._replies]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
