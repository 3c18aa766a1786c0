"""A step plan as arrays: one flat row per scheduled token, and where each row's keys and values go.

    slot of the token at position p  =  block_ids[p // B] * B  +  p % B

Positions restart in each sequence; nothing is padded except the table of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.engine.step import ScheduledSequence, StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A step's inputs, on the host: whoever computes moves what it needs to where it computes."""

    token_ids: Ints
    """[T]."""
    positions: Ints
    """[T]."""
    slots: Ints
    """[T]: where each row's key and value are written."""
    queries: Ints
    """[sequences]: rows of each, at least 1."""
    contexts: Ints
    """[sequences]: tokens of each in pages after this step's writes."""
    block_tables: Ints
    """[sequences, most blocks of any]: page of each block; rows that need fewer are filled with 0."""
    sample_rows: Ints
    """[R]: the last rows of the sequences that sample, in the plan's order."""


def build_batch(plan: StepPlan, *, block_tokens: int) -> StepBatch:
    """Arrays for a plan that is not empty.

    Raises:
        InvariantBroken: a sequence has fewer pages or tokens than the plan needs.
    """
    scheduled = plan.scheduled
    if all(s.num_scheduled == 1 for s in scheduled):
        return _one_row_each(scheduled, block_tokens)
    computed = np.array([s.num_computed for s in scheduled], dtype=np.int64)
    queries = np.array([s.num_scheduled for s in scheduled], dtype=np.int64)
    contexts = computed + queries
    needed = -(-contexts // block_tokens)
    table = _table(scheduled, needed.tolist())
    ends = np.cumsum(queries)
    owner = np.repeat(np.arange(len(scheduled)), queries)
    positions = np.arange(int(ends[-1])) - np.repeat(ends - queries - computed, queries)
    slots = table[owner, positions // block_tokens] * block_tokens + positions % block_tokens
    tokens = [token for s in scheduled for token in s.token_ids[s.num_computed : s.num_computed + s.num_scheduled]]
    samples = np.array([s.samples for s in scheduled], dtype=bool)
    return StepBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=positions,
        slots=slots,
        queries=queries,
        contexts=contexts,
        block_tables=table,
        sample_rows=ends[samples] - 1,
    )


def _one_row_each(scheduled: tuple[ScheduledSequence, ...], block_tokens: int) -> StepBatch:
    """The same for a step that only decodes, which is most of them: a few lists instead of a dozen small arrays. What
    streams through the caches between two steps makes every call here several times as dear as in a loop."""
    positions = [s.num_computed for s in scheduled]
    table = _table(scheduled, [position // block_tokens + 1 for position in positions])
    tokens = [s.token_ids[position] for s, position in zip(scheduled, positions, strict=True)]
    slots = slots_of(scheduled, positions, block_tokens)
    samples = [row for row, s in enumerate(scheduled) if s.samples]
    rows = np.array((tokens, positions, slots), dtype=np.int64)
    return StepBatch(
        token_ids=rows[0],
        positions=rows[1],
        slots=rows[2],
        queries=np.ones(len(scheduled), dtype=np.int64),
        contexts=rows[1] + 1,
        block_tables=table,
        sample_rows=np.array(samples, dtype=np.int64),
    )


def _table(scheduled: tuple[ScheduledSequence, ...], needed: list[int]) -> Ints:
    """[sequences, most blocks of any], after a check that there are so many tokens and pages."""
    check_room(scheduled, needed)
    table = np.zeros((len(scheduled), max(needed)), dtype=np.int64)
    for row, (s, blocks) in enumerate(zip(scheduled, needed, strict=True)):
        table[row, :blocks] = s.block_ids[:blocks]
    return table


def slots_of(scheduled: Sequence[ScheduledSequence], positions: Sequence[int], block_tokens: int) -> list[int]:
    """Where a token of each goes, at these positions."""
    return [
        s.block_ids[position // block_tokens] * block_tokens + position % block_tokens
        for s, position in zip(scheduled, positions, strict=True)
    ]


def check_room(scheduled: Sequence[ScheduledSequence], needed: Sequence[int], on_device: Sequence[bool] = ()) -> None:
    """Every sequence has the tokens and the pages that a plan takes for granted.

    Args:
        scheduled: of the plan.
        needed: blocks of each.
        on_device: whether the device has the token that each goes on with, so that the host need not; empty: of none.

    Raises:
        InvariantBroken: one has fewer.
    """
    for s, blocks, is_there in zip(scheduled, needed, on_device or [False] * len(needed), strict=True):
        end = s.num_computed + s.num_scheduled
        if s.num_scheduled < 1 or end > len(s.token_ids) + is_there or blocks > len(s.block_ids):
            raise InvariantBroken(
                f"request {s.request_id}: {s.num_scheduled} tokens scheduled after {s.num_computed}, of"
                f" {len(s.token_ids)} tokens and {len(s.block_ids)} pages"
            )
