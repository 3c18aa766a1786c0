"""Queues of waiting sequences: by a fixed rank, by remaining tokens, in two levels, and by shares of classes.

    rank queue       heap by a rank that does not change: arrival, or priority and arrival
    shortest first   heap by priority and remaining tokens; the rank of the first is recomputed before its use
    two levels       rank queue -> staging of `STAGED` sequences, refilled when empty; shortest first among the staged
    weighted         heap by virtual start time: the tokens of earlier requests of the class, divided by its weight

Remaining tokens are those that are neither computed nor cached. They change when the prefix cache does, and computing
them searches the cache, so this heap recomputes only the rank of its first sequence, and the staging bounds the search
to `STAGED` sequences (Kwon, "vLLM: an efficient inference engine for large language models", 2025, section 4.5.3).
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.core.ids import RequestId
from kvferry.engine.plan.sequence import Sequence
from kvferry.engine.policies.class_weights import Weights

STAGED = 8
"""Number of sequences in the staging; more are closer to shortest first, fewer are searched faster."""

_UNITS = 1 << 20
"""Units of virtual time for a token of a class with weight 1; integers keep the order exact."""

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

    def first(self) -> Sequence | None:
        """Return the sequence to admit next; `None` if the queue is empty."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences that are not computed, cached ones included."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all sequences, in any order."""
        ...


class RankQueue:
    """A queue by a rank that does not change while a sequence waits. Removal marks entries, which leave the heap when
    they come first."""

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._entries: dict[RequestId, tuple[int, Sequence, int]] = {}
        self._count = 0
        self.num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._count += 1
        num_tokens = sequence.num_tokens - sequence.num_computed
        self.num_tokens += num_tokens
        self._entries[sequence.request_id] = (self._count, sequence, num_tokens)
        heapq.heappush(self._heap, (self._rank(sequence), self._count, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue."""
        self.num_tokens -= self._entries.pop(sequence.request_id)[2]

    def first(self) -> Sequence | None:
        """Return the sequence with the lowest rank."""
        while self._heap:
            _, number, sequence = self._heap[0]
            if self._is_current(number, sequence):
                return sequence
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence, _ in self._entries.values())

    def _is_current(self, number: int, sequence: Sequence) -> bool:
        return self._entries.get(sequence.request_id, (0, None, 0))[0] == number


class ShortestFirstQueue(RankQueue):
    """A queue by a rank that may change while a sequence waits. The rank of the first sequence is recomputed until it
    is still the lowest. A sequence whose rank has decreased is found when it comes first by its earlier rank."""

    def first(self) -> Sequence | None:
        """Return the sequence with the lowest rank."""
        while (sequence := super().first()) is not None:
            rank = self._rank(sequence)
            if rank <= self._heap[0][0]:
                return sequence
            heapq.heapreplace(self._heap, (rank, self._heap[0][1], sequence))
        return None


class WeightedQueue(RankQueue):
    """A queue in which the classes that wait share admitted tokens in proportion to their weights (start-time fair
    queueing, Goyal et al., SIGCOMM 1996). A sequence costs its prompt and output tokens. A class that did not wait
    starts at the virtual time, which is the start time of the sequence that was admitted last, so that it gains
    nothing by its pause. A preempted sequence was charged before, and comes first."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(self._start)
        self._weights = weights
        self._virtual = 0
        self._ends: dict[int, int] = {}
        """Virtual end of the last sequence of each class that is ahead of the virtual time."""
        self._starts: dict[RequestId, int] = {}

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; the virtual time advances to its start."""
        super().remove(sequence)
        self._virtual = max(self._virtual, self._starts.pop(sequence.request_id))
        self._ends = {priority: end for priority, end in self._ends.items() if end > self._virtual}

    def _start(self, sequence: Sequence) -> Rank:
        if sequence.num_preemptions:
            start = self._virtual
        else:
            start = max(self._virtual, self._ends.get(sequence.priority, 0))
            cost = sequence.max_tokens_total
            self._ends[sequence.priority] = start + _UNITS * cost // self._weights.get(sequence.priority, 1)
        self._starts[sequence.request_id] = start
        return (start, 0 if sequence.num_preemptions else 1, sequence.arrival)


class TwoLevelQueue:
    """A queue with a staging, which is refilled in order of `outer` only when it is empty. A sequence that is staged is
    admitted before any later arrival is staged, which bounds its wait."""

    def __init__(self, outer: RankOf, inner: RankOf) -> None:
        self._waiting = RankQueue(outer)
        self._inner = inner
        self._staged: dict[RequestId, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. A preempted one was staged before, and is staged again."""
        if sequence.num_preemptions:
            self._staged[sequence.request_id] = sequence
        else:
            self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue."""
        if self._staged.pop(sequence.request_id, None) is None:
            self._waiting.remove(sequence)

    def first(self) -> Sequence | None:
        """Return the staged sequence with the lowest inner rank."""
        while not self._staged and (sequence := self._waiting.first()) is not None:
            while sequence is not None and len(self._staged) < STAGED:
                self._waiting.remove(sequence)
                self._staged[sequence.request_id] = sequence
                sequence = self._waiting.first()
        return min(self._staged.values(), key=self._inner, default=None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences that are not computed, cached ones included."""
        staged = sum(sequence.num_tokens - sequence.num_computed for sequence in self._staged.values())
        return self._waiting.num_tokens + staged

    def __len__(self) -> int:
        return len(self._waiting) + len(self._staged)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._staged.values()
        yield from self._waiting
