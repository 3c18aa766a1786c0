"""Lookahead planning (asynchronous scheduling): plans the step after the running one, before its tokens are known.

    tokens      [ p0 p1 p2 g0 ]                 N = 4, C = 3
    next step     computes g0, samples g1       launched
    one ahead     computes g1, samples g2       C = 4, and g1 exists only on the device

Only pure decode steps are planned ahead. A sequence that is certain to end with the running step takes no part. If a
sampled token stops a sequence, or a late mask postpones its token, the sequence's part of the step ahead is discarded.
The mask of a constrained sequence is computed while the kernels of the step ahead run, as soon as the previous token is
recorded. The runner decides whether it can compute the step before its input tokens are on the host
(`pipeline.PipelinedRunner`).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import replace

from kvferry.core.ids import RequestId
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.step.prompt_pooling import NO_ROWS
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.step import DraftSources, ScheduledSequence, StepPlan
from kvferry.engine.schedule.step.token_mask import TokenMask

MAX_AHEAD = 8
"""Maximum number of consecutive steps without an attempt to admit a waiting sequence while no sequence arrives or ends:
other events, such as the end of a store, free pages too."""


def share(
    sequence: Sequence,
    count: int,
    draft: tuple[int, ...] = (),
    sources: DraftSources | None = None,
    parents: tuple[int, ...] = (),
) -> ScheduledSequence:
    """Schedule the next tokens of a sequence.

    Args:
        sequence: the sequence.
        count: number of its own tokens to schedule.
        draft: draft tokens, which follow the sequence's last token; empty without a draft.
        sources: distributions of the draft tokens, for the rejection rule; `None` if drafts are accepted by equality.
        parents: row of each draft token's parent in a tree; empty for a chain.
    """
    request, kv, sampling = sequence.request, sequence.kv, sequence.sampling
    table, num_computed = kv.table, kv.num_computed
    tokens, mask, pooling = sampling.tokens, sampling.mask, sampling.pooling
    masks: Tokens[TokenMask] = ()
    num_sampled = 1 if pooling is None and num_computed + count == len(tokens) else 0
    if draft:
        masks = mask.after_each(draft) if mask is not None else ()
        num_sampled = 1 + len(draft)
    return ScheduledSequence(
        request_id=sequence.request_id,
        token_ids=[*tokens, *draft] if draft else tokens,
        num_prompt=request.num_prompt,
        num_computed=num_computed,
        num_scheduled=count + len(draft),
        block_ids=table.blocks,
        num_sampled=num_sampled,
        sampling=request.sampling,
        sample_index=request.sample_index,
        banned_token_ids=sampling.banned_after(0),
        table_version=table.version,
        mask=mask,
        draft_masks=masks,
        num_scored=sampling.scored_in(num_computed, count),
        pooled_positions=NO_ROWS if pooling is None else pooling.positions(num_computed, count),
        adapter_slot=sequence.adapter_slot,
        further_ids=table.further,
        num_passed=table.passed,
        draft_sources=sources,
        parents=parents,
    )


def one_ahead(plan: StepPlan, known: Mapping[RequestId, Sequence], allocator: Allocator) -> StepPlan | None:
    """Plan the step after a step in flight; return `None` if that step's results must be known first, too few pages
    are free, a page must be copied, or no sequence continues.

    Even then, block tables may have grown by one page each, which the next step uses.

    Args:
        plan: the step in flight, with all running sequences, and possibly others that have ended.
        known: the scheduler's sequences, by request.
        allocator: allocates pages; never preempts a sequence.
    """
    shares: list[ScheduledSequence] = []
    for item in plan.scheduled:
        sequence = known.get(item.request_id)
        if sequence is None or not is_same(sequence, item):
            continue
        end = item.num_computed + item.num_scheduled
        if item.num_sampled != 1 or end != sequence.num_tokens:
            return None
        if sequence.request.exports or end + 1 >= sequence.request.max_tokens_total:
            continue  # it ends with the step in flight
        if not allocator.grow(sequence.kv.table, num_tokens=end + 1):
            return None
        mask = sequence.sampling.mask
        mask = None if mask is None else mask.following()
        banned = sequence.sampling.banned_after(1)
        shares.append(
            replace(
                share(sequence, 1), num_computed=end, num_sampled=1, banned_token_ids=banned, mask=mask, num_scored=0
            )
        )
    return StepPlan(tuple(shares)) if shares else None


def is_same(sequence: Sequence, item: ScheduledSequence) -> bool:
    """Return whether a scheduled item belongs to this sequence. It does not if it belongs to an earlier one with the
    same request id, or if it was planned ahead of a token that was not sampled because its mask was late."""
    is_stale = sequence.sampling.is_postponed and item.num_computed > sequence.kv.num_computed
    return sequence.kv.table.version == item.table_version and not is_stale
