"""The attempt and the offer book broken, one rule at a time."""

from collections.abc import Sequence
from typing import Any

from kvferry.core.ids import TicketId
from kvferry.kv.attempt import Attempt, Effects
from kvferry.kv.offers import OfferBook, OfferState
from kvferry.kv.transfers import TransferEvent, TransferState
from kvferry.testing.explorer.mutation import INFINITY, mutation

# ---------------------------------------------------------------------- the attempt


@mutation("data is believed because it arrived", "cached", "attempt", "vllm-project/vllm#52234")
class EpochsNotCompared(Attempt):
    def epochs(self, found: Sequence[int]) -> Effects:
        return super().epochs(self._promised)


@mutation("a short answer is compared as far as it goes", "cached", "attempt")
class PartialListAccepted(Attempt):
    def epochs(self, found: Sequence[int]) -> Effects:
        return super().epochs([*found, *self._promised[len(found) :]])


@mutation("no answer is taken for a good one", "cached", "attempt", "vllm-project/vllm#52234")
class MissingAnswerMeansSuccess(Attempt):
    def broken(self, message: str) -> Effects:
        verifying = self.state is TransferState.VERIFYING
        return self.epochs(self._promised) if verifying else super().broken(message)


@mutation("a write that goes on is taken for one that has ended", "tight", "attempt", "vllm-project/vllm#56104")
class FailureMeansQuiet(Attempt):
    def _end(self, event: TransferEvent, failure: str | None) -> Effects:
        wanted = super()._end(event, failure)
        return [*wanted, *self.quiet()]


@mutation("blocks are cut to size by count, not by position", "prefix", "attempt", "vllm-project/vllm#50558")
class TrimmedByCount(Attempt):
    def __init__(self, source: Any, first_block: int, targets: Any, **rest: Any) -> None:
        super().__init__(source, 0, targets, **rest)


@mutation("a transfer without a deadline", "everything", "attempt", "ai-dynamo/nixl#2047")
class NoTransferDeadline(Attempt):
    def _read(self, now: float) -> Effects:
        wanted = super()._read(now)
        self._limit = INFINITY
        return wanted

    def progress(self, count: int, now: float) -> Effects:
        return []


@mutation("a control message without a deadline", "messages", "attempt", "sgl-project/sglang#9817")
class NoControlDeadline(Attempt):
    def connected(self, now: float) -> Effects:
        wanted = super().connected(now)
        self._limit = INFINITY
        return wanted


@mutation("a lease is never renewed by its reader", "slow", "attempt", "vllm-project/vllm#41383")
class ReaderNeverRenews(Attempt):
    def claimed(self, lease_seconds: float, now: float) -> Effects:
        wanted = super().claimed(lease_seconds, now)
        self._renew_at = INFINITY
        return wanted


# ---------------------------------------------------------------------- the offer book


@mutation("a renewal is answered and changes nothing", "slow", "book", "vllm-project/vllm#53095")
class RenewDoesNotRenew(OfferBook[str]):
    def renew(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        before = self._find(ticket_id, reader).deadline
        seconds = super().renew(ticket_id, attempt, now, reader=reader)
        self._find(ticket_id, reader).deadline = before
        return seconds


@mutation("a reader that dies keeps its lease for ever", "messages", "book", "vllm-project/vllm#41383")
class NoLeaseTimer(OfferBook[str]):
    def claim(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        seconds = super().claim(ticket_id, attempt, now, reader=reader)
        self._offers[ticket_id].places[reader].deadline = INFINITY
        return seconds


@mutation("an offer that nobody takes stays for ever", "deaths", "book", "sgl-project/sglang#18701")
class NoOfferTimer(OfferBook[str]):
    def offer(self, ticket_id: TicketId, pages: str, now: float, *, readers: int = 1) -> list[str]:
        return super().offer(ticket_id, pages, INFINITY, readers=readers)


@mutation("a sweep ends at the first that it finds", "readers", "book")
class SweepStopsAtTheFirst(OfferBook[str]):
    def expire(self, now: float) -> list[str]:
        for offer in self._offers.values():
            for place in offer.places:
                if place.deadline <= now and place.state is not OfferState.FREED:
                    later = [p for p in offer.places if p is not place]
                    kept = [p.deadline for p in later]
                    for p in later:
                        p.deadline = INFINITY
                    freed = super().expire(now)
                    for p, deadline in zip(later, kept, strict=True):
                        p.deadline = deadline
                    return freed
        return []


@mutation("a release takes the pages from under a reader", "deaths", "book", "sgl-project/sglang#35049")
class ReleaseFreesUnderAReader(OfferBook[str]):
    def release(self, ticket_id: TicketId, now: float) -> list[str]:
        freed = super().release(ticket_id, now)
        offer = self._offers.pop(ticket_id, None)
        return freed if offer is None else [offer.pages]


@mutation("a lease that ends takes the pages from under a reader", "slow", "book", "sgl-project/sglang#35049")
class NoQuietTimeAfterALease(OfferBook[str]):
    def expire(self, now: float) -> list[str]:
        return [*super().expire(now), *super().expire(now + self.times.quiesce_seconds)]


@mutation("the first of several readers frees for all", "readers", "book", "ai-dynamo/dynamo#14018")
class OneDoneFreesForAll(OfferBook[str]):
    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        freed = super().finish(ticket_id, attempt, now, done=done, reader=reader)
        return freed or (self.release(ticket_id, now) if done else [])


@mutation("a failed attempt ends the offer", "everything", "book")
class FailedAttemptFrees(OfferBook[str]):
    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        return super().finish(ticket_id, attempt, now, done=True, reader=reader)


@mutation("a late word of an earlier attempt ends the present one", "deaths", "book")
class AttemptNumberIgnored(OfferBook[str]):
    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        offer = self._offers.get(ticket_id)
        if offer is not None and offer.places[reader].attempt is not None:
            attempt = offer.places[reader].attempt or 0
        return super().finish(ticket_id, attempt, now, done=done, reader=reader)


@mutation("a word that comes twice gives back twice", "messages", "book", "vllm-project/vllm#53049")
class SecondFinishFreesAgain(OfferBook[str]):
    gone: tuple[str, ...] = ()

    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        if ticket_id in self.gone:
            return [ticket_id]
        freed = super().finish(ticket_id, attempt, now, done=done, reader=reader)
        self.gone = (*self.gone, *freed)
        return freed


@mutation("a claim that arrives after its attempt ended takes a lease", "messages", "book")
class StragglingClaimAccepted(OfferBook[str]):
    def claim(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        if ticket_id in self._offers:
            self._offers[ticket_id].places[reader].ended = -1
        return super().claim(ticket_id, attempt, now, reader=reader)


@mutation("a release that overtakes its offer is forgotten", "deaths", "book", "vllm-project/vllm#41269")
class EarlyReleaseForgotten(OfferBook[str]):
    def release(self, ticket_id: TicketId, now: float) -> list[str]:
        freed = super().release(ticket_id, now)
        self._early.clear()
        return freed
