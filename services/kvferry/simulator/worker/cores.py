"""Processor cores that several workers share: a step slows down while more workers compute than there are cores.

    speed of each busy worker = min(1, cores / busy workers)

The kernel shares cores evenly among threads of equal weight. A worker counts as one thread.
"""

from collections.abc import Callable
from functools import partial

from kvferry.core.errors import UsageError
from kvferry.simulator.clock import VirtualClock

Done = Callable[[float], None]
"""Called at the end of a piece of work, with its duration in seconds."""
_EPSILON = 1e-12


class SharedCores:
    """Cores on a virtual clock."""

    def __init__(self, clock: VirtualClock, cores: float) -> None:
        """
        Args:
            clock: the virtual clock.
            cores: number of cores, which may be fractional.

        Raises:
            UsageError: the number is not positive.
        """
        if not 0.0 < cores <= 1e6:
            raise UsageError(f"machine.cores must be above 0 and at most 1e6, not {cores}", field="machine.cores")
        self._clock, self._cores = clock, cores
        self._left: dict[int, float] = {}
        """Remaining time of each piece of work in seconds, if it ran alone."""
        self._begun: dict[int, tuple[float, Done]] = {}
        self._number = self._change = 0
        self._at = clock.now

    def run(self, seconds: float, done: Done) -> None:
        """Begin a piece of work that takes `seconds` alone."""
        self._advance()
        self._number += 1
        self._left[self._number] = seconds
        self._begun[self._number] = (self._clock.now, done)
        self._plan()

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / len(self._left)) if self._left else 1.0

    def _advance(self) -> None:
        """Account for the work done since the last change."""
        done = (self._clock.now - self._at) * self._speed
        self._at = self._clock.now
        if done > 0.0:
            for number in self._left:
                self._left[number] -= done

    def _plan(self) -> None:
        """Schedule the end of the piece of work that ends first if nothing changes before then."""
        self._change += 1
        if self._left:
            first = max(0.0, min(self._left.values())) / self._speed
            self._clock.after(first, partial(self._end, self._change))

    def _end(self, change: int) -> None:
        if change != self._change:
            return
        self._advance()
        # The first piece has ended, even if rounding has left a remainder.
        first_end = max(_EPSILON, min(self._left.values()))
        ended = [number for number, left in self._left.items() if left <= first_end]
        for number in ended:
            del self._left[number]
        self._plan()
        for number in ended:
            begun, done = self._begun.pop(number)
            done(self._clock.now - begun)
