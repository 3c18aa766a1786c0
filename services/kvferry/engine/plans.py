"""One sequence's share of a step: of the next one, and of the one after it while the next one's token is not known yet.

    tokens      [ p0 p1 p2 g0 ]                 N = 4, C = 3
    next step     computes g0, draws g1         launched
    one ahead     computes g1, draws g2         C = 4, and g1 is on the device alone

Only steps in which everybody decodes are planned ahead, and only while it does not matter what the drawn tokens are:
who stops with one is found out later, and the step ahead was for nothing then.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvferry.core.ids import RequestId
from kvferry.engine.allocation import Allocator
from kvferry.engine.sequence import Sequence
from kvferry.engine.step import ScheduledSequence, StepPlan
from kvferry.engine.wishes import Way, reads_tokens, way_of


def share(sequence: Sequence, count: int) -> ScheduledSequence:
    """The next `count` tokens of a sequence."""
    return ScheduledSequence(
        request_id=sequence.request_id,
        token_ids=sequence.tokens,
        num_prompt=sequence.num_prompt,
        num_computed=sequence.num_computed,
        num_scheduled=count,
        block_ids=sequence.table.blocks,
        samples=sequence.num_computed + count == sequence.num_tokens,
        sampling=sequence.sampling,
        sample_index=sequence.sample_index,
        banned_token_ids=sequence.banned_now(),
        table_version=sequence.table.version,
    )


def one_ahead(plan: StepPlan, known: Mapping[RequestId, Sequence], allocator: Allocator) -> StepPlan | None:
    """The step after a plan that is under way; `None`: its tokens must be known first, or pages are short.

    Tables may have grown by a page each, whatever the answer; the next step takes it.

    Args:
        plan: everything that runs.
        known: sequences by request.
        allocator: gives pages, and takes none back for this.
    """
    shares: list[ScheduledSequence] = []
    for item in plan.scheduled:
        sequence = known.get(item.request_id)
        if sequence is None or not is_same(sequence, item) or not _goes_on_anyway(sequence, item):
            return None
        end = item.num_computed + item.num_scheduled
        if allocator.grow(sequence.table, num_computed=end, num_tokens=end + 1) != []:
            return None
        banned = sequence.banned_after(1)
        shares.append(replace(share(sequence, 1), num_computed=end, samples=True, banned_token_ids=banned))
    return StepPlan(tuple(shares))


def is_same(sequence: Sequence, item: ScheduledSequence) -> bool:
    """Whether a share is of this very sequence: its name may have come back, and its pages may be others by now."""
    return sequence.table.version == item.table_version


def _goes_on_anyway(sequence: Sequence, item: ScheduledSequence) -> bool:
    """Whether a sequence needs a token more whatever it draws, but for one that stops it."""
    end = item.num_computed + item.num_scheduled
    is_decoding = item.samples and end == sequence.num_tokens
    is_free = not reads_tokens(item) and way_of(item) is not Way.HOST
    is_ours = not sequence.exports and not sequence.keeps
    return is_decoding and is_free and is_ours and end + 1 < sequence.max_tokens_total
