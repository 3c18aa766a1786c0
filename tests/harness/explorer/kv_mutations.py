"""Mutations of the attempt and the offer book; each breaks one rule."""

from collections.abc import Sequence
from typing import Any

from harness.explorer.mutation import INFINITY, mutation
from kvferry.core.ids import TicketId
from kvferry.kv.handoff.attempt import Attempt, Effects
from kvferry.kv.handoff.offers import OfferBook, OfferState
from kvferry.kv.handoff.transfers import TransferEvent, TransferState

# ---------------------------------------------------------------------- the attempt


@mutation("data is accepted without comparing epochs", "cached", "attempt", "vllm-project/vllm#52234")
class EpochsNotCompared(Attempt):
    def epochs(self, found: Sequence[int]) -> Effects:
        return super().epochs(self._promised)


@mutation("data is accepted without comparing digests", "corrupt", "attempt")
class DigestsNotCompared(Attempt):
    def digests(self, *, equal: bool) -> Effects:
        return super().digests(equal=True)


@mutation("a truncated epoch list is compared only up to its length", "cached", "attempt")
class PartialListAccepted(Attempt):
    def epochs(self, found: Sequence[int]) -> Effects:
        return super().epochs([*found, *self._promised[len(found) :]])


@mutation("a missing response is treated as success", "cached", "attempt", "vllm-project/vllm#52234")
class MissingAnswerMeansSuccess(Attempt):
    def broken(self, message: str) -> Effects:
        verifying = self.state is TransferState.VERIFYING
        return self.epochs(self._promised) if verifying else super().broken(message)


@mutation("a write in progress is treated as ended", "tight", "attempt", "vllm-project/vllm#56104")
class FailureMeansQuiet(Attempt):
    def _end(self, event: TransferEvent, failure: str | None) -> Effects:
        wanted = super()._end(event, failure)
        return [*wanted, *self.quiet()]


@mutation("blocks are trimmed by count, not by position", "prefix", "attempt", "vllm-project/vllm#50558")
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


@mutation("a reader never renews its lease", "slow", "attempt", "vllm-project/vllm#41383")
class ReaderNeverRenews(Attempt):
    def claimed(self, lease_seconds: float, now: float) -> Effects:
        wanted = super().claimed(lease_seconds, now)
        self._renew_at = INFINITY
        return wanted


# ---------------------------------------------------------------------- the offer book


@mutation("a renewal is acknowledged but does not extend the lease", "slow", "book", "vllm-project/vllm#53095")
class RenewDoesNotRenew(OfferBook[str]):
    def renew(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        before = self._find(ticket_id, reader).deadline
        seconds = super().renew(ticket_id, attempt, now, reader=reader)
        self._find(ticket_id, reader).deadline = before
        return seconds


@mutation("a crashed reader keeps its lease forever", "messages", "book", "vllm-project/vllm#41383")
class NoLeaseTimer(OfferBook[str]):
    def claim(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        seconds = super().claim(ticket_id, attempt, now, reader=reader)
        self._offers[ticket_id].places[reader].deadline = INFINITY
        return seconds


@mutation("an unclaimed offer never expires", "deaths", "book", "sgl-project/sglang#18701")
class NoOfferTimer(OfferBook[str]):
    def offer(self, ticket_id: TicketId, pages: str, now: float, *, readers: int = 1) -> list[str]:
        return super().offer(ticket_id, pages, INFINITY, readers=readers)


@mutation("a sweep stops at the first expired entry", "readers", "book")
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


@mutation("a release frees pages that are being read", "deaths", "book", "sgl-project/sglang#35049")
class ReleaseFreesUnderAReader(OfferBook[str]):
    def release(self, ticket_id: TicketId, now: float) -> list[str]:
        freed = super().release(ticket_id, now)
        offer = self._offers.pop(ticket_id, None)
        return freed if offer is None else [offer.pages]


@mutation("an expired lease frees pages that are being read", "slow", "book", "sgl-project/sglang#35049")
class NoQuietTimeAfterALease(OfferBook[str]):
    def expire(self, now: float) -> list[str]:
        return [*super().expire(now), *super().expire(now + self.times.quiesce_seconds)]


@mutation("the first of several readers frees the pages for all", "readers", "book", "ai-dynamo/dynamo#14018")
class OneDoneFreesForAll(OfferBook[str]):
    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        freed = super().finish(ticket_id, attempt, now, done=done, reader=reader)
        return freed or (self.release(ticket_id, now) if done else [])


@mutation("a failed attempt ends the offer", "everything", "book")
class FailedAttemptFrees(OfferBook[str]):
    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        return super().finish(ticket_id, attempt, now, done=True, reader=reader)


@mutation("a late message of an earlier attempt ends the current one", "deaths", "book")
class AttemptNumberIgnored(OfferBook[str]):
    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        offer = self._offers.get(ticket_id)
        if offer is not None and offer.places[reader].attempt is not None:
            attempt = offer.places[reader].attempt or 0
        return super().finish(ticket_id, attempt, now, done=done, reader=reader)


@mutation("a duplicate message frees the pages twice", "messages", "book", "vllm-project/vllm#53049")
class SecondFinishFreesAgain(OfferBook[str]):
    gone: tuple[str, ...] = ()

    def finish(self, ticket_id: TicketId, attempt: int, now: float, *, done: bool, reader: int = 0) -> list[str]:
        if ticket_id in self.gone:
            return [ticket_id]
        freed = super().finish(ticket_id, attempt, now, done=done, reader=reader)
        self.gone = (*self.gone, *freed)
        return freed


@mutation("a claim that arrives after the end of its attempt gets a lease", "messages", "book")
class StragglingClaimAccepted(OfferBook[str]):
    def claim(self, ticket_id: TicketId, attempt: int, now: float, *, reader: int = 0) -> float:
        if ticket_id in self._offers:
            self._offers[ticket_id].places[reader].ended = -1
        return super().claim(ticket_id, attempt, now, reader=reader)


@mutation("a release that overtakes its offer is dropped", "deaths", "book", "vllm-project/vllm#41269")
class EarlyReleaseForgotten(OfferBook[str]):
    def release(self, ticket_id: TicketId, now: float) -> list[str]:
        freed = super().release(ticket_id, now)
        self._early.clear()
        return freed
