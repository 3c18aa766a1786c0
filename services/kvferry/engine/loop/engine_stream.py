"""The stream of a request's events from the engine's thread to the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvferry.core.errors import KvferryError
from kvferry.core.ids import RequestId
from kvferry.core.pausing import WeightVersion
from kvferry.core.retention import Retention
from kvferry.engine.schedule.step.kv_jobs import NewBlocks, SequenceUpdate
from kvferry.kv.interface.connector import LoadOutcome
from kvferry.kv.pricing.price import LoadDecision

_UNKNOWN = WeightVersion()


@dataclass(frozen=True, slots=True)
class StreamItem:
    """An event of a stream: sampled tokens, the outcome of a load, a load decision, or progress of the prompt."""

    update: SequenceUpdate | None = None
    export: int | None = None
    """Number of an export, which the receiver must release; set only together with `update`."""
    retention: Retention | None = None
    """Result of the retention that the request asked for; set only together with its first `update`."""
    load: LoadOutcome | None = None
    decision: LoadDecision | None = None
    progress: NewBlocks | None = None
    weights: WeightVersion = _UNKNOWN
    """The weights of the step; set only together with `update`."""
    is_started: bool = False
    """Whether the next step is the first that includes the request."""


class EngineStream:
    """The events of a request, in order. A context manager; it must always be closed."""

    def __init__(self, request_id: RequestId, on_close: "Callable[[EngineStream], None]") -> None:
        """
        Args:
            request_id: the request.
            on_close: called when the stream is closed.
        """
        self._on_close = on_close
        self.request_id = request_id
        self._items: asyncio.Queue[StreamItem | KvferryError] = asyncio.Queue()
        self.finished = False
        """Whether the engine has ended the request."""

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
        """Return the queued events without waiting; an error stays queued and is raised by the next iteration."""
        ready: list[StreamItem] = []
        while not self._items.empty():
            item = self._items.get_nowait()
            if isinstance(item, KvferryError):
                self._items.put_nowait(item)
                break
            ready.append(item)
        return ready

    def put(self, item: StreamItem | KvferryError) -> None:
        """Queue an event. Called by `EngineLoop` on the event loop's thread."""
        self._items.put_nowait(item)

    def __enter__(self) -> "EngineStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._on_close(self)
