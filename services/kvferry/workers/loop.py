"""Runs an engine on a thread of its own; asyncio code talks to it through streams.

Messages in (a queue that the engine's thread empties before each step), messages out (one hop to the event
loop per step, whatever the number of sequences). The engine itself is touched by its thread alone.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken, KvferryError, Unavailable
from kvferry.core.ids import RequestId
from kvferry.engine.ahead import AheadRequest
from kvferry.engine.engine import Engine
from kvferry.engine.jobs import Progress
from kvferry.engine.messages import EngineLoad, EngineRequest, StepOutput
from kvferry.engine.prefix_index import CacheChange
from kvferry.engine.scheduler import SequenceUpdate
from kvferry.kv.connector import LoadOutcome, PagesQuiet
from kvferry.kv.price import Decision
from kvferry.kv.tiering import StoreDone, TierAnswer

_log = logging.getLogger(__name__)

_STOP = object()
_JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StreamItem:
    """One thing a stream hears: a drawn token, how its load ended, what was decided about it, how far its prompt is."""

    update: SequenceUpdate | None = None
    export: int | None = None
    """With `update`: the number of the export that the receiver now owns."""
    load: LoadOutcome | None = None
    decision: Decision | None = None
    progress: Progress | None = None


class EngineStream:
    """What one request hears from the engine, in order. Close it in every case; it is a context manager."""

    def __init__(self, owner: "EngineLoop", request_id: RequestId) -> None:
        self._owner = owner
        self.request_id = request_id
        self._items: asyncio.Queue[StreamItem | KvferryError] = asyncio.Queue()
        self.finished = False
        """Whether the engine is done with the request."""

    def __aiter__(self) -> AsyncIterator[StreamItem]:
        return self

    async def __anext__(self) -> StreamItem:
        if self.finished and self._items.empty():
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, KvferryError):
            raise item
        return item

    def take_ready(self) -> list[StreamItem]:
        """What has arrived meanwhile, without waiting; an error stays for the next iteration."""
        ready: list[StreamItem] = []
        while not self._items.empty():
            item = self._items.get_nowait()
            if isinstance(item, KvferryError):
                self._items.put_nowait(item)
                break
            ready.append(item)
        return ready

    def put(self, item: StreamItem | KvferryError) -> None:
        """Called by the loop, on the event loop's thread."""
        self._items.put_nowait(item)

    def __enter__(self) -> "EngineStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.close(self)


class EngineLoop:
    """An engine and its thread. `start` needs a running event loop; all else is called from that loop's thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        on_failure: Callable[[BaseException], None],
        on_cache_changes: Callable[[list[CacheChange]], None] = lambda _: None,
    ) -> None:
        """
        Args:
            on_cache_changes: called on the event loop with what came into the prefix cache or left it.
            on_failure: called on the event loop when the engine broke an invariant; the process should end.
        """
        self._engine = engine
        self._name = name
        self._on_failure = on_failure
        self._on_cache_changes = on_cache_changes
        self._commands: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._streams: dict[RequestId, EngineStream] = {}
        self._ahead: dict[RequestId, asyncio.Future[LoadOutcome]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.load: EngineLoad = engine.load()
        """The latest snapshot; replaced as a whole by the engine's thread."""

    def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def cut(self, error: KvferryError) -> None:
        """End all streams with `error`, and refuse new ones; what they hold is given back when the loop stops."""
        self._failure = self._failure or error
        self._fail_streams(error)

    async def stop(self) -> None:
        """Stop after the step in progress. Streams still open hear `Unavailable`. Idempotent."""
        ending = Unavailable("the worker is shutting down")
        self._failure = self._failure or ending  # a stream submitted from here on would never hear anything
        self._commands.put(_STOP)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        self._fail_streams(ending)

    def submit(self, request: EngineRequest) -> EngineStream:
        """Give the engine a request. Errors of intake (`InvalidRequest`, `Overloaded`) arrive through the stream.

        Raises:
            Unavailable: the engine has stopped.
        """
        if self._failure is not None:
            raise Unavailable("the engine has stopped; the worker is restarting")
        stream = EngineStream(self, request.request_id)
        self._streams[request.request_id] = stream
        self._commands.put(request)
        return stream

    def close(self, stream: EngineStream) -> None:
        """The receiver is done with a stream. Aborts the request if it still runs, frees an export nobody took."""
        self._streams.pop(stream.request_id, None)
        if not stream.finished:
            self._commands.put(stream.request_id)
        for item in stream.take_ready():
            if item.export is not None:
                self.release_export(item.export)

    async def fetch_ahead(self, request: AheadRequest) -> LoadOutcome:
        """Fetch blocks into the prefix cache; how it ended. Cancelling gives the fetch up.

        Raises:
            Unavailable: the engine has stopped.
        """
        if self._failure is not None:
            raise Unavailable("the engine has stopped; the worker is restarting")
        outcome: asyncio.Future[LoadOutcome] = asyncio.get_running_loop().create_future()
        self._ahead[request.request_id] = outcome
        self._commands.put(request)
        try:
            return await outcome
        except asyncio.CancelledError:
            self._commands.put(request.request_id)
            raise
        finally:
            del self._ahead[request.request_id]

    def release_export(self, number: int) -> None:
        """Give an export's pages back."""
        self._commands.put(number)

    def post(self, message: object) -> None:
        """A loader's message (`kv.connector`, `kv.tiering`); from any thread."""
        self._commands.put(message)

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            idle = True
            while True:
                if not self._take_commands(wait=idle):
                    return
                output = self._engine.step() if self._engine.has_work else StepOutput([], {}, [], [], [], [], ran=False)
                self._hand_out(output)
                idle = not output.ran
                self.load = self._engine.load()
        except BaseException as error:
            _log.exception("the engine stopped")
            self._call_soon(self._fail, error)

    def _take_commands(self, *, wait: bool) -> bool:
        """Carry out what is queued; whether to go on. Waits for the first command when there is nothing to run."""
        self.load = self._engine.load()
        try:
            command = self._commands.get(block=wait)
            while command is not _STOP:
                self._carry_out(command)
                command = self._commands.get(block=False)
        except queue.Empty:
            return True
        return False

    def _carry_out(self, command: object) -> None:
        match command:
            case EngineRequest():
                try:
                    self._engine.add(command)
                except InvariantBroken:
                    raise
                except KvferryError as error:
                    self._call_soon(self._deliver_error, command.request_id, error)
            case AheadRequest():
                self._engine.fetch_ahead(command)
            case LoadOutcome() | PagesQuiet() | TierAnswer() | StoreDone():
                self._engine.post(command)
            case int():
                self._engine.release_export(command)
            case str():
                self._engine.abort(RequestId(command))
            case _:
                raise InvariantBroken(f"unknown command {type(command).__name__}")

    def _hand_out(self, output: StepOutput) -> None:
        items: list[tuple[RequestId, StreamItem, bool]] = [
            (load.request_id, StreamItem(load=load), False) for load in output.loads
        ]
        items += [(request_id, StreamItem(decision=made), False) for request_id, made in output.decisions]
        items += [(told.request_id, StreamItem(progress=told), False) for told in output.progress]
        for update in output.updates:
            export = output.exports.get(update.request_id)
            over = export is not None or update.finish_reason is not None
            items.append((update.request_id, StreamItem(update=update, export=export), over))
        if items:
            self._call_soon(self._deliver, items)
        if output.cache_changes:
            self._call_soon(self._on_cache_changes, output.cache_changes)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # ------------------------------------------------------------------ the event loop's thread

    def _deliver(self, items: list[tuple[RequestId, StreamItem, bool]]) -> None:
        for request_id, item, over in items:
            stream = self._streams.get(request_id)
            waiting = self._ahead.get(request_id)
            if waiting is not None and item.load is not None and not waiting.done():
                waiting.set_result(item.load)
            if stream is None:
                if item.export is not None:  # closed while the last step ran: nobody will offer these pages
                    self.release_export(item.export)
                continue
            stream.finished = stream.finished or over
            stream.put(item)

    def _deliver_error(self, request_id: RequestId, error: KvferryError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.finished = True
            stream.put(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._fail_streams(Unavailable("the engine has stopped; the worker is restarting"))
        self._on_failure(error)

    def _fail_streams(self, error: KvferryError) -> None:
        for stream in list(self._streams.values()):
            stream.finished = True
            stream.put(error)
        for waiting in self._ahead.values():
            if not waiting.done():
                waiting.set_exception(error)
