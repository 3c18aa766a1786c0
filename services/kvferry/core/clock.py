"""Time as an argument: whoever needs to know what time it is takes a `Clock`."""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Two readings: `monotonic` for durations within a process, `wall` for instants that cross processes."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


@dataclass(slots=True)
class ManualClock:
    """A clock that stands still until told to move; tests and the simulator own it."""

    now: float = 0.0
    epoch: float = 1_700_000_000.0
    """What `wall` reads when `monotonic` reads zero."""

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.epoch + self.now

    def advance(self, seconds: float) -> None:
        """Move both readings forward.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock does not go back (asked for {seconds} s)")
        self.now += seconds
