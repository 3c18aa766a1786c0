"""Circuit breaker: stops requests to an unresponsive server and schedules probes of it. Pure.

    CLOSED     requests pass                       opens after `failures` in a row that waited `patience` in total
    OPEN       requests are rejected               after the backoff, one caller may probe
    HALF_OPEN one probe, requests are rejected success closes it; failure opens it for twice as long, up to a maximum

A time-out is weighted by the time waited, since a time-out after a very short deadline does not indicate a failed
server. Probes run outside the requests (a PING on a separate thread), so that a failed server does not delay requests.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.states import Machine


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    """Event in a circuit breaker's state machine."""

    SUCCEED = "succeed"
    TRIP = "trip"
    PROBE = "probe"


BREAKER_MACHINE = Machine(
    name="breaker",
    initial=BreakerState.CLOSED,
    final=frozenset(),
    table={
        (BreakerState.CLOSED, BreakerEvent.SUCCEED): BreakerState.CLOSED,
        (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.PROBE): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.TRIP): BreakerState.OPEN,
    },
)


@dataclass(frozen=True, slots=True)
class BreakerTimes:
    """Thresholds and backoff of a breaker."""

    failures: int = 3
    """Consecutive failures after which the breaker opens."""
    patience_seconds: float = 0.1
    """Minimum total time waited in these failures; below it, the breaker stays closed."""
    first_backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 30.0


class Breaker:
    """Circuit breaker of one server. Not thread-safe; the time is an argument."""

    def __init__(self, times: BreakerTimes) -> None:
        self._times = times
        self._state = BREAKER_MACHINE.initial
        self._failures = 0
        self._waited_seconds = 0.0
        self._backoff = times.first_backoff_seconds
        self._open_until = 0.0
        self.num_trips = 0
        """Number of times the breaker opened."""

    @property
    def state(self) -> BreakerState:
        """Current state of the breaker."""
        return self._state

    @property
    def passes(self) -> bool:
        """Whether requests may be sent, that is, the breaker is closed."""
        return self._state is BreakerState.CLOSED

    def probe(self, now: float) -> bool:
        """Return whether the caller must probe the server now and report the result with `probed`.

        Args:
            now: monotonic seconds.
        """
        if self._state is not BreakerState.OPEN or now < self._open_until:
            return False
        self._state = BREAKER_MACHINE.next(self._state, BreakerEvent.PROBE)
        return True

    def succeeded(self) -> None:
        """Record an answered request. A late answer does not close an open breaker."""
        if self._state is BreakerState.CLOSED:
            self._failures = 0
            self._waited_seconds = 0.0

    def failed(self, now: float, waited_seconds: float) -> None:
        """Record a request without an answer.

        Args:
            now: monotonic seconds.
            waited_seconds: time that the request waited; infinite if the connection was refused or lost.
        """
        if self._state is not BreakerState.CLOSED:
            return  # the request started before the breaker opened
        self._failures += 1
        self._waited_seconds += waited_seconds
        if self._failures >= self._times.failures and self._waited_seconds >= self._times.patience_seconds:
            self._trip(now)

    def probed(self, now: float, *, alive: bool) -> None:
        """Record the result of a probe.

        Args:
            now: monotonic seconds.
            alive: whether the probe succeeded.

        Raises:
            InvariantBroken: no probe was permitted by `probe`.
        """
        if not alive:
            self._backoff = min(2 * self._backoff, self._times.longest_backoff_seconds)
            self._trip(now)
            return
        self._state = BREAKER_MACHINE.next(self._state, BreakerEvent.SUCCEED)
        self._failures = 0
        self._waited_seconds = 0.0
        self._backoff = self._times.first_backoff_seconds

    def _trip(self, now: float) -> None:
        self._state = BREAKER_MACHINE.next(self._state, BreakerEvent.TRIP)
        self._open_until = now + self._backoff
        self.num_trips += 1
