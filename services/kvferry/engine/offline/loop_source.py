"""Token source over an engine on its own thread."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from kvferry.core.errors import DeadlinePassed, InvariantBroken, Unavailable, UsageError
from kvferry.core.ids import RequestId
from kvferry.core.inference.pooling import PoolingParams
from kvferry.engine.loop.engine_loop import EngineLoop
from kvferry.engine.loop.engine_stream import EngineStream
from kvferry.engine.offline.engine_requests import engine_request, sample_id, token_event
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent, Vector


class LoopSource:
    """`TokenSource` and `VectorSource` over an `EngineLoop`, which starts with the first request. Used on one event
    loop."""

    def __init__(self, owner: EngineLoop, *, wait_seconds: float) -> None:
        """
        Args:
            owner: the engine and its thread.
            wait_seconds: seconds without an output after which a request fails.
        """
        self._owner = owner
        self._wait_seconds = wait_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[EngineStream] = set()
        self._is_closed = False

    @property
    def open(self) -> Collection[RequestId]:
        """Ids of the sequences whose streams are open."""
        return [stream.request_id for stream in self._open]

    async def aclose(self) -> bool:
        """Stop the engine's thread after the step in progress; return whether it has ended. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._loop is not None:
                await self._owner.stop()
        return not self._owner.is_running

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Generate the tokens of a sample; see `TokenSource.stream`."""
        name = sample_id(request)
        async with aclosing(self._updates(engine_request(request, name))) as updates:
            async for update in updates:
                yield token_event((update,))

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        """Compute the vector of a prompt; see `VectorSource.pool`."""
        name = sample_id(request)
        async with aclosing(self._updates(engine_request(request, name, params))) as updates:
            async for update in updates:
                if update.embedding is not None:
                    return Vector(update.embedding, len(request.token_ids), update.num_cached + update.num_loaded)
        raise InvariantBroken(f"request {name} ended without a vector")

    async def _updates(self, request: EngineRequest) -> AsyncGenerator[SequenceUpdate, None]:
        self._start()
        stream = self._owner.submit(request)
        self._open.add(stream)
        try:
            with stream:
                while (update := await self._next(stream)) is not None:
                    yield update
        finally:
            if not self._is_closed:
                self._open.discard(stream)

    async def _next(self, stream: EngineStream) -> SequenceUpdate | None:
        """Return the next update; `None` after the last one."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                async for item in stream:
                    if item.update is not None:
                        return item.update
        except TimeoutError:
            raise DeadlinePassed(f"there was no output for {self._wait_seconds:g} s") from None
        return None

    def _start(self) -> None:
        """Start the engine's thread with the first request."""
        running = asyncio.get_running_loop()
        if self._is_closed:
            raise Unavailable("this AsyncLLM is closed")
        if self._loop is None:
            self._loop = running
            self._owner.start()
        elif self._loop is not running:
            raise UsageError("an AsyncLLM serves one event loop; create another one for this loop")
