"""A step plan as arrays: one flat row per scheduled token, and where each row's keys and values go.

    slot of the token at position p  =  block_ids[p // B] * B  +  p % B

Positions restart in each sequence; nothing is padded except the table of blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvferry.core.errors import InvariantBroken
from kvferry.engine.step import ScheduledSequence, StepPlan
from kvferry.kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A step's inputs on the model's device."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    attention: AttentionBatch
    sample_rows: torch.Tensor
    """[R] int64: the last rows of the sequences that sample, in the plan's order."""


def build_batch(plan: StepPlan, *, block_tokens: int, device: torch.device) -> StepBatch:
    """Arrays for a plan that is not empty.

    Raises:
        InvariantBroken: a sequence has fewer pages or tokens than the plan needs.
    """
    scheduled = plan.scheduled
    computed = np.array([s.num_computed for s in scheduled], dtype=np.int64)
    queries = np.array([s.num_scheduled for s in scheduled], dtype=np.int64)
    contexts = computed + queries
    needed = -(-contexts // block_tokens)
    _check(scheduled, needed.tolist())
    table = np.zeros((len(scheduled), int(needed.max())), dtype=np.int64)
    for row, (s, blocks) in enumerate(zip(scheduled, needed.tolist(), strict=True)):
        table[row, :blocks] = s.block_ids[:blocks]
    ends = np.cumsum(queries)
    owner = np.repeat(np.arange(len(scheduled)), queries)
    positions = np.arange(int(ends[-1])) - np.repeat(ends - queries - computed, queries)
    slots = table[owner, positions // block_tokens] * block_tokens + positions % block_tokens
    tokens = [token for s in scheduled for token in s.token_ids[s.num_computed : s.num_computed + s.num_scheduled]]
    samples = np.array([s.samples for s in scheduled], dtype=bool)
    return StepBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=AttentionBatch(queries, contexts, table, torch.from_numpy(slots).to(device)),
        sample_rows=torch.from_numpy(ends[samples] - 1).to(device),
    )


def _check(scheduled: tuple[ScheduledSequence, ...], needed: list[int]) -> None:
    for s, blocks in zip(scheduled, needed, strict=True):
        end = s.num_computed + s.num_scheduled
        if s.num_scheduled < 1 or end > len(s.token_ids) or blocks > len(s.block_ids):
            raise InvariantBroken(
                f"request {s.request_id}: {s.num_scheduled} tokens scheduled after {s.num_computed}, of"
                f" {len(s.token_ids)} tokens and {len(s.block_ids)} pages"
            )
