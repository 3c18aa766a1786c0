"""Sampling on the device, for rows that are not purely greedy; logits are not copied to the host."""

from collections.abc import Sequence

import numpy as np
import torch

from kvferry.engine.execute.tensors.device_batch import to_device
from kvferry.engine.schedule.step.sampling_plan import Ragged, lists_of, seed_of
from kvferry.engine.schedule.step.step import ScheduledSequence
from kvferry.kernels.logit_rows import Adjustments, Draws, TokenLists
from kvferry.kernels.ops import DeviceOps

NOT_FINITE, NONE_LEFT = -1, -2
"""Error codes returned instead of a token id: a logit is not finite; all tokens are banned."""


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Return the greedy tokens, [R] int64: the argmax of each row, the lowest id on a tie, or `NOT_FINITE`.

    Args:
        logits: [R, vocabulary] float32.
    """
    low, high = torch.aminmax(logits, dim=1)  # NaN propagates to the extremes
    return logits.argmax(dim=1).masked_fill(~(low.isfinite() & high.isfinite()), NOT_FINITE)


def draw(
    ops: DeviceOps, logits: torch.Tensor, best: torch.Tensor, sequences: Sequence[ScheduledSequence], rows: torch.Tensor
) -> torch.Tensor:
    """Sample tokens for some rows; return [N] int64 token ids, `NOT_FINITE` or `NONE_LEFT`.

    Args:
        ops: the device's kernels.
        logits: [R, vocabulary] float32 of all rows.
        best: [R] int64, the result of `most_likely`.
        sequences: the N sequences that sample.
        rows: [N] int64, index of each sequence's row in `logits`.

    Raises:
        InvariantBroken: a sequence has no seed.
    """
    device, own, count = logits.device, logits.index_select(0, rows), len(sequences)
    # One row per parameter; the row length is even, since Triton recompiles a kernel for pointers that are not 16-byte
    # aligned.
    numbers = np.zeros((7, count + count % 2), np.int64)
    numbers[:4, :count] = np.array(
        [(s.sampling.top_k, seed_of(s), s.sample_index, s.num_computed + s.num_scheduled) for s in sequences], np.int64
    ).T
    numbers.view(np.float64)[4:, :count] = np.array(
        [(s.sampling.temperature, s.sampling.top_p, s.sampling.min_p) for s in sequences]
    ).T
    sent = to_device(torch.from_numpy(numbers), device)[:, :count]
    top_k, seed, stream, position = sent[:4].unbind()
    temperature, top_p, min_p = sent[4:].view(torch.float64).unbind()
    lists = lists_of(sequences, logits.shape[1])
    if not lists.is_empty:
        parts = (lists.bias, lists.seen, lists.generated, lists.banned)
        bias, seen, generated, banned = (_sent(part, device) for part in parts)
        own = ops.adjust_logits(own, Adjustments(bias, seen, generated, banned))
    tokens = ops.sample(own, Draws(temperature, top_k, top_p, min_p, seed, stream, position))
    if not lists.is_empty:
        tokens = tokens.masked_fill(~own.amax(dim=1).isfinite(), NONE_LEFT)
    return tokens.masked_fill(best.index_select(0, rows) < 0, NOT_FINITE)


def _sent(part: Ragged | None, device: torch.device) -> TokenLists | None:
    if part is None:
        return None
    starts, ids, values = (to_device(torch.from_numpy(x), device) for x in (part.starts, part.ids, part.values))
    return TokenLists(starts, ids, values, part.longest)
