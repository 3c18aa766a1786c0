"""The prefill side of a hand-off: which finished prompts' pages are still held, for whom, until when.

    OFFERED   the ticket is out, nobody has come          until claimed, released, or `offer_seconds`
    CLAIMED   a reader has a lease                        until finished, released, or `lease_seconds` unrenewed
    QUIESCE   the lease is over, a read may still run     until the reader says it stopped, or `quiesce_seconds`
    FREED     the pages went back to the pool

A reader can do no harm by coming late: pages get a new epoch before new content, and the reader compares
epochs after it has read. So the times here bound waste, not correctness. Every event is idempotent by
(ticket, attempt); an unknown ticket answers like a freed one. Pure: the caller brings the time and carries
out the effects (give these pages back).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import TicketId
from kvferry.core.states import Machine

P = TypeVar("P")


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
        (OfferState.CLAIMED, OfferEvent.RENEW): OfferState.CLAIMED,
        (OfferState.CLAIMED, OfferEvent.DONE): OfferState.FREED,
        (OfferState.CLAIMED, OfferEvent.FAIL): OfferState.OFFERED,
        (OfferState.CLAIMED, OfferEvent.RELEASE): OfferState.QUIESCE,
        (OfferState.CLAIMED, OfferEvent.EXPIRE): OfferState.QUIESCE,
        (OfferState.QUIESCE, OfferEvent.DONE): OfferState.FREED,
        (OfferState.QUIESCE, OfferEvent.FAIL): OfferState.FREED,
        (OfferState.QUIESCE, OfferEvent.RELEASE): OfferState.QUIESCE,
        (OfferState.QUIESCE, OfferEvent.EXPIRE): OfferState.FREED,
    },
)


@dataclass(frozen=True, slots=True)
class OfferTimes:
    """How long each state may last, in seconds."""

    offer_seconds: float = 10.0
    """Short: the gateway hands a ticket on within milliseconds, or releases it."""
    lease_seconds: float = 30.0
    """A reader renews every sixth of what it was given; two lost renewals do not cost it the lease."""
    quiesce_seconds: float = 5.0
    """For a reader that lost its lease to notice and stop."""


@dataclass(slots=True)
class _Offer(Generic[P]):
    pages: P
    state: OfferState
    deadline: float
    attempt: int | None = None
    """The attempt that holds the claim; `None` while offered."""


class OfferBook(Generic[P]):
    """All offers of one worker. One owner; every method takes the time and returns pages to give back."""

    def __init__(self, times: OfferTimes) -> None:
        self.times = times
        self._offers: dict[TicketId, _Offer[P]] = {}

    def __contains__(self, ticket_id: TicketId) -> bool:
        """Whether an offer of this id is open."""
        return ticket_id in self._offers

    def offer(self, ticket_id: TicketId, pages: P, now: float) -> None:
        """A new offer; the book owns `pages` until it returns them from another method."""
        self._offers[ticket_id] = _Offer(pages, OFFER_MACHINE.initial, now + self.times.offer_seconds)

    def claim(self, ticket_id: TicketId, attempt: int, now: float) -> float:
        """Start the lease; its length in seconds. Claiming again with the same attempt starts it anew.

        Raises:
            TicketRejected: the offer is gone, or another attempt holds it.
        """
        offer = self._find(ticket_id)
        if offer.state is OfferState.CLAIMED and offer.attempt == attempt:
            return self._extend(offer, OfferEvent.RENEW, now)
        if offer.state is not OfferState.OFFERED:
            raise TicketRejected(
                f"the offer is {offer.state.value}: another attempt has it or had it",
                reason="TICKET_TAKEN",
                field="ticket",
            )
        offer.attempt = attempt
        return self._extend(offer, OfferEvent.CLAIM, now)

    def renew(self, ticket_id: TicketId, attempt: int, now: float) -> float:
        """Extend the lease; its length in seconds.

        Raises:
            TicketRejected: this attempt holds no lease.
        """
        offer = self._find(ticket_id)
        if offer.state is not OfferState.CLAIMED or offer.attempt != attempt:
            raise TicketRejected("this attempt holds no lease any more", reason="TICKET_GONE", field="ticket")
        return self._extend(offer, OfferEvent.RENEW, now)

    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool) -> list[P]:
        """The attempt is over; pages to give back. A failed attempt leaves the offer open for the next one.

        A reader that needed nothing, because it had every block, says done without a claim.
        """
        offer = self._offers.get(ticket_id)
        unclaimed = offer is not None and offer.attempt is None
        if offer is None or (unclaimed and not done) or (not unclaimed and offer.attempt != attempt):
            return []
        freed = self._move(ticket_id, offer, OfferEvent.DONE if done else OfferEvent.FAIL)
        if not freed:
            offer.attempt = None
            offer.deadline = now + self.times.offer_seconds
        return freed

    def release(self, ticket_id: TicketId, now: float) -> list[P]:
        """Nobody wants it any more; pages to give back now. A read that runs gets a moment to stop."""
        offer = self._offers.get(ticket_id)
        if offer is None:
            return []
        if offer.state is OfferState.CLAIMED:
            offer.deadline = now + self.times.quiesce_seconds
        return self._move(ticket_id, offer, OfferEvent.RELEASE)

    def expire(self, now: float) -> list[P]:
        """Let time act; pages to give back. Call it at least every second."""
        freed: list[P] = []
        for ticket_id, offer in list(self._offers.items()):
            if offer.deadline <= now:
                offer.deadline = now + self.times.quiesce_seconds
                freed += self._move(ticket_id, offer, OfferEvent.EXPIRE)
        return freed

    def drop_all(self) -> list[P]:
        """The worker ends; all pages."""
        pages = [offer.pages for offer in self._offers.values()]
        self._offers.clear()
        return pages

    def count(self, state: OfferState) -> int:
        """Offers in one state."""
        return sum(1 for o in self._offers.values() if o.state is state)

    @property
    def is_idle(self) -> bool:
        """Whether no offer is left."""
        return not self._offers

    def _find(self, ticket_id: TicketId) -> _Offer[P]:
        offer = self._offers.get(ticket_id)
        if offer is None:
            raise TicketRejected("the offer is gone: released, expired, or taken", reason="TICKET_GONE", field="ticket")
        return offer

    def _extend(self, offer: _Offer[P], event: OfferEvent, now: float) -> float:
        offer.state = OFFER_MACHINE.next(offer.state, event)
        offer.deadline = now + self.times.lease_seconds
        return self.times.lease_seconds

    def _move(self, ticket_id: TicketId, offer: _Offer[P], event: OfferEvent) -> list[P]:
        offer.state = OFFER_MACHINE.next(offer.state, event)
        if offer.state is not OfferState.FREED:
            return []
        del self._offers[ticket_id]
        return [offer.pages]
