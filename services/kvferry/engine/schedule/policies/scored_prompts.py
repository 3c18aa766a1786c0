"""A queue that admits prompts with log-probabilities one at a time.

A step scores only some rows of prompts (`SchedulerLimits.max_scored_rows`), and the first such prompt takes all of them
until its end. A second one could only wait at the head of the queue and block all others, so it waits outside of it.
Where background sequences pause (`background`), they have a turn of their own, which holds up no others.
"""

from collections.abc import Callable, Iterator

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.policies.background import is_background
from kvferry.engine.schedule.policies.waiting_queue import WaitingQueue
from kvferry.engine.schedule.step.sequence import Sequence, SequenceState


class ScoredPromptsQueue:
    """`WaitingQueue` that wraps another queue and passes it at most one sequence whose prompt remains to be scored."""

    def __init__(
        self, queue: WaitingQueue, order: Callable[[Sequence], tuple[int, int]], *, has_background: bool
    ) -> None:
        """
        Args:
            queue: the queue of the policy.
            order: sort key of the sequences that wait outside of it.
            has_background: whether background sequences pause beside others.
        """
        self._has_background = has_background
        self._queue = queue
        self._order = order
        self._outside: dict[RequestId, Sequence] = {}
        self._current: dict[bool, Sequence] = {}
        """The sequence whose prompt is scored now or next, in the background and not; it may have been admitted, or
        have ended."""

    def add(self, sequence: Sequence) -> None:
        """Add a sequence."""
        turn = self._turn_of(sequence)
        if sequence.sampling.is_scoring and self._is_taken(turn) and sequence is not self._current[turn]:
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
        for turn in (False, True) if self._outside else ():
            if not self._is_taken(turn):
                waiting = [sequence for sequence in self._outside.values() if self._turn_of(sequence) is turn]
                if waiting:
                    sequence = min(waiting, key=self._order)
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

    def _turn_of(self, sequence: Sequence) -> bool:
        return self._has_background and is_background(sequence)

    def _is_taken(self, turn: bool) -> bool:
        current = self._current.get(turn)
        return current is not None and current.sampling.is_scoring and current.state is not SequenceState.FINISHED

    def _enter(self, sequence: Sequence) -> None:
        if sequence.sampling.is_scoring:
            self._current[self._turn_of(sequence)] = sequence
        self._queue.add(sequence)
