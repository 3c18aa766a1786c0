"""Offers, the prefill side of a hand-off: hold the pages of finished prompts for readers, with time limits.

    OFFERED   the ticket is issued, not claimed                  ends on a claim, a release, or after `offer_seconds`
    CLAIMED   the reader has a lease                             ends on finish, release, or `lease_seconds` unrenewed
    QUIESCE   the lease has ended, but a read may still run      ends on the reader's report, or after `quiesce_seconds`
    FREED     the reader no longer needs the pages               final

An offer has one state per reader; the pages are freed when all readers are FREED. A late reader cannot read wrong
content unnoticed: a page gets a new epoch before new content, and the reader compares epochs after reading. The time
limits therefore bound wasted memory and do not affect correctness. Every event is idempotent by (ticket, reader,
attempt); an unknown ticket is treated like a freed offer. Pure: the caller passes the time, and frees the pages that
methods return.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import TicketId
from kvferry.core.states import Machine

P = TypeVar("P")

_MAX_EARLY_RELEASES = 1024


class OfferState(StrEnum):
    """State of one reader of an offer."""

    OFFERED = "offered"
    CLAIMED = "claimed"
    QUIESCE = "quiesce"
    FREED = "freed"


class OfferEvent(StrEnum):
    """Event that changes the state of one reader of an offer."""

    CLAIM = "claim"
    RENEW = "renew"
    DONE = "done"
    FAIL = "fail"
    SPENT = "spent"
    """Too many failed attempts: the pages or the connection to them are faulty."""
    RELEASE = "release"
    EXPIRE = "expire"


OFFER_MACHINE = Machine(
    name="offer",
    initial=OfferState.OFFERED,
    final=frozenset({OfferState.FREED}),
    table={
        (OfferState.OFFERED, OfferEvent.CLAIM): OfferState.CLAIMED,
        (OfferState.OFFERED, OfferEvent.DONE): OfferState.FREED,
        (OfferState.OFFERED, OfferEvent.RELEASE): OfferState.FREED,
        (OfferState.OFFERED, OfferEvent.EXPIRE): OfferState.FREED,
        (OfferState.CLAIMED, OfferEvent.CLAIM): OfferState.CLAIMED,
        (OfferState.CLAIMED, OfferEvent.RENEW): OfferState.CLAIMED,
        (OfferState.CLAIMED, OfferEvent.DONE): OfferState.FREED,
        (OfferState.CLAIMED, OfferEvent.FAIL): OfferState.OFFERED,
        (OfferState.CLAIMED, OfferEvent.SPENT): OfferState.FREED,
        (OfferState.CLAIMED, OfferEvent.RELEASE): OfferState.QUIESCE,
        (OfferState.CLAIMED, OfferEvent.EXPIRE): OfferState.QUIESCE,
        (OfferState.QUIESCE, OfferEvent.DONE): OfferState.FREED,
        (OfferState.QUIESCE, OfferEvent.FAIL): OfferState.FREED,
        (OfferState.QUIESCE, OfferEvent.SPENT): OfferState.FREED,
        (OfferState.QUIESCE, OfferEvent.RELEASE): OfferState.QUIESCE,
        (OfferState.QUIESCE, OfferEvent.EXPIRE): OfferState.FREED,
    },
)


@dataclass(frozen=True, slots=True)
class OfferTimes:
    """Time limits of the states, in seconds, and the limit of failed attempts."""

    offer_seconds: float = 10.0
    """Time until an unclaimed offer expires; the gateway forwards or releases a ticket within milliseconds."""
    lease_seconds: float = 30.0
    """Duration of a lease. A reader renews it after each sixth of this time, so that a few lost renewals do not end
    it."""
    quiesce_seconds: float = 5.0
    """Time that a reader has to stop reading after its lease has ended."""
    max_failures: int = 3
    """Number of failed attempts of a reader after which the pages are no longer held for it."""


@dataclass(slots=True)
class _Reader:
    """State of one reader of an offer."""

    deadline: float
    state: OfferState = OFFER_MACHINE.initial
    attempt: int | None = None
    """Number of the attempt that holds the lease; `None` if there is no lease."""
    ended: int = -1
    """Number of the latest attempt that ended; late claims of this and earlier attempts are rejected."""
    failures: int = 0

    def move(self, event: OfferEvent) -> None:
        self.state = OFFER_MACHINE.next(self.state, event)

    def lease(self, event: OfferEvent, until: float) -> None:
        """Start or extend a lease until `until`; never shortens it."""
        self.deadline = max(until, self.deadline) if event is OfferEvent.RENEW else until
        self.move(event)


@dataclass(slots=True)
class _Offer(Generic[P]):
    pages: P
    places: list[_Reader]


class OfferBook(Generic[P]):
    """All offers of one worker. Not thread-safe. Callers pass the time; methods return the pages to be freed."""

    def __init__(self, times: OfferTimes) -> None:
        self.times = times
        self._offers: dict[TicketId, _Offer[P]] = {}
        self._early: dict[TicketId, None] = {}
        """Tickets that were released before they were offered; bounded, the oldest are dropped first."""

    def __contains__(self, ticket_id: TicketId) -> bool:
        """Return whether an offer with this ticket id is open."""
        return ticket_id in self._offers

    def offer(self, ticket_id: TicketId, pages: P, now: float, *, readers: int = 1) -> list[P]:
        """Add an offer. It owns `pages` until a method returns them. This method returns them if the offer was released
        before: the gateway chooses ticket ids in advance, so its release can overtake the offer.

        Args:
            ticket_id: id of the ticket, not used by an open offer.
            pages: the exported pages.
            now: monotonic time in seconds.
            readers: number of readers, numbered from 0.

        Raises:
            ValueError: `readers` is less than 1, or the ticket id is in use.
        """
        if readers < 1:
            raise ValueError(f"readers must be at least 1, not {readers}")
        if ticket_id in self._offers:
            raise ValueError(f"ticket id {ticket_id} is in use; choose a new one for each offer")
        if ticket_id in self._early:
            del self._early[ticket_id]
            return [pages]
        deadline = now + self.times.offer_seconds
        self._offers[ticket_id] = _Offer(pages, [_Reader(deadline) for _ in range(readers)])
        return []

    def claim(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        """Start a lease; return its duration in seconds. An attempt may repeat its claim; a later attempt takes the
        lease over.

        Args:
            ticket_id: id of the ticket.
            attempt: number of the attempt; later attempts have higher numbers.
            now: monotonic time in seconds.
            reader: index of the reader among the ticket's readers.

        Raises:
            TicketRejected: the offer no longer exists or has no such reader, or a later attempt holds the lease.
        """
        place = self._find(ticket_id, reader)
        if place.state is OfferState.CLAIMED and place.attempt == attempt:
            place.lease(OfferEvent.RENEW, now + self.times.lease_seconds)
        elif place.state is OfferState.OFFERED and attempt > place.ended:
            place.attempt = attempt
            place.lease(OfferEvent.CLAIM, now + self.times.lease_seconds)
        elif place.state is OfferState.CLAIMED and place.attempt is not None and attempt > place.attempt:
            # The gateway delivers a ticket a second time only after it has abandoned the first attempt. The first
            # attempt may still be reading, but its late messages carry its number, and epochs verify the data that it
            # read.
            place.ended = max(place.ended, place.attempt)
            place.attempt = attempt
            place.lease(OfferEvent.CLAIM, now + self.times.lease_seconds)
        elif place.state is OfferState.OFFERED:
            raise TicketRejected(f"attempt {attempt} has already ended", reason="TICKET_GONE", field="attempt")
        else:
            raise TicketRejected(
                f"attempt {attempt} cannot claim the offer: a later attempt holds the lease, or the lease has ended",
                reason="TICKET_TAKEN",
                field="ticket",
            )
        return self.times.lease_seconds

    def renew(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        """Extend the lease; return its duration in seconds.

        Args:
            ticket_id: id of the ticket.
            attempt: number of the attempt that holds the lease.
            now: monotonic time in seconds.
            reader: index of the reader among the ticket's readers.

        Raises:
            TicketRejected: this attempt holds no lease.
        """
        place = self._find(ticket_id, reader)
        if place.state is not OfferState.CLAIMED or place.attempt != attempt:
            raise TicketRejected("this attempt no longer holds a lease", reason="TICKET_GONE", field="ticket")
        place.lease(OfferEvent.RENEW, now + self.times.lease_seconds)
        return self.times.lease_seconds

    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[P]:
        """Record the end of an attempt; return pages to be freed. After a failure the offer stays open for the reader's
        next attempt, until `max_failures` attempts have failed. A reader that already has every block sends `done`
        without a claim.

        Args:
            ticket_id: id of the ticket; unknown ids are ignored.
            attempt: number of the attempt; attempts without the lease are ignored.
            now: monotonic time in seconds.
            done: whether the reader has every block.
            reader: index of the reader among the ticket's readers.
        """
        offer = self._offers.get(ticket_id)
        if offer is None or not 0 <= reader < len(offer.places):
            return []
        place = offer.places[reader]
        if place.state is OfferState.FREED:
            return []
        if place.attempt is None:
            place.ended = max(place.ended, attempt)
            if not done:
                return []
        elif place.attempt != attempt:
            return []
        if done:
            place.move(OfferEvent.DONE)
        else:
            place.failures += 1
            place.move(OfferEvent.SPENT if place.failures >= self.times.max_failures else OfferEvent.FAIL)
            place.attempt, place.ended = None, max(place.ended, attempt)
            place.deadline = now + self.times.offer_seconds
        return self._freed(ticket_id, offer)

    def release(self, ticket_id: TicketId, now: float) -> list[P]:
        """Withdraw the offer; return pages to be freed now. A running read has `quiesce_seconds` to stop.

        Args:
            ticket_id: id of the ticket; if it has not been offered yet, a later offer ends at once.
            now: monotonic seconds.
        """
        offer = self._offers.get(ticket_id)
        if offer is None:
            self._early[ticket_id] = None
            if len(self._early) > _MAX_EARLY_RELEASES:
                del self._early[next(iter(self._early))]
            return []
        for place in offer.places:
            if place.state is OfferState.CLAIMED:
                place.deadline = now + self.times.quiesce_seconds
            if place.state is not OfferState.FREED:
                place.move(OfferEvent.RELEASE)
        return self._freed(ticket_id, offer)

    def expire(self, now: float) -> list[P]:
        """Apply time-outs; return pages to be freed. Call it at least every second.

        Args:
            now: monotonic time in seconds.
        """
        freed: list[P] = []
        for ticket_id, offer in list(self._offers.items()):
            for place in offer.places:
                if place.state is not OfferState.FREED and place.deadline <= now:
                    place.deadline = now + self.times.quiesce_seconds
                    place.move(OfferEvent.EXPIRE)
            freed += self._freed(ticket_id, offer)
        return freed

    def drop_all(self) -> list[P]:
        """Drop all offers when the worker shuts down; return all their pages."""
        pages = [offer.pages for offer in self._offers.values()]
        self._offers.clear()
        return pages

    def count(self, state: OfferState) -> int:
        """Return the number of readers, over all offers, that are in the given state."""
        return sum(1 for offer in self._offers.values() for place in offer.places if place.state is state)

    @property
    def due(self) -> float:
        """Time of the next time-out, monotonic seconds; infinite if no offer is open."""
        open_places = (p for o in self._offers.values() for p in o.places if p.state is not OfferState.FREED)
        return min((place.deadline for place in open_places), default=math.inf)

    @property
    def is_idle(self) -> bool:
        """Whether no offer is open."""
        return not self._offers

    def _find(self, ticket_id: TicketId, reader: int) -> _Reader:
        offer = self._offers.get(ticket_id)
        if offer is not None and not 0 <= reader < len(offer.places):
            raise TicketRejected(
                f"reader_index {reader} is out of range: the offer has {len(offer.places)} readers",
                reason="TICKET_READER",
                field="reader_index",
            )
        if offer is None or offer.places[reader].state is OfferState.FREED:
            raise TicketRejected("the offer is gone: released, expired, or taken", reason="TICKET_GONE", field="ticket")
        return offer.places[reader]

    def _freed(self, ticket_id: TicketId, offer: _Offer[P]) -> list[P]:
        if any(place.state is not OfferState.FREED for place in offer.places):
            return []
        del self._offers[ticket_id]
        return [offer.pages]


def check_incarnation(named: str, own: str) -> None:
    """Check that the incarnation named in a message is the `own` one of this worker.

    Raises:
        TicketRejected: the message is for a different incarnation.
    """
    if named != own:
        raise TicketRejected(
            f"the ticket is for incarnation {named!r}, but this worker has restarted as {own!r} with new pages",
            reason="TICKET_INCARNATION",
            field="incarnation",
        )
