"""Scheduling policies by name.

| policy    | admits next                                     | preempts first             | use it for             |
| --------- | ----------------------------------------------- | -------------------------- | ---------------------- |
| fcfs      | the earliest arrival                            | the latest arrival         | a predictable order    |
| priority  | the lowest number, then the earliest arrival    | the highest number, latest | classes of requests    |
| srtf      | the fewest remaining tokens                     | the latest arrival         | the lowest mean TTFT   |
| two-level | the fewest remaining tokens of eight arrivals   | the latest arrival         | short waits, no        |
|           |                                                 |                            | starvation             |
| weighted  | a class by its share, then the earliest arrival | the latest arrival         | shares of classes      |

With `priority`, a waiting request takes the place of a running one with a higher number. `srtf` (shortest remaining
time first) lets a steady stream of short prompts delay a long one without a bound. `srtf` and `two-level` compare
priorities before remaining tokens (Kwon, "vLLM: an efficient inference engine for large language models", 2025,
section 4.5). With `weighted`, priorities that have waiting sequences share admitted tokens in proportion to
`class_weights`. All others treat the lowest priority as the background (`background`): its sequences come after all
others, and are displaced by them.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as OrderedView
from dataclasses import dataclass

from kvferry.core.errors import UsageError
from kvferry.core.settings.class_weights import Weights
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.policies.background import is_background
from kvferry.engine.schedule.policies.waiting_queue import (
    RankQueue,
    ShortestFirstQueue,
    TwoLevelQueue,
    WaitingQueue,
    WeightedQueue,
)
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import ScheduledSequence

Remaining = Callable[[Sequence], int]
"""Function that returns the number of tokens of a sequence that are neither computed nor cached."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """A scheduling policy: a queue of waiting sequences, and decisions about running ones."""

    name: str
    make_queue: Callable[[Remaining, Weights], WaitingQueue]
    """Creates the queue of one scheduler from a function that counts the tokens of a waiting sequence that are neither
    computed nor cached, and the weights by priority."""
    has_classes: bool = False
    """Whether priorities are compared before anything else."""
    is_shortest_first: bool = False
    """Whether sequences with fewer remaining tokens are computed first, waiting or running."""
    displaces: bool = False
    """Whether a waiting sequence displaces a running one of lower priority."""
    has_background: bool = True
    """Whether sequences of the lowest priority come after all others and pause beside them."""

    @property
    def mixes(self) -> bool:
        """Whether a waiting sequence may get tokens of a step before a running prompt."""
        return self.has_classes or self.is_shortest_first

    def background_period(self, limits: SchedulerLimits) -> int:
        """Return in one of how many steps beside others background sequences take part; 1 if they never pause."""
        return limits.background_steps if self.has_background else 1

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Return the sort key of running sequences; the last one is preempted first."""
        if self.has_classes:
            return (sequence.request.priority, sequence.arrival)
        return (int(self.has_background and is_background(sequence)), sequence.arrival)

    def by_turn(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the running sequences in the order in which a step's token budget is given to them.

        Args:
            running: the running sequences, sorted by `order`.
        """
        if not self.is_shortest_first:
            return list(running)
        return sorted(running, key=lambda s: s.num_uncomputed)

    def victim(self, running: OrderedView[Sequence], planned: Iterable[ScheduledSequence]) -> Sequence:
        """Return the sequence to preempt: the last one by `order` that is not planned in this step.

        Args:
            running: running sequences by `order`; at least one is not planned.
            planned: sequences that the step has planned so far.
        """
        scheduled = {item.request_id for item in planned}
        return next(s for s in reversed(running) if s.request_id not in scheduled)

    def precedes(self, waiting: Sequence, num_remaining: int, running: Sequence) -> bool:
        """Return whether a waiting sequence gets tokens of a step before a running prompt.

        Args:
            waiting: the first sequence in the queue.
            num_remaining: number of its tokens that are neither computed nor cached.
            running: a running sequence.
        """
        left = running.num_uncomputed
        if left <= 1:  # decodes are never delayed
            return False
        if self.has_classes and waiting.request.priority != running.request.priority:
            return waiting.request.priority < running.request.priority
        return self.is_shortest_first and num_remaining < left

    def displaced(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether a waiting sequence displaces a running one."""
        is_lower = waiting.request.priority < running.request.priority
        return is_lower and (self.displaces or (self.has_background and is_background(running)))


def _arrival(sequence: Sequence) -> tuple[int, ...]:
    return (int(is_background(sequence)), sequence.arrival)


def _class(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, sequence.arrival)


def _shortest(remaining: Remaining) -> Callable[[Sequence], tuple[int, ...]]:
    return lambda sequence: (sequence.request.priority, remaining(sequence), sequence.arrival)


POLICIES: Mapping[str, SchedulingPolicy] = {
    policy.name: policy
    for policy in (
        SchedulingPolicy("fcfs", lambda *_: RankQueue(_arrival)),
        SchedulingPolicy("priority", lambda *_: RankQueue(_class), has_classes=True, displaces=True),
        SchedulingPolicy(
            "srtf",
            lambda remaining, _: ShortestFirstQueue(_shortest(remaining)),
            has_classes=True,
            is_shortest_first=True,
        ),
        SchedulingPolicy(
            "two-level",
            lambda remaining, _: TwoLevelQueue(_class, _shortest(remaining)),
            has_classes=True,
            is_shortest_first=True,
        ),
        SchedulingPolicy("weighted", lambda _, weights: WeightedQueue(weights), has_background=False),
    )
}
"""All policies by name."""


def policy_of(name: str) -> SchedulingPolicy:
    """Return a policy.

    Raises:
        UsageError: the name is unknown.
    """
    if name not in POLICIES:
        raise UsageError(f"unknown scheduling {name!r}; expected one of {', '.join(POLICIES)}", field="scheduling")
    return POLICIES[name]
