"""Flattened batch of a step: one row per scheduled token, with positions, slot mapping and block tables.

    slot of the token at position p  =  block_ids[p // B] * B  +  p % B

Positions restart in each sequence; only the block tables are padded.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT, PackedAdapter
from kvferry.engine.schedule.step.draft_tree import depths, paths
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan

Ints = npt.NDArray[np.int64]
_NO_ROWS = np.empty(0, dtype=np.int64)
_NO_SLOTS = np.empty((0, 0), dtype=np.int64)
_NO_TABLES = np.empty((0, 0, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ShownStates:
    """Hidden states that a head reads, for every row."""

    layers: tuple[int, ...] = ()
    """Layers whose inputs are read, concatenated; empty for the last hidden states, after the final norm."""


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Inputs of a step, int64 arrays on the host; models copy them to their device."""

    token_ids: Ints
    """[T]: input token of each row."""
    positions: Ints
    """[T]: position of each row in its sequence."""
    slots: Ints
    """[T]: KV slot to which each row's key and value are written."""
    queries: Ints
    """[sequences]: number of rows of each sequence, at least 1."""
    contexts: Ints
    """[sequences]: context length of each sequence after this step's writes."""
    block_tables: Ints
    """[sequences, maximum blocks]: page id of each block, padded with 0; -1 for pages behind a window."""
    sample_rows: Ints
    """[R]: indices of the rows whose logits are needed, in the order of the plan: the scored rows of each sequence,
    then its sampled rows, which are its last `num_sampled` rows."""
    hidden_rows: Ints = field(default_factory=lambda: _NO_ROWS)
    """[H]: indices of the rows whose hidden states are needed, in the order of the plan; empty in most steps."""
    tapped_layers: tuple[int, ...] = ()
    """Layers whose inputs are needed for all rows; empty if no head reads them."""
    adapter_of_row: Ints = field(default_factory=lambda: _NO_ROWS)
    """[T]: index of each row's adapter in `adapters`, -1 for none; empty if no rows have an adapter."""
    adapters: tuple[PackedAdapter, ...] = ()
    """The adapters of the step; kept here during the step, since a slot may get another adapter meanwhile."""
    further_slots: Ints = field(default_factory=lambda: _NO_SLOTS)
    """[groups - 1, T]: KV slot of each row in the pages of each further layer group."""
    further_tables: Ints = field(default_factory=lambda: _NO_TABLES)
    """[groups - 1, sequences, maximum blocks]: page id of each block; 0 for pages behind a window."""
    trees: Ints = field(default_factory=lambda: _NO_ROWS)
    """[sequences]: number of tokens at the end of each context that are a tree, its root included; 0 without a tree.
    Empty if no sequence has one."""
    paths: Ints = field(default_factory=lambda: _NO_ROWS)
    """[T]: tokens of the tree to which a row attends, as bits (`schedule.step.draft_tree`); empty if no sequence has a
    tree."""


def build_batch(
    plan: StepPlan,
    *,
    block_tokens: int,
    adapters: Mapping[int, PackedAdapter] = MappingProxyType({}),
    shown: ShownStates | None = None,
) -> StepBatch:
    """Build the arrays of a non-empty plan.

    Args:
        plan: the plan.
        block_tokens: tokens per page.
        adapters: adapters by slot, including the adapters of all of the plan's sequences.
        shown: hidden states of every row that a head reads; `None` without a head.

    Raises:
        InvariantBroken: a sequence has fewer pages or tokens than the plan needs.
    """
    batch = _built(plan.scheduled, block_tokens, adapters)
    if shown is None:
        return batch
    if shown.layers:
        return replace(batch, tapped_layers=shown.layers)
    return replace(batch, hidden_rows=np.arange(len(batch.token_ids)))


def _built(
    scheduled: tuple[ScheduledSequence, ...], block_tokens: int, adapters: Mapping[int, PackedAdapter]
) -> StepBatch:
    if all(s.num_scheduled == 1 and not s.parents for s in scheduled):
        return _one_row_each(scheduled, block_tokens, adapters)
    computed = np.array([s.num_computed for s in scheduled], dtype=np.int64)
    queries = np.array([s.num_scheduled for s in scheduled], dtype=np.int64)
    contexts = computed + queries
    needed: list[int] = (-(-contexts // block_tokens)).tolist()
    table = _table(scheduled, needed)
    ends = np.cumsum(queries)
    owner = np.repeat(np.arange(len(scheduled)), queries)
    positions = np.arange(int(ends[-1])) - np.repeat(ends - queries - computed, queries)
    slots = table[owner, positions // block_tokens] * block_tokens + positions % block_tokens
    tokens = [token for s in scheduled for token in s.token_ids[s.num_computed : s.num_computed + s.num_scheduled]]
    sampled = np.array([s.num_sampled for s in scheduled], dtype=np.int64)
    further = _further(scheduled, needed, owner, positions, block_tokens)
    return StepBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        slots=slots,
        queries=queries,
        contexts=contexts,
        block_tables=table,
        sample_rows=_with_scored(scheduled, ends)
        if any(s.num_scored for s in scheduled)
        else _last_rows(ends, sampled),
        hidden_rows=_pooled(scheduled, ends.tolist()),
        **_adapted(scheduled, queries, adapters),
        **further,
        **_trees(scheduled, positions),
    )


class _Trees(TypedDict, total=False):
    trees: Ints
    paths: Ints
    positions: Ints


def _trees(scheduled: tuple[ScheduledSequence, ...], places: Ints) -> _Trees:
    """Return the trees of a plan, and the positions of the rows of all sequences; nothing without trees.

    Args:
        scheduled: the plan's sequences.
        places: [T]: place of each row's token in its sequence.
    """
    if not any(s.parents for s in scheduled):
        return {"positions": places}
    positions, bits, first = places.copy(), np.zeros(len(places), np.int64), 0
    for s in scheduled:
        end = first + s.num_scheduled
        if s.parents:
            root = len(s.token_ids) - len(s.parents) - 1
            positions[first:end] = [root + depth for depth in depths(s.parents)[-s.num_scheduled :]]
            bits[first:end] = paths(s.parents)[-s.num_scheduled :]
        first = end
    sizes = [len(s.parents) + 1 if s.parents else 0 for s in scheduled]
    return {"trees": np.array(sizes, np.int64), "paths": bits, "positions": positions}


class _Adapted(TypedDict, total=False):
    adapter_of_row: Ints
    adapters: tuple[PackedAdapter, ...]


def _adapted(
    scheduled: tuple[ScheduledSequence, ...], queries: Ints | None, adapters: Mapping[int, PackedAdapter]
) -> _Adapted:
    """Return the adapters of a plan and the index of each row's adapter; nothing without adapters.

    Args:
        scheduled: the plan's sequences.
        queries: number of rows of each sequence; `None` for one row each.
        adapters: adapters by slot.
    """
    if not adapters:
        return {}
    used = sorted({s.adapter_slot for s in scheduled} - {NO_SLOT})
    if not used:
        return {}
    index = {slot: position for position, slot in enumerate(used)} | {NO_SLOT: -1}
    of_sequence = np.array([index[s.adapter_slot] for s in scheduled], dtype=np.int64)
    rows = of_sequence if queries is None else np.repeat(of_sequence, queries)
    return {"adapter_of_row": rows, "adapters": tuple(adapters[slot] for slot in used)}


class _Further(TypedDict, total=False):
    further_slots: Ints
    further_tables: Ints


def _further(
    scheduled: tuple[ScheduledSequence, ...], needed: list[int], owner: Ints, positions: Ints, block_tokens: int
) -> _Further:
    """Return slots and block tables of further layer groups; nothing with one group.

    Args:
        scheduled: the plan's sequences.
        needed: number of blocks of each sequence.
        owner: [T]: index of each row's sequence.
        positions: [T]: position of each row.
        block_tokens: tokens per page.
    """
    num_further = len(scheduled[0].further_ids)
    if not num_further:
        return {}
    tables = np.zeros((num_further, len(scheduled), max(needed)), dtype=np.int64)
    for row, (s, blocks) in enumerate(zip(scheduled, needed, strict=True)):
        for table, ids, first in zip(tables, s.further_ids, s.num_passed[1:], strict=True):
            table[row, first:blocks] = ids[first:blocks]
    slots = tables[:, owner, positions // block_tokens] * block_tokens + positions % block_tokens
    return {"further_slots": np.ascontiguousarray(slots), "further_tables": tables}


def _with_scored(scheduled: tuple[ScheduledSequence, ...], ends: Ints) -> Ints:
    """Return the indices of the scored and the sampled rows of each sequence."""
    rows: list[int] = []
    for s, end in zip(scheduled, ends.tolist(), strict=True):
        first = end - s.num_scheduled - s.num_computed
        rows += [first + position for position in s.scored_positions]
        rows += range(end - s.num_sampled, end)
    return np.array(rows, dtype=np.int64)


def pooled_rows(scheduled: tuple[ScheduledSequence, ...]) -> Ints:
    """Return the indices of the pooled rows of a step, in the order of the plan."""
    return _pooled(scheduled, list(itertools.accumulate(s.num_scheduled for s in scheduled)))


def _pooled(scheduled: tuple[ScheduledSequence, ...], ends: Sequence[int]) -> Ints:
    """Return the indices of the pooled rows of each sequence; a sequence's rows end before its entry in `ends`."""
    if not any(s.pooled_positions for s in scheduled):
        return _NO_ROWS
    rows: list[int] = []
    for s, end in zip(scheduled, ends, strict=True):
        first = end - s.num_scheduled - s.num_computed
        rows += [first + position for position in s.pooled_positions]
    return np.array(rows, dtype=np.int64)


def _last_rows(ends: Ints, counts: Ints) -> Ints:
    """Return row indices [R]: for each sequence, the last `counts` rows before its end in `ends`."""
    totals = np.cumsum(counts)
    return np.arange(int(totals[-1])) - np.repeat(totals - ends, counts)


def _one_row_each(
    scheduled: tuple[ScheduledSequence, ...], block_tokens: int, adapters: Mapping[int, PackedAdapter]
) -> StepBatch:
    """Build the arrays of a pure decode step from a few lists instead of a dozen small arrays. Such steps are the most
    frequent, and caches are cold after each step, so every numpy call takes several times longer than in a benchmark
    loop."""
    positions = [s.num_computed for s in scheduled]
    needed = [position // block_tokens + 1 for position in positions]
    table = _table(scheduled, needed)
    tokens = [s.token_ids[position] for s, position in zip(scheduled, positions, strict=True)]
    slots = slots_of(scheduled, positions, block_tokens)
    samples = [row for row, s in enumerate(scheduled) if s.num_sampled or s.num_scored]
    rows = np.array((tokens, positions, slots), dtype=np.int64)
    return StepBatch(
        token_ids=rows[0],
        positions=rows[1],
        slots=rows[2],
        queries=np.ones(len(scheduled), dtype=np.int64),
        contexts=rows[1] + 1,
        block_tables=table,
        sample_rows=np.array(samples, dtype=np.int64),
        hidden_rows=_pooled(scheduled, range(1, len(scheduled) + 1)),
        **_adapted(scheduled, None, adapters),
        **_further(scheduled, needed, np.arange(len(scheduled)), rows[1], block_tokens),
    )


def _table(scheduled: tuple[ScheduledSequence, ...], needed: list[int]) -> Ints:
    """Check the numbers of tokens and pages, and build the block tables [sequences, maximum blocks]."""
    check_room(scheduled, needed)
    table = np.zeros((len(scheduled), max(needed)), dtype=np.int64)
    for row, (s, blocks) in enumerate(zip(scheduled, needed, strict=True)):
        table[row, :blocks] = s.block_ids[:blocks]
    return table


def slots_of(
    scheduled: Sequence[ScheduledSequence], positions: Sequence[int], block_tokens: int, group: int = 0
) -> list[int]:
    """Return the KV slots of one token per sequence, at the given positions, in the pages of a layer group.

    Args:
        scheduled: the sequences of the step.
        positions: position of one token of each sequence.
        block_tokens: tokens per block.
        group: index of the layer group.
    """
    if group:
        return [
            s.further_ids[group - 1][position // block_tokens] * block_tokens + position % block_tokens
            for s, position in zip(scheduled, positions, strict=True)
        ]
    return [
        s.block_ids[position // block_tokens] * block_tokens + position % block_tokens
        for s, position in zip(scheduled, positions, strict=True)
    ]


def check_room(scheduled: Sequence[ScheduledSequence], needed: Sequence[int], on_device: Sequence[bool] = ()) -> None:
    """Check that every sequence has the tokens and pages required by a plan.

    Args:
        scheduled: the plan's sequences.
        needed: number of blocks of each sequence.
        on_device: whether each sequence's input token is on the device and need not be in `token_ids`; default: none.

    Raises:
        InvariantBroken: a sequence has too few tokens or pages.
    """
    for s, blocks, is_there in zip(scheduled, needed, on_device or [False] * len(needed), strict=True):
        end = s.num_computed + s.num_scheduled
        if s.num_scheduled < 1 or end > len(s.token_ids) + is_there or blocks > len(s.block_ids):
            raise InvariantBroken(
                f"request {s.request_id}: {s.num_scheduled} tokens scheduled after {s.num_computed}, of"
                f" {len(s.token_ids)} tokens and {len(s.block_ids)} pages"
            )
        if s.num_sampled + s.num_scored > s.num_scheduled:
            raise InvariantBroken(
                f"request {s.request_id}: cannot sample {s.num_sampled} rows and score {s.num_scored} of "
                f"{s.num_scheduled}"
            )
