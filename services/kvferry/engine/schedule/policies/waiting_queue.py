"""Queues of waiting sequences: by a fixed rank, by remaining tokens, in two levels, and by weighted shares of
priorities.

    rank queue       heap by a rank that does not change: arrival, or priority and arrival
    shortest first   heap by priority and remaining tokens; the rank of the first is recomputed before its use
    two levels       rank queue -> batch of `BATCH_SIZE` sequences, a shortest-first queue, refilled when empty
    weighted         heap by virtual start time: tokens of the priority's earlier requests, divided by its weight

Remaining tokens are tokens that are neither computed nor cached. Their number changes when the prefix cache does, and
computing it searches the cache, so a shortest-first queue computes a rank when the sequence is added, and again only
when it comes first. With two levels this happens within the batch, not for all waiting sequences (Kwon, "vLLM: an
efficient inference engine for large language models", 2025, section 4.5.3).
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.core.ids import RequestId
from kvferry.core.settings.class_weights import Weights
from kvferry.engine.schedule.policies.background import is_background
from kvferry.engine.schedule.step.sequence import Sequence

BATCH_SIZE = 8
"""Number of sequences in the batch; a larger batch is closer to shortest first, a smaller one is searched faster."""

_UNITS = 1 << 20
"""Units of virtual time per token of a priority with weight 1; integers keep the order exact."""

Rank = tuple[int, ...]
RankOf = Callable[[Sequence], Rank]


class WaitingQueue(Protocol):
    """A queue of waiting sequences."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, new or preempted."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue."""
        ...

    def set_aside(self, sequence: Sequence) -> None:
        """Remove a sequence that a step passes over; it is added again at the end of the step."""
        ...

    def first(self) -> Sequence | None:
        """Return the sequence to admit next; `None` if the queue is empty."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of uncomputed tokens of all sequences, including cached tokens."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all sequences, in any order."""
        ...


class RankQueue:
    """A queue ordered by a rank that does not change while a sequence waits. Removed entries are marked, and leave the
    heap when they come first."""

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._entries: dict[RequestId, tuple[int, Sequence, int]] = {}
        self._count = 0
        self.num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._count += 1
        num_tokens = sequence.num_uncomputed
        self.num_tokens += num_tokens
        self._entries[sequence.request_id] = (self._count, sequence, num_tokens)
        heapq.heappush(self._heap, (self._rank(sequence), self._count, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue."""
        self.set_aside(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """See `WaitingQueue.set_aside`."""
        self.num_tokens -= self._entries.pop(sequence.request_id)[2]

    def first(self) -> Sequence | None:
        """Return the sequence with the lowest rank."""
        while self._heap:
            _, number, sequence = self._heap[0]
            entry = self._entries.get(sequence.request_id)
            if entry is not None and entry[0] == number:
                return sequence
            heapq.heappop(self._heap)
        return None

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence, _ in self._entries.values())


class ShortestFirstQueue(RankQueue):
    """A queue ordered by a rank that may change while a sequence waits. The first sequence's rank is recomputed until
    it is still the lowest. A sequence whose rank has decreased is found when it comes first by its earlier rank."""

    def first(self) -> Sequence | None:
        """Return the sequence with the lowest rank."""
        while (sequence := super().first()) is not None:
            rank = self._rank(sequence)
            if rank <= self._heap[0][0]:
                return sequence
            heapq.heapreplace(self._heap, (rank, self._heap[0][1], sequence))
        return None


class WeightedQueue(RankQueue):
    """A queue in which priorities with waiting sequences share admitted tokens in proportion to their weights
    (start-time fair queueing, Goyal et al., SIGCOMM 1996). A sequence costs its prompt and output tokens. A priority
    that had no waiting sequences starts at the virtual time, the start time of the sequence admitted last, so that it
    gains nothing by its pause. A preempted sequence has already been charged, and comes first."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(self._start)
        self._weights = weights
        self._virtual = 0
        self._ends: dict[int, int] = {}
        """Virtual end of the last sequence of each priority that is ahead of the virtual time."""
        self._starts: dict[RequestId, int] = {}

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; the virtual time advances to its start."""
        super().remove(sequence)
        self._virtual = max(self._virtual, self._starts.pop(sequence.request_id))
        self._ends = {priority: end for priority, end in self._ends.items() if end > self._virtual}

    def _start(self, sequence: Sequence) -> Rank:
        if sequence.request_id in self._starts:  # it was set aside, and has been charged
            start = self._starts[sequence.request_id]
        elif sequence.num_preemptions:
            start = self._virtual
        else:
            priority, cost = sequence.request.priority, sequence.request.max_tokens_total
            start = max(self._virtual, self._ends.get(priority, 0))
            self._ends[priority] = start + _UNITS * cost // self._weights.get(priority, 1)
        self._starts[sequence.request_id] = start
        return (start, 0 if sequence.num_preemptions else 1, sequence.arrival)


class TwoLevelQueue:
    """A queue with a batch, which is refilled in the order of `outer` only when it is empty. All sequences of a batch
    are admitted before any later arrival, which bounds their wait."""

    def __init__(self, outer: RankOf, inner: RankOf) -> None:
        """
        Args:
            outer: rank by which sequences enter a batch.
            inner: rank by which the sequences of a batch are admitted.
        """
        self._waiting = RankQueue(outer)
        self._batch = ShortestFirstQueue(inner)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. A preempted sequence was in a batch before, and returns to the present one."""
        (self._batch if sequence.num_preemptions else self._waiting).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue."""
        (self._batch if sequence in self._batch else self._waiting).remove(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """See `WaitingQueue.set_aside`. When it is added again, it is among the first of its queue."""
        self.remove(sequence)

    def first(self) -> Sequence | None:
        """Return the sequence in the batch with the lowest inner rank."""
        if not self._batch:
            while len(self._batch) < BATCH_SIZE and (sequence := self._waiting.first()) is not None:
                self._waiting.remove(sequence)
                self._batch.add(sequence)
        first, later = self._batch.first(), self._waiting.first()
        if first is not None and later is not None and is_background(first) and not is_background(later):
            self._waiting.remove(later)  # it waits for no batch of the background
            self._batch.add(later)
            return later
        return first

    @property
    def num_tokens(self) -> int:
        """Number of uncomputed tokens of all sequences, including cached tokens."""
        return self._waiting.num_tokens + self._batch.num_tokens

    def __len__(self) -> int:
        return len(self._waiting) + len(self._batch)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._batch
        yield from self._waiting
