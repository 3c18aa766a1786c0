"""Merges asynchronous generators into one. The first failure stops all sources; closing the result closes all
sources."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_QUEUED_PER_SOURCE = 4
"""Maximum number of items per source that are buffered for a slow reader."""


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None = None


async def merge(sources: Sequence[AsyncGenerator[T, None]], *, at_once: int | None = None) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they arrive; the order within each source is kept.

    Args:
        sources: the generators; all are closed at the end.
        at_once: number of sources that run concurrently; `None` runs all.

    Raises:
        Exception: the first exception of a source, raised after all other sources are closed.
    """
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue(_QUEUED_PER_SOURCE * len(sources))
    # Not a TaskGroup: it would cancel the reader's task while the reader awaits other work.
    waiting = deque(sources)
    tasks = [
        asyncio.create_task(_pump(queue, waiting.popleft())) for _ in range(min(len(waiting), at_once or len(waiting)))
    ]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            elif waiting:
                tasks.append(asyncio.create_task(_pump(queue, waiting.popleft())))
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in waiting:
            await source.aclose()


async def _pump(queue: asyncio.Queue[T | _Ended], source: AsyncGenerator[T, None]) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as error:
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())
