"""The prefill side of a hand-off: which finished prompts' pages are still held, for whom, until when.

    OFFERED   the ticket is out, nobody has come          until claimed, released, or `offer_seconds`
    CLAIMED   a reader has a lease                        until finished, released, or `lease_seconds` unrenewed
    QUIESCE   the lease is over, a read may still run     until the reader says it stopped, or `quiesce_seconds`
    FREED     this place holds the pages no more

An offer has one *place* for each reader it was made for, and each place walks this table by itself; the pages go
back when every place is freed. A reader can do no harm by coming late: pages get a new epoch before new content, and
the reader compares epochs after it has read. So the times here bound waste, not correctness. Every event is
idempotent by (ticket, reader, attempt); an unknown ticket answers like a freed one. Pure: the caller brings the time
and carries out the effects (give these pages back).
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
    """Where an offer stands."""

    OFFERED = "offered"
    CLAIMED = "claimed"
    QUIESCE = "quiesce"
    FREED = "freed"


class OfferEvent(StrEnum):
    """What can happen to an offer."""

    CLAIM = "claim"
    RENEW = "renew"
    DONE = "done"
    FAIL = "fail"
    SPENT = "spent"
    """Failed once too often: something is wrong with these pages, or with the way to them."""
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
    """How long each state may last, in seconds, and how often a reader may fail."""

    offer_seconds: float = 10.0
    """Short: the gateway hands a ticket on within milliseconds, or releases it."""
    lease_seconds: float = 30.0
    """A reader renews every sixth of what it was given; two lost renewals do not cost it the lease."""
    quiesce_seconds: float = 5.0
    """For a reader that lost its lease to notice and stop."""
    max_failures: int = 3
    """Attempts of one reader that may fail before its place is freed."""


@dataclass(slots=True)
class _Place:
    """One reader's part in an offer."""

    deadline: float
    state: OfferState = OFFER_MACHINE.initial
    attempt: int | None = None
    """The attempt that holds the claim; `None` while offered."""
    ended: int = -1
    """The latest attempt that said it was over; a claim of it that comes later is a straggler."""
    failures: int = 0

    def move(self, event: OfferEvent) -> None:
        self.state = OFFER_MACHINE.next(self.state, event)

    def lease(self, event: OfferEvent, until: float) -> None:
        """Begin or extend a lease; never shortens it."""
        self.deadline = max(until, self.deadline) if event is OfferEvent.RENEW else until
        self.move(event)


@dataclass(slots=True)
class _Offer(Generic[P]):
    pages: P
    places: list[_Place]


class OfferBook(Generic[P]):
    """All offers of one worker. One owner; every method takes the time and returns pages to give back."""

    def __init__(self, times: OfferTimes) -> None:
        self.times = times
        self._offers: dict[TicketId, _Offer[P]] = {}
        self._early: dict[TicketId, None] = {}
        """Released before they were offered, as far as is known; the oldest go first."""

    def __contains__(self, ticket_id: TicketId) -> bool:
        """Whether an offer of this id is open."""
        return ticket_id in self._offers

    def offer(self, ticket_id: TicketId, pages: P, now: float, *, readers: int = 1) -> list[P]:
        """A new offer to `readers` readers, numbered from 0; the book owns `pages` until it returns them from
        another method, or from this one: the gateway names tickets before they exist, so its release can overtake
        the offer.

        Raises:
            ValueError: nobody is to read it, or the id is taken; its pages would be lost.
        """
        if readers < 1 or ticket_id in self._offers:
            raise ValueError(f"an offer needs a reader and an id of its own; readers={readers}")
        if ticket_id in self._early:
            del self._early[ticket_id]
            return [pages]
        deadline = now + self.times.offer_seconds
        self._offers[ticket_id] = _Offer(pages, [_Place(deadline) for _ in range(readers)])
        return []

    def claim(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        """Start the lease; its length in seconds. The same attempt may claim again; a later one takes the lease over.

        Raises:
            TicketRejected: the offer is gone, was not made for this reader, or another attempt holds its place.
        """
        place = self._find(ticket_id, reader)
        if place.state is OfferState.CLAIMED and place.attempt == attempt:
            place.lease(OfferEvent.RENEW, now + self.times.lease_seconds)
        elif place.state is OfferState.OFFERED and attempt > place.ended:
            place.attempt = attempt
            place.lease(OfferEvent.CLAIM, now + self.times.lease_seconds)
        elif place.state is OfferState.CLAIMED and place.attempt is not None and attempt > place.attempt:
            # The gateway delivers a ticket anew only when it has given the former reader up. That one may still read;
            # its late words are of an attempt that has ended, and epochs prove what it has read.
            place.ended = max(place.ended, place.attempt)
            place.attempt = attempt
            place.lease(OfferEvent.CLAIM, now + self.times.lease_seconds)
        elif place.state is OfferState.OFFERED:
            raise TicketRejected(f"attempt {attempt} has ended already", reason="TICKET_GONE", field="attempt")
        else:
            raise TicketRejected(
                f"the offer is {place.state.value}: another attempt has it or had it",
                reason="TICKET_TAKEN",
                field="ticket",
            )
        return self.times.lease_seconds

    def renew(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        """Extend the lease; its length in seconds.

        Raises:
            TicketRejected: this attempt holds no lease.
        """
        place = self._find(ticket_id, reader)
        if place.state is not OfferState.CLAIMED or place.attempt != attempt:
            raise TicketRejected("this attempt holds no lease any more", reason="TICKET_GONE", field="ticket")
        place.lease(OfferEvent.RENEW, now + self.times.lease_seconds)
        return self.times.lease_seconds

    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[P]:
        """The attempt is over; pages to give back. A failed attempt leaves its place open for the next one, until
        too many have failed.

        A reader that needed nothing, because it had every block, says done without a claim.
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
        """Nobody wants it any more; pages to give back now. A read that runs gets a moment to stop."""
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
        """Let time act; pages to give back. Call it at least every second."""
        freed: list[P] = []
        for ticket_id, offer in list(self._offers.items()):
            for place in offer.places:
                if place.state is not OfferState.FREED and place.deadline <= now:
                    place.deadline = now + self.times.quiesce_seconds
                    place.move(OfferEvent.EXPIRE)
            freed += self._freed(ticket_id, offer)
        return freed

    def drop_all(self) -> list[P]:
        """The worker ends; all pages."""
        pages = [offer.pages for offer in self._offers.values()]
        self._offers.clear()
        return pages

    def count(self, state: OfferState) -> int:
        """Places in one state, over all offers."""
        return sum(1 for offer in self._offers.values() for place in offer.places if place.state is state)

    @property
    def due(self) -> float:
        """When `expire` will next have something to do; infinite without an offer."""
        open_places = (p for o in self._offers.values() for p in o.places if p.state is not OfferState.FREED)
        return min((place.deadline for place in open_places), default=math.inf)

    @property
    def is_idle(self) -> bool:
        """Whether no offer is left."""
        return not self._offers

    def _find(self, ticket_id: TicketId, reader: int) -> _Place:
        offer = self._offers.get(ticket_id)
        if offer is not None and not 0 <= reader < len(offer.places):
            raise TicketRejected(
                f"the offer is for {len(offer.places)} readers, this is number {reader} from 0",
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


def check_incarnation(asked: str, mine: str) -> None:
    """Whether a message is for this life of this worker.

    Raises:
        TicketRejected: it is for another.
    """
    if asked != mine:
        raise TicketRejected(
            f"the ticket is of incarnation {asked!r}; this worker is {mine!r} since it restarted, and its pages are "
            "new",
            reason="TICKET_INCARNATION",
            field="incarnation",
        )
