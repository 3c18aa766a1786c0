"""Arrival times of an open-loop benchmark; they do not depend on when answers end."""

import math
from dataclasses import dataclass
from random import Random

from kvferry.core.errors import UsageError

POISSON, GAMMA, BURST, RAMP, CONSTANT = "poisson", "gamma", "burst", "ramp", "constant"
PROCESSES = (POISSON, GAMMA, BURST, RAMP, CONSTANT)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival process."""

    process: str = POISSON
    """One of `PROCESSES`. `burst`: groups of requests at the same time; `ramp`: the rate grows linearly from 0 to twice
    the mean rate."""
    rate: float = math.inf
    """Mean number of requests per second; infinite for all at once."""
    burstiness: float = 1.0
    """Shape of `gamma`: below 1, arrivals are burstier than a Poisson process; above 1, more regular."""
    burst_size: int = 8
    """Number of requests in a group of `burst`."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: the process is unknown, or a number is out of range.
        """
        if self.process not in PROCESSES:
            raise UsageError(
                f"unknown arrivals {self.process!r}; expected {', '.join(PROCESSES)} or trace=FILE", field="arrivals"
            )
        if not self.rate > 0:
            raise UsageError(f"rate must be above 0, or inf, not {self.rate}", field="rate")
        if not 0 < self.burstiness < math.inf:
            raise UsageError(f"burstiness must be above 0, not {self.burstiness}", field="burstiness")
        if self.burst_size < 1:
            raise UsageError(f"burst_size must be at least 1, not {self.burst_size}", field="burst_size")

    def times(self, count: int, draw: Random) -> list[float]:
        """Return the arrival times of `count` requests in seconds after the start, ascending.

        Args:
            count: number of requests.
            draw: random numbers of the gaps.
        """
        if math.isinf(self.rate):
            return [0.0] * count
        if self.process == BURST:
            return [index // self.burst_size * self.burst_size / self.rate for index in range(count)]
        if self.process == RAMP:
            return [math.sqrt(index * count) / self.rate for index in range(count)]
        times, now = [], 0.0
        for _ in range(count):
            times.append(now)
            now += self._gap(draw)
        return times

    def _gap(self, draw: Random) -> float:
        if self.process == CONSTANT:
            return 1.0 / self.rate
        if self.process == POISSON:
            return draw.expovariate(self.rate)
        return draw.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
