"""Draft tokens in the plan of a step: which sequences may have any, and pages for them. Pure.

A draft never displaces required work: a step with prompts has no drafts, and a draft's pages must be free in addition
to the pages of one block for each running sequence.
"""

from collections.abc import Callable, Collection

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.speculation.speculation import Drafts, Speculation
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import (
    DraftSources,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
    StepResult,
    is_decode,
)


class Drafting:
    """Plans the draft tokens of one scheduler's sequences; plans none without speculation."""

    def __init__(self, speculation: Speculation | None, allocator: Allocator) -> None:
        self.speculation = speculation
        self._allocator = allocator

    def plan(self, running: Collection[Sequence], *, may_admit: bool) -> Drafts:
        """Return the draft tokens of a step.

        Args:
            running: the running sequences.
            may_admit: whether the step may admit a waiting sequence.
        """
        if self.speculation is None or may_admit or not all(map(_decodes, running)):
            return {}
        return self.speculation.drafts(running, len(running))

    def has_drafts(self, running: Collection[Sequence]) -> bool:
        """Return whether drafts would be worth their rows after the step in flight, whose plan has none. A draft
        proposed now, before that step's tokens are known, is probably the beginning of the next step's draft; if drafts
        are worth it, the next step is therefore not launched ahead."""
        return self.speculation is not None and self.speculation.may_draft(running, len(running))

    def grow(self, sequence: Sequence, draft: tuple[int, ...], num_running: int) -> bool:
        """Allocate pages for the next token and a draft; `False` if there is no draft, or if running sequences may need
        the pages.

        Args:
            sequence: a decoding sequence.
            draft: its draft tokens.
            num_running: number of running sequences that may each need one more page per layer group.
        """
        if not draft:
            return False
        end = sequence.kv.num_computed + 1 + len(draft)
        needed = self._allocator.growth(sequence.kv.table, end)
        if needed and self._allocator.pool.num_free < needed + num_running * len(self._allocator.windows):
            return False
        return self._allocator.grow(sequence.kv.table, num_tokens=end)

    def verification(self, sequence: Sequence, draft: tuple[int, ...]) -> tuple[DraftSources | None, tuple[int, ...]]:
        """Return the distributions of a draft's tokens, if the rejection rule accepts them, otherwise `None`; and the
        parents of a tree's tokens, which are empty for a chain."""
        if not draft or self.speculation is None:
            return None, ()
        of_draft = self.speculation
        return of_draft.sources(sequence.request_id, len(draft)), of_draft.parents(sequence.request_id, len(draft))

    def verified(self, item: ScheduledSequence, output: SequenceOutput) -> None:
        """Count the draft of a sequence in a step, if it had one."""
        if self.speculation is not None and item.num_drafts:
            self.speculation.verified(item.num_drafts, len(output.tokens) - 1)

    def read(self, plan: StepPlan, result: StepResult, has_sequence: Callable[[ScheduledSequence], bool]) -> None:
        """See `Speculation.read`."""
        if self.speculation is not None:
            self.speculation.read(plan, result, has_sequence)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        if self.speculation is not None:
            self.speculation.observe(plan, seconds)

    def forget(self, request_id: RequestId) -> None:
        """Drop the state of a sequence that has ended. Idempotent."""
        if self.speculation is not None:
            self.speculation.forget(request_id)


def _decodes(sequence: Sequence) -> bool:
    return is_decode(sequence.num_uncomputed)
