"""One sample's way through the workers: what it has, what it owes, how often it was let down. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvferry.core.errors import (
    InvariantBroken,
    KvferryError,
    ModelFileError,
    Overloaded,
    RequestCancelled,
    TicketRejected,
    Unavailable,
)
from kvferry.core.philox import uniform
from kvferry.core.sampling import FinishReason, SampledToken
from kvferry.gateway.config import RetryConfig
from kvferry.gateway.release import MACHINE, Event, State
from kvferry.gateway.route_notes import RouteNote
from kvferry.rpc.token_source import KvReport, Timing, TokenEvent, TokenRequest

_MAX_REPORTS = 16


class Verdict(StrEnum):
    """What an error from a worker means for the sample."""

    FATAL = "fatal"
    """It would fail anywhere."""
    ELSEWHERE = "elsewhere"
    """This worker has no room; another may."""
    SUSPECT = "suspect"
    """This worker is broken or gone."""
    DROP_TICKET = "drop_ticket"
    """The worker is fine, the ticket is not."""


def judge(error: KvferryError) -> Verdict:
    """The verdict on what a call to a worker raised."""
    match error:
        case TicketRejected():
            return Verdict.DROP_TICKET
        case Overloaded():
            return Verdict.ELSEWHERE
        case Unavailable() | RequestCancelled() | InvariantBroken() | ModelFileError():
            # CANCELLED that nobody here asked for is a server that cut its calls to stop.
            return Verdict.SUSPECT
        case _:
            return Verdict.FATAL


@dataclass(frozen=True, slots=True)
class Ticket:
    """An offer that a prefill worker keeps for this sample."""

    ticket_id: str
    sealed: bytes
    address: str
    """Of the prefill worker."""
    fingerprint: bytes
    """Decode workers with this layout can use it as it is."""
    family: bytes = b""
    """Those of this family can convert it; empty: nobody can."""
    deliveries: int = 0
    """How often it was given to a decode worker; numbers the attempts."""
    losses: int = 0
    """How often a decode worker that had it was lost."""


@dataclass(slots=True)
class Trip:
    """One sample on its way."""

    request: TokenRequest
    state: State = MACHINE.initial
    emitted: list[int] = field(default_factory=list)
    """Tokens that the client has, or is about to have."""
    ticket: Ticket | None = None
    excluded: set[str] = field(default_factory=set)
    """Addresses that let this sample down since its last new token."""
    failures: int = 0
    """In a row, without a new token."""
    last_error: KvferryError | None = None
    num_cached_tokens: int = 0
    timing: Timing = field(default_factory=Timing)
    routes: list[RouteNote] = field(default_factory=list)
    """Where it was sent, in order."""

    def on(self, event: Event) -> None:
        """Take one step of the table.

        Raises:
            InvariantBroken: the table has no such step.
        """
        self.state = MACHINE.next(self.state, event)

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and everything generated so far."""
        return [*self.request.token_ids, *self.emitted] if self.emitted else self.request.token_ids

    @property
    def is_complete(self) -> bool:
        """Whether every token was generated, though nobody said so (the stream was lost right after the last)."""
        return len(self.emitted) >= (self.request.sampling.max_tokens or 0)

    def time(self, **changes: float | int | str) -> None:
        """Note what is newly known about where the time went."""
        self.timing = replace(self.timing, **changes)  # type: ignore[arg-type]  # dataclasses.replace is not typed

    def report_kv(self, reports: tuple[KvReport, ...]) -> None:
        """Note where a worker's KV came from."""
        if reports:
            self.timing = replace(self.timing, kv=(*self.timing.kv, *reports)[-_MAX_REPORTS:])

    def emit(self, tokens: tuple[SampledToken, ...], finish: FinishReason | None, now: float) -> TokenEvent:
        """The event for new tokens; progress clears earlier failures."""
        if tokens:
            if not self.emitted:
                self.time(first_token_seconds=now - self.request.arrived)
            elif self.failures:
                self.time(resumed=self.timing.resumed + 1)
            self.emitted.extend(token.token_id for token in tokens)
            self.failures = 0
            self.excluded.clear()
        return TokenEvent(tokens, finish, self.num_cached_tokens, self.timing)

    def failed(self, error: KvferryError, address: str | None) -> None:
        """Note that a call (or the search for a worker, without an address) failed."""
        self.failures += 1
        self.last_error = error
        if address is not None:
            self.excluded.add(address)

    def backoff_seconds(self, config: RetryConfig, *, elsewhere: bool) -> float:
        """How long to wait before the next attempt: doubling, between half and all of it, so that the streams of
        a lost worker do not come back in step. Not at all the first time if it can be made `elsewhere`."""
        if elsewhere and self.failures <= 1:
            return 0.0
        # The exponent is bounded only so that the float cannot overflow.
        doubled = config.first_backoff_seconds * 2.0 ** min(self.failures - 1, 30)
        share = uniform(self.request.sampling.seed or 0, self.request.sample_index, self.failures)
        return min(config.max_backoff_seconds, doubled) * (0.5 + 0.5 * share)
