"""When to stop asking a server that does not answer, and when to look whether it is back. Pure.

    CLOSED     requests pass                     `failures` in a row, that together cost `patience`, open it
    OPEN       requests are refused at once      after the backoff, somebody may look
    HALF_OPEN  one looks, the rest is refused    success closes it; failure opens it for twice as long, up to a cap

A timeout counts by the time that was waited: a request that had no time to spare says nothing about the server.
Whoever looks does it beside the requests (a PING on another thread), so a dead server costs a request nothing.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.states import Machine


class BreakerState(StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    """What can happen to a breaker."""

    SUCCEED = "succeed"
    TRIP = "trip"
    LOOK = "look"


BREAKER_MACHINE = Machine(
    name="breaker",
    initial=BreakerState.CLOSED,
    final=frozenset(),
    table={
        (BreakerState.CLOSED, BreakerEvent.SUCCEED): BreakerState.CLOSED,
        (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
        (BreakerState.OPEN, BreakerEvent.LOOK): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.TRIP): BreakerState.OPEN,
    },
)


@dataclass(frozen=True, slots=True)
class BreakerTimes:
    """How patient a breaker is."""

    failures: int = 3
    """In a row, until it opens."""
    patience_seconds: float = 0.1
    """Waited in vain in these, together."""
    first_backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 30.0


class Breaker:
    """One server's. One owner; every method takes the time."""

    def __init__(self, times: BreakerTimes) -> None:
        self._times = times
        self._state = BREAKER_MACHINE.initial
        self._failures = 0
        self._waited_seconds = 0.0
        self._backoff = times.first_backoff_seconds
        self._open_until = 0.0
        self.num_trips = 0
        """Times it opened."""

    @property
    def state(self) -> BreakerState:
        """Where it stands."""
        return self._state

    @property
    def passes(self) -> bool:
        """Whether requests pass."""
        return self._state is BreakerState.CLOSED

    def look(self, now: float) -> bool:
        """Whether the caller is the one to look whether the server is back; it then owes a verdict."""
        if self._state is not BreakerState.OPEN or now < self._open_until:
            return False
        self._state = BREAKER_MACHINE.next(self._state, BreakerEvent.LOOK)
        return True

    def succeeded(self) -> None:
        """A request that had been let through was answered. Late answers do not close an open breaker."""
        if self._state is BreakerState.CLOSED:
            self._failures = 0
            self._waited_seconds = 0.0

    def failed(self, now: float, waited_seconds: float) -> None:
        """A request that had been let through was not answered.

        Args:
            waited_seconds: how long it waited in vain; infinite when the connection was refused or lost.
        """
        if self._state is not BreakerState.CLOSED:
            return  # it began before the breaker opened
        self._failures += 1
        self._waited_seconds += waited_seconds
        if self._failures >= self._times.failures and self._waited_seconds >= self._times.patience_seconds:
            self._trip(now)

    def looked(self, now: float, *, alive: bool) -> None:
        """The verdict of whoever looked.

        Raises:
            InvariantBroken: nobody was to look.
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
