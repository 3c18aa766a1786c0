"""Limits how many steps of beam searches run on the workers at a time, which leaves capacity for the prompts of other
requests."""

import asyncio
import heapq
from collections.abc import Callable


class StepTurns:
    """Semaphore for steps of beam searches: at most `slots()` steps run at a time, and the others wait in the order of
    priority and arrival. A turn is the permission to run one step. Used on the event loop's thread only."""

    def __init__(self, slots: Callable[[], int]) -> None:
        """
        Args:
            slots: function that returns the present maximum number of steps at a time; less than 1 counts as 1, so
                that every step gets its turn.
        """
        self._slots = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = 0
        self.num_running = 0
        """Number of steps that have their turn."""

    @property
    def num_waiting(self) -> int:
        """Number of steps that wait for their turn."""
        return sum(not turn.done() for _, _, turn in self._waiting)

    async def take(self, priority: int) -> None:
        """Wait for a turn; the caller must end it with `give`. If the calling task is cancelled, it gets no turn.

        Args:
            priority: priority of the request; lower numbers come first.
        """
        if not self._waiting and self.num_running < max(1, self._slots()):
            self.num_running += 1
            return
        self._number += 1
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, self._number, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn arrived together with the cancellation
                self.give()
            raise

    def give(self) -> None:
        """End a turn, and start waiting steps up to the limit."""
        self.num_running -= 1
        slots = max(1, self._slots())
        while self._waiting and self.num_running < slots:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)
