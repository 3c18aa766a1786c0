"""Runs of decode steps that are planned and recorded at once.

While all sequences decode, none waits and pages are plentiful, consecutive steps are alike. They are passed to the
production scheduler as one step whose drafts are all accepted: it appends the same tokens to the same sequences, takes
as many pages and names the same blocks as in single steps. A test compares all times with a simulation of single steps.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, repeat

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import RequestId
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.speculation.speculation import Drafts, Speculation
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.simulator.worker.device import DeviceProfile

MAX_STEPS = 1024
"""Maximum number of steps of a run."""
MIN_STEPS = 3
"""Minimum number of steps of a run; shorter runs save no time."""


class KnownDrafts(Speculation):
    """Drafts of `length` tokens for every sequence. Their values have no effect, since all are accepted."""

    def __init__(self) -> None:
        self.length = 0

    def drafts(self, decoding: Iterable[Sequence], rows: int) -> Drafts:
        """Return drafts for all decoding sequences."""
        if not self.length:
            return {}
        draft = (0,) * self.length
        return {sequence.request_id: draft for sequence in decoding}

    def sources(self, request_id: RequestId, count: int) -> None:
        """Return nothing: the drafts are not drawn."""

    def parents(self, request_id: RequestId, count: int) -> tuple[int, ...]:
        """Return no parents: the drafts are chains."""
        return ()

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Do nothing, since drafts are not counted."""

    def forget(self, request_id: str) -> None:
        """Do nothing, since no state is kept."""


class DecodeRun:
    """A run of decode steps of the same sequences."""

    def __init__(self, start: float, num_sequences: int, kv_tokens: int, steps: int, profile: DeviceProfile) -> None:
        """
        Args:
            start: time of the first step's start.
            num_sequences: number of sequences of each step.
            kv_tokens: tokens whose KV the first step reads.
            steps: number of steps.
            profile: gives the duration of a step.
        """
        first = profile.step + profile.token * num_sequences + profile.kv_token * kv_tokens
        growth = profile.kv_token * num_sequences
        self.start = start
        self.ends = list(accumulate((first + growth * index for index in range(steps)), initial=start))[1:]
        """End of each step, seconds."""

    @property
    def end(self) -> float:
        """End of the last step, seconds."""
        return self.ends[-1]

    def cut(self, now: float) -> bool:
        """Drop the steps that have not begun; return whether there are any.

        Args:
            now: virtual time in seconds.
        """
        kept = next((index + 1 for index, end in enumerate(self.ends) if end >= now), len(self.ends))
        is_cut = kept < len(self.ends)
        del self.ends[kept:]
        return is_cut

    def gaps(self) -> list[float]:
        """Return the time from the end of each step to the end of the next, in seconds."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def num_steps(scheduler: Scheduler, running: Iterable[Sequence]) -> int:
    """Return the number of steps that can be planned at once: until the first sequence ends; 1 if the next step differs
    from later ones.

    Args:
        scheduler: the scheduler of the replica.
        running: its running sequences.
    """
    # If the batch is full, no sequence is admitted until one ends.
    may_admit = scheduler.num_waiting > 0 and scheduler.admission.has_slot
    if may_admit or scheduler.num_running > scheduler.limits.token_budget:
        return 1
    steps, count = MAX_STEPS, 0
    for sequence in running:
        if sequence.num_uncomputed != 1 or sequence.request.exports:
            return 1
        steps = min(steps, sequence.request.max_tokens_total - sequence.num_tokens)
        count += 1
    if not count:
        return 1
    allocator = scheduler.allocator
    # A sequence takes at most one page more than its steps fill; with drafts, one page per sequence must stay free.
    spare = allocator.pool.num_free // count - 3
    steps = min(steps, spare * allocator.block_tokens)
    return steps if steps >= MIN_STEPS else 1


def plan_run(scheduler: Scheduler, drafts: KnownDrafts, steps: int) -> StepPlan:
    """Plan `steps` decode steps of all running sequences as one.

    Args:
        scheduler: the scheduler of the replica, whose limits are changed during the call.
        drafts: the drafts of the scheduler's speculation.
        steps: number of steps, a result of `num_steps`.

    Raises:
        InvariantBroken: the scheduler planned something else.
    """
    limits, count = scheduler.limits, scheduler.num_running
    drafts.length = steps - 1
    # The budget bounds a single step, and none of these steps reaches it.
    scheduler.limits = replace(limits, token_budget=count * steps)
    try:
        plan = scheduler.schedule()
    finally:
        scheduler.limits, drafts.length = limits, 0
    if len(plan.scheduled) != count or any(map(int.__ne__, (s.num_scheduled for s in plan.scheduled), repeat(steps))):
        raise InvariantBroken(f"a run of {steps} steps of {count} sequences was planned differently")
    return plan
