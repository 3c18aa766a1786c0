"""Token source that steps an engine on the thread of its event loop, while streams wait for tokens.

The offline API has no thread of its own for the engine: between two steps, the streams take their tokens.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.core.inference.pooling import PoolingParams
from kvferry.engine.engine import Engine
from kvferry.engine.offline.engine_requests import engine_request, sample_id, token_event
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.serving.request import Request
from kvferry.serving.token_source import TokenEvent, Vector

_MAX_WAITING = 512
"""Requests are added while fewer than this number are waiting; an engine rejects more than 1024."""
_PART_TOKENS = 32
"""Number of tokens in a part of a stream that cannot end before the engine ends it. Larger parts cost less."""


class _Stream:
    """Updates of one sequence that its reader has not taken yet."""

    __slots__ = ("error", "min_tokens", "num_tokens", "updates", "waiter")

    def __init__(self, min_tokens: int) -> None:
        """
        Args:
            min_tokens: number of tokens for which the reader is woken before the end.
        """
        self.updates: list[SequenceUpdate] = []
        self.num_tokens = 0
        self.min_tokens = min_tokens
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, update: SequenceUpdate) -> None:
        if update.error is not None:
            self.fail(update.error)
            return
        self.updates.append(update)
        self.num_tokens += len(update.tokens)
        if self.num_tokens >= self.min_tokens or update.finish_reason is not None:
            self._wake()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> list[SequenceUpdate]:
        """Return the next updates.

        Raises:
            BaseException: the sequence or a step failed.
        """
        if self.error is None and not self._is_due:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.error is not None:
            raise self.error
        taken, self.updates, self.num_tokens = self.updates, [], 0
        return taken

    @property
    def _is_due(self) -> bool:
        return bool(self.updates) and (self.num_tokens >= self.min_tokens or self.updates[-1].finish_reason is not None)


class StepSource:
    """`TokenSource` and `VectorSource` over an engine that no other thread uses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[RequestId, _Stream] = {}
        self._turns: deque[asyncio.Future[None]] = deque()
        self._stepping: asyncio.Task[None] | None = None

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Generate the tokens of a sample; see `TokenSource.stream`."""
        may_end_early = bool(request.sampling.stop) or request.split is not None
        stream, name = await self._begin(request, 1 if may_end_early else _PART_TOKENS)
        is_over = False
        try:
            while not is_over:
                updates = await stream.take()
                is_over = updates[-1].finish_reason is not None
                yield token_event(updates)
        finally:
            self._end(name, is_over=is_over)

    async def pool(self, request: Request, params: PoolingParams) -> Vector:
        """Compute the vector of a prompt; see `VectorSource.pool`."""
        stream, name = await self._begin(request, 1, params)
        is_over = False
        try:
            (update,) = await stream.take()
            is_over = True
            assert update.embedding is not None, "a pooling request ends with a vector"
            return Vector(update.embedding, len(request.token_ids), update.num_cached + update.num_loaded)
        finally:
            self._end(name, is_over=is_over)

    def drain(self) -> None:
        """Step until the engine has no work: a step that was launched ahead, or the end of aborted requests."""
        while self._engine.has_work and self._engine.failed_step == frozenset():
            self._engine.step()

    async def _begin(
        self, request: Request, part_tokens: int, pooling: PoolingParams | None = None
    ) -> tuple[_Stream, RequestId]:
        """Add a request as soon as the engine's queue has room.

        Raises:
            KvferryError: the engine rejects the request.
        """
        if self._turns or self._engine.scheduler.num_waiting >= _MAX_WAITING:
            turn = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            self._step_while_needed()
            await turn
        name = sample_id(request)
        self._engine.add(engine_request(request, name, pooling))
        stream = self._streams[name] = _Stream(part_tokens)
        self._step_while_needed()
        return stream, name

    def _end(self, name: RequestId, *, is_over: bool) -> None:
        del self._streams[name]
        if not is_over:
            self._engine.abort(name)

    def _step_while_needed(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._step())

    async def _step(self) -> None:
        """Step the engine until no stream is open."""
        try:
            while True:
                await asyncio.sleep(0)  # readers take their tokens, and begin or end requests
                self._give_turns()
                if self._engine.has_work:
                    for update in self._engine.step().updates:
                        if (stream := self._streams.get(update.request_id)) is not None:
                            stream.put(update)
                elif not self._streams and not self._turns:
                    return
                elif all(stream.error is not None or stream.updates for stream in self._streams.values()):
                    continue  # the readers have not run yet
                else:
                    raise InvariantBroken("the engine has no work although requests are waiting for tokens")
        except Exception as error:
            self._fail(error)

    def _give_turns(self) -> None:
        room = _MAX_WAITING - self._engine.scheduler.num_waiting
        while self._turns and room > 0:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1

    def _fail(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_exception(error)
