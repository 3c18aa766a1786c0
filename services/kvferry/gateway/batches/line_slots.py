"""Slots for the lines of all batches that are computed concurrently; waiting lines take slots in order of arrival."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class LineSlots:
    """Slots whose number may change while lines run. Used on the event loop's thread only."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """
        Args:
            limit: returns the current maximum number of lines, at least 1.
        """
        self.limit = limit
        self.num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold a slot for the length of the `with` block."""
        if self._waiting or self.num_taken >= self.limit():
            await self._wait()
        else:
            self.num_taken += 1
        try:
            yield
        finally:
            self._free()

    async def _wait(self) -> None:
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._free()  # the slot was given to a task that was cancelled before it continued
            else:
                self._waiting.remove(slot)
            raise

    def _free(self) -> None:
        self.num_taken -= 1
        while self._waiting and self.num_taken < self.limit():
            slot = self._waiting.popleft()
            if not slot.done():
                self.num_taken += 1
                slot.set_result(None)
