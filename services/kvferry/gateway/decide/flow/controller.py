"""The flow controller: bounds the queue, sheds by class, and dispatches requests when the fleet has room.

    submit --> QUEUED --dispatch--> DISPATCHED --finish--> ENDED
       |          |
    REFUSED    REFUSED (displaced), EXPIRED, CANCELLED

Every entry takes exactly one of these paths (`gateway.decide.flow.fair_queue.MACHINE`). Used on one thread.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from kvferry.core.errors import Overloaded
from kvferry.gateway.decide.flow.band_shares import BandShares
from kvferry.gateway.decide.flow.capacity import DrainRate, Room
from kvferry.gateway.decide.flow.fair_queue import BandOrder, EntryEvent, FairQueue, QueueEntry, StrictOrder

K = TypeVar("K")
QUEUE_FULL = "RATE_LIMIT_EXCEEDED"
"""Reason of refusals that a retry can resolve; OpenAI's code."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Maximum size of a queue."""

    requests: int
    num_bytes: int


@dataclass(slots=True)
class QueueSize:
    """Present size of a queue."""

    requests: int = 0
    num_bytes: int = 0
    prefill_tokens: int = 0
    """Expected prompt tokens to compute."""

    def add(self, entry: QueueEntry, sign: int) -> None:
        """Count an entry that enters or leaves.

        Args:
            entry: the entry.
            sign: 1 if the entry enters, -1 if it leaves.
        """
        self.requests += sign
        self.num_bytes += sign * entry.num_bytes
        self.prefill_tokens += sign * entry.prefill_tokens

    def exceeds(self, bounds: QueueBounds, extra: QueueEntry) -> str:
        """Return the bound that one more entry would exceed, with its value; empty if there is none.

        Args:
            bounds: maximum size of the queue.
            extra: the entry that would be added.
        """
        if self.requests + 1 > bounds.requests:
            return f"{self.requests} requests are waiting; at most {bounds.requests} may"
        if self.num_bytes + extra.num_bytes > bounds.num_bytes:
            return (
                f"{self.num_bytes} bytes of requests are waiting, and {extra.num_bytes} more would exceed the "
                f"limit of {bounds.num_bytes}"
            )
        return ""


@dataclass(slots=True)
class _Freed:
    """The size of a queue without displaced entries."""

    size: QueueSize
    victims: list[QueueEntry] = field(default_factory=list)


class FlowController:
    """Queued and dispatched requests of one gateway."""

    def __init__(self, bounds: QueueBounds, class_weights: Mapping[int, int] | None = None) -> None:
        """
        Args:
            bounds: bounds of all queued requests together.
            class_weights: weight by priority, by which the priorities share the fleet; others have weight 1. `None` to
                serve them strictly in order.
        """
        self._bounds = bounds
        shares = None if class_weights is None else BandShares(class_weights)
        # Shared, or an order for each queue.
        self._band_orders: tuple[BandOrder, ...] = tuple(shares or StrictOrder() for _ in range(2))
        self._queues = tuple(map(FairQueue, self._band_orders))
        """Queues of requests that are not searches, and of searches, in this order. Each has its own room, so that
        neither waits for the other."""
        self._total = QueueSize()
        self._by_tenant: dict[str, QueueSize] = {}
        self._by_band: dict[int, QueueSize] = {}
        self._rate = DrainRate()
        self._number = 0
        self.num_dispatched = 0
        """Number of dispatched requests that have not ended."""
        self.num_sequences = 0
        """Number of samples that hold slots, without beams."""
        self.num_beams = 0
        """Number of beams that the searches among these requests run at a time."""
        self.prefill_tokens = 0
        """Prompt tokens of these requests that are not yet computed."""

    @property
    def num_queued(self) -> int:
        """Number of queued requests."""
        return self._total.requests

    @property
    def is_waited_for(self) -> bool:
        """Whether requests, or further samples of dispatched requests, are queued."""
        return any(map(len, self._queues))

    @property
    def queued_prefill_tokens(self) -> int:
        """Expected prompt tokens to compute of all queued requests."""
        return self._total.prefill_tokens

    @property
    def queued_bytes(self) -> int:
        """Memory of the queued requests in bytes."""
        return self._total.num_bytes

    @property
    def by_tenant(self) -> Mapping[str, QueueSize]:
        """Size of the queue of each tenant that has queued requests."""
        return self._by_tenant

    @property
    def by_band(self) -> Mapping[int, QueueSize]:
        """Size of the queue of each priority that has queued requests."""
        return self._by_band

    @property
    def num_flows(self) -> int:
        """Number of service counters of tenants."""
        return sum(queue.num_flows for queue in self._queues)

    def queued(self) -> Iterator[QueueEntry]:
        """Yield all queued entries, further samples of dispatched requests included, in no particular order."""
        return chain.from_iterable(queue.queued() for queue in self._queues)

    def used(self, room: Room) -> int:
        """Return how many of `room.sequences` are in use."""
        # If the searches have more beams than `room.searches`, their steps take turns and use only that many sequences.
        return self.num_sequences + (0 if room.is_split else min(self.num_beams, room.searches))

    def is_open(self, room: Room, entry: QueueEntry) -> bool:
        """Return whether a request may be dispatched now.

        Args:
            room: capacity of the fleet.
            entry: the entry, queued or new.
        """
        return self._has_workers(room, entry) and self._has_streams(room, entry)

    def _has_workers(self, room: Room, entry: QueueEntry) -> bool:
        is_open = self.num_beams < room.searches if entry.is_search else self.used(room) < room.sequences
        return is_open and self.prefill_tokens < room.prefill_tokens

    def _has_streams(self, room: Room, entry: QueueEntry) -> bool:
        running = self.num_sequences + self.num_beams
        return running + entry.num_sequences <= room.streams or (not running and room.streams > 0)

    def retry_after(self, now: float) -> float:
        """Estimate the seconds until the present queue is dispatched, from 1 to 60.

        Args:
            now: monotonic seconds.
        """
        return self._rate.retry_after(self.num_queued + 1, now)

    def make_room(self, entry: QueueEntry, own: QueueBounds, now: float) -> Sequence[QueueEntry]:
        """Displace requests of lower classes, newest first, until `entry` fits into the bounds.

        Args:
            entry: the new request, which is not in the queue yet.
            own: bounds of the tenant's queue; if they are exceeded, only the tenant's own requests are displaced.
            now: monotonic time in seconds, for the estimate of when to retry.

        Returns:
            The displaced requests, refused.

        Raises:
            Overloaded: the queue is full of requests of the same or a higher class; none is displaced.
        """
        freed = _Freed(QueueSize(self._total.requests, self._total.num_bytes))
        tenant = self._by_tenant.get(entry.tenant, QueueSize())
        own_freed = _Freed(QueueSize(tenant.requests, tenant.num_bytes))
        over = self._free(own_freed, own, entry, entry.tenant)
        whose = f"of tenant {entry.tenant!r} " if entry.tenant else ""
        for victim in own_freed.victims:
            freed.size.add(victim, -1)
        if not over:
            whose = ""
            freed.victims = list(own_freed.victims)
            over = self._free(freed, self._bounds, entry, None)
        if over:
            entry.on(EntryEvent.REFUSE)
            raise Overloaded(
                f"the queue {whose}is full: {over}",
                reason=QUEUE_FULL,
                retry_after_seconds=self.retry_after(now),
            )
        for victim in freed.victims:
            self._leave(victim, EntryEvent.REFUSE)
        return freed.victims

    def _free(self, freed: _Freed, bounds: QueueBounds, entry: QueueEntry, tenant: str | None) -> str:
        """Choose victims until `entry` fits; return the bound that is still exceeded, or an empty string."""
        over = freed.size.exceeds(bounds, entry)
        if not over:
            return ""
        if entry.num_bytes > bounds.num_bytes:
            return over
        chosen = {victim.number for victim in freed.victims}
        lower = (queue.newest_below(entry.priority, tenant) for queue in self._queues)
        for victim in heapq.merge(*lower, key=lambda one: (-one.priority, -one.number)):
            if victim.number in chosen:
                continue
            freed.size.add(victim, -1)
            freed.victims.append(victim)
            if not freed.size.exceeds(bounds, entry):
                return ""
        return over

    def submit(self, entry: QueueEntry, now: float) -> None:
        """Queue an entry for which `make_room` has found room.

        Args:
            entry: a new entry.
            now: monotonic seconds.
        """
        entry.on(EntryEvent.QUEUE)
        self._number += 1
        entry.number, entry.arrived = self._number, now
        self._queues[entry.is_search].add(entry)
        self._count(entry, 1)

    def dispatch(self, room: Room, now: float) -> list[QueueEntry]:
        """Return the entries that leave the queue now, in order: dispatched while there is room, or expired.

        Args:
            room: capacity of the fleet.
            now: monotonic seconds.
        """
        decided: list[QueueEntry] = []
        while (entry := self._next(room, now)) is not None:
            decided.append(entry)
            if entry.deadline <= now:
                self._leave(entry, EntryEvent.EXPIRE)
                continue
            entry.on(EntryEvent.DISPATCH)
            self._queues[entry.is_search].begin(entry)
            self._count(entry, -1)
            if not entry.is_part:
                self._rate.note(now)
                self.num_dispatched += 1
            self._run(entry, 1)
            entry.open_prefill_tokens = entry.prefill_tokens
            self.prefill_tokens += entry.prefill_tokens
        return decided

    def _next(self, room: Room, now: float) -> QueueEntry | None:
        """Return the entry that leaves its queue next; `None` if none can.

        Candidates are the first entries of both queues, if they have expired or the workers have room for them. If the
        first candidate in order lacks streams, no entry leaves, so that smaller requests do not overtake it forever.
        """
        first = [entry for queue in self._queues if (entry := queue.next()) is not None]
        free = [entry for entry in first if entry.deadline <= now or self._has_workers(room, entry)]
        entry = min(free, key=self._order, default=None)
        return entry if entry is None or entry.deadline <= now or self._has_streams(room, entry) else None

    def _order(self, entry: QueueEntry) -> tuple[float, int, int]:
        """Return the key of the order between the queues: the share of its priority, the priority, the arrival."""
        return self._band_orders[0].served(entry.priority), entry.priority, entry.number

    def _run(self, entry: QueueEntry, sign: int) -> None:
        """Count the samples or beams of an entry that begins (`sign` 1) or ends (-1)."""
        if entry.is_search:
            self.num_beams += sign * entry.num_sequences
        else:
            self.num_sequences += sign * entry.num_sequences

    def give_back(self, entry: QueueEntry) -> None:
        """Free the slots of a dispatched entry, which may go on without them; no effect if it has none."""
        self._run(entry, -1)
        entry.num_sequences = 0

    def rerank(self, entry: QueueEntry, rank: int) -> None:
        """Change the rank of a queued entry."""
        self._queues[entry.is_search].rerank(entry, rank)

    def expire(self, entry: QueueEntry) -> None:
        """Remove a queued entry whose deadline in the queue has passed."""
        self._leave(entry, EntryEvent.EXPIRE)

    def cancel(self, entry: QueueEntry) -> None:
        """Remove a queued entry whose client has disconnected."""
        self._leave(entry, EntryEvent.CANCEL)

    def refuse(self, entry: QueueEntry) -> None:
        """Remove a queued entry whose request is refused because it cannot be served."""
        self._leave(entry, EntryEvent.REFUSE)

    def prefilled(self, entry: QueueEntry, num_tokens: float = math.inf) -> None:
        """Free the capacity of up to `num_tokens` prompt tokens of a dispatched entry, which have been computed."""
        freed = int(min(num_tokens, entry.open_prefill_tokens))
        entry.open_prefill_tokens -= freed
        self.prefill_tokens -= freed

    def finish(self, entry: QueueEntry, used: float) -> None:
        """End a dispatched entry, free its capacity and correct its tenant's service.

        Args:
            entry: the dispatched entry.
            used: tokens that were computed for it: prompt tokens that were not cached, and output tokens.
        """
        entry.on(EntryEvent.END)
        self.prefilled(entry)
        self.num_dispatched -= not entry.is_part
        self.give_back(entry)
        self._queues[entry.is_search].end(entry, used)

    def _leave(self, entry: QueueEntry, event: EntryEvent) -> None:
        entry.on(event)
        self._queues[entry.is_search].remove(entry)
        self._count(entry, -1)

    def _count(self, entry: QueueEntry, sign: int) -> None:
        if entry.is_part:
            return
        self._total.add(entry, sign)
        _count_in(self._by_tenant, entry.tenant, entry, sign)
        _count_in(self._by_band, entry.priority, entry, sign)


def _count_in(sizes: dict[K, QueueSize], key: K, entry: QueueEntry, sign: int) -> None:
    size = sizes.get(key)
    if size is None:
        size = sizes[key] = QueueSize()
    size.add(entry, sign)
    if not size.requests:
        del sizes[key]
