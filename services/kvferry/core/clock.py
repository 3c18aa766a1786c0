"""Clocks: code that needs the time takes a `Clock` as an argument."""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of time: `monotonic` for durations within a process, `wall` for timestamps shared between processes."""

    def monotonic(self) -> float:
        """Return the time in seconds since an arbitrary start; the value never decreases."""
        ...

    def wall(self) -> float:
        """Return the time in seconds since the Unix epoch; the value may jump."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


@dataclass(slots=True)
class ManualClock:
    """A clock that only `advance` moves, for tests and the explorer."""

    now: float = 0.0
    epoch: float = 1_700_000_000.0
    """Value of `wall` when `monotonic` is zero."""

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.epoch + self.now

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; a clock cannot move backwards")
        self.now += seconds
