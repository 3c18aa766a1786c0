"""A queue that admits prompts with log-probabilities one at a time.

A step scores only some rows of prompts (`SchedulerLimits.max_scored_rows`), and the first such prompt takes all of them
until its end. A second one could only wait at the head of the queue and block all others, so it waits outside of it.
"""

from collections.abc import Callable, Iterator

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.policies.waiting_queue import WaitingQueue
from kvferry.engine.schedule.step.sequence import Sequence, SequenceState


class ScoredPromptsQueue:
    """`WaitingQueue` that wraps another queue and passes it at most one sequence whose prompt remains to be scored."""

    def __init__(self, queue: WaitingQueue, order: Callable[[Sequence], tuple[int, int]]) -> None:
        """
        Args:
            queue: the queue of the policy.
            order: sort key of the sequences that wait outside of it.
        """
        self._queue = queue
        self._order = order
        self._outside: dict[RequestId, Sequence] = {}
        self._current: Sequence | None = None
        """The sequence whose prompt is scored now or next; it may have been admitted, or have ended."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence."""
        if sequence.sampling.is_scoring and self._is_taken and sequence is not self._current:
            self._outside[sequence.request_id] = sequence
        else:
            self._enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue."""
        if self._outside.pop(sequence.request_id, None) is None:
            self._queue.remove(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """See `WaitingQueue.set_aside`."""
        self._queue.set_aside(sequence)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next."""
        if self._outside and not self._is_taken:
            sequence = min(self._outside.values(), key=self._order)
            del self._outside[sequence.request_id]
            self._enter(sequence)
        return self._queue.first()

    @property
    def num_tokens(self) -> int:
        """Number of uncomputed tokens of all sequences, including cached tokens."""
        outside = sum(sequence.num_uncomputed for sequence in self._outside.values())
        return self._queue.num_tokens + outside

    def __len__(self) -> int:
        return len(self._queue) + len(self._outside)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queue
        yield from self._outside.values()

    @property
    def _is_taken(self) -> bool:
        current = self._current
        return current is not None and current.sampling.is_scoring and current.state is not SequenceState.FINISHED

    def _enter(self, sequence: Sequence) -> None:
        if sequence.sampling.is_scoring:
            self._current = sequence
        self._queue.add(sequence)
