"""Several asynchronous generators as one: items as they come, one failure stops all, closing closes all."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_QUEUED_PER_SOURCE = 4
"""How far one source may run ahead of a slow reader."""


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None = None


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Every item of every source, each source's in order.

    Raises:
        Exception: the first that a source raised; the other sources are closed before it is.
    """
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue(_QUEUED_PER_SOURCE * len(sources))
    # Not a TaskGroup: it would cancel the reader's task while the reader is busy elsewhere.
    tasks = [asyncio.create_task(_pump(queue, source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(queue: asyncio.Queue[T | _Ended], source: AsyncGenerator[T, None]) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as error:
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())
