"""Tokens of rows that wish more than the most likely one, drawn where their logits are; nothing comes to the host."""

from collections.abc import Sequence

import numpy as np
import torch

from kvferry.engine.device_batch import to_device
from kvferry.engine.step import ScheduledSequence
from kvferry.engine.wishes import Ragged, lists_of, seed_of
from kvferry.kernels.ops import DeviceOps
from kvferry.kernels.rows_of_logits import Adjustments, Draws, TokenLists

NOT_FINITE, NONE_LEFT = -1, -2
"""In place of a token: a logit is not a finite number, or everything is banned."""


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """[R] int64: the highest of each row, the first among equals, or `NOT_FINITE`.

    Args:
        logits: [R, vocabulary] float32.
    """
    low, high = torch.aminmax(logits, dim=1)  # NaN comes through as the extreme
    return logits.argmax(dim=1).masked_fill(~(low.isfinite() & high.isfinite()), NOT_FINITE)


def draw(
    ops: DeviceOps, logits: torch.Tensor, best: torch.Tensor, sequences: Sequence[ScheduledSequence], rows: torch.Tensor
) -> torch.Tensor:
    """[N] int64: tokens of some rows, or `NOT_FINITE`, or `NONE_LEFT`.

    Args:
        ops: of the device.
        logits: [R, vocabulary] float32 of all rows.
        best: [R], what `most_likely` says of them.
        sequences: those that draw.
        rows: [N] int64, theirs.

    Raises:
        InvariantBroken: one has no seed.
    """
    device, own, count = logits.device, logits.index_select(0, rows), len(sequences)
    # A row for each wish, of an even length: Triton compiles a kernel anew where rows begin elsewhere than at 16 bytes.
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
    wishes = lists_of(sequences, logits.shape[1])
    if not wishes.is_empty:
        parts = (wishes.bias, wishes.seen, wishes.generated, wishes.banned)
        bias, seen, generated, banned = (_sent(part, device) for part in parts)
        own = ops.adjust_logits(own, Adjustments(bias, seen, generated, banned))
    tokens = ops.sample(own, Draws(temperature, top_k, top_p, min_p, seed, stream, position))
    if not wishes.is_empty:
        tokens = tokens.masked_fill(~own.amax(dim=1).isfinite(), NONE_LEFT)
    return tokens.masked_fill(best.index_select(0, rows) < 0, NOT_FINITE)


def _sent(part: Ragged | None, device: torch.device) -> TokenLists | None:
    if part is None:
        return None
    starts, ids, values = (to_device(torch.from_numpy(x), device) for x in (part.starts, part.ids, part.values))
    return TokenLists(starts, ids, values, part.longest)
