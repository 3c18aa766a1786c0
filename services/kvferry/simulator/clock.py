"""Virtual clock with a queue of events, which run in order of time, and of their creation at equal times."""

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Clock that moves from event to event. Implements `core.clock.Clock`."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self.num_events = 0
        """Number of events that have run."""
        self._queue: list[tuple[float, int, Action]] = []
        self._number = 0

    def monotonic(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def wall(self) -> float:
        """Return the virtual time in seconds; the simulation starts at the epoch."""
        return self.now

    def at(self, time: float, action: Action) -> None:
        """Run an action at a time in seconds, or now if that time has passed.

        Args:
            time: virtual time in seconds.
            action: called with no arguments when the clock reaches the time.

        Raises:
            ValueError: the time is not a number.
        """
        if not time >= self.now:
            if math.isnan(time):
                raise ValueError("the time of an event is not a number")
            time = self.now
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, action))

    def after(self, seconds: float, action: Action) -> None:
        """Run an action after a delay in seconds.

        Args:
            seconds: delay from now.
            action: called with no arguments when the clock reaches the time.
        """
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Run the next event; return `False` if there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        self.num_events += 1
        action()
        return True

    def run(self, until: float = math.inf) -> None:
        """Run all events up to a time, including those that they create; the clock ends at the last event.

        Args:
            until: virtual time in seconds, inclusive.
        """
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.step()
