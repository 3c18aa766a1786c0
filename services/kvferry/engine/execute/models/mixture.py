"""Mixture of experts over torch tensors: rows are sorted by expert, then each active expert's matrices are applied one
by one, or all experts' at once by `Ops.run_experts`."""

from collections.abc import Callable, Sequence

import torch

from kvferry.engine.execute.models.weights import MixtureOfExperts, Mlp
from kvferry.kernels.batch import ExpertWeights
from kvferry.kernels.ops import Ops
from kvferry.weights.config import Experts, Scoring

_Gate = Callable[[torch.Tensor], torch.Tensor]
_MIN_SUM = 1e-20
"""Lower bound of the sum of active experts' weights; sigmoids of very negative outputs may all be 0."""


def choose_experts(
    logits: torch.Tensor, experts: Experts, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row.

    Args:
        logits: [T, experts], the router's outputs.
        experts: how many experts are chosen, from which groups, and how they are weighted.
        correction: [experts], added to the scores when experts are chosen, but not in their weights; `None` for none.

    Returns:
        (weights [T, active] float32, indices [T, active] int64).
    """
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if experts.scoring is Scoring.SOFTMAX else torch.sigmoid(wide)
    keys = scores if correction is None else scores + correction
    if experts.active_groups < experts.groups:
        keys = _of_best_groups(keys, experts)
    chosen = torch.topk(keys, experts.active, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=_MIN_SUM)
    return weights * experts.weight_scale, chosen


def _of_best_groups(keys: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Replace the sort keys [T, experts] of experts outside the best groups by minus infinity. A group's key is the
    largest key of its experts or, with a sigmoid, the sum of the two largest."""
    parts = keys.view(len(keys), experts.groups, -1)
    best = parts.topk(2, dim=-1).values.sum(-1) if experts.scoring is Scoring.SIGMOID else parts.amax(-1)
    groups = torch.topk(best, experts.active_groups, dim=-1).indices
    is_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, groups, value=False)
    return parts.masked_fill(is_out[..., None], float("-inf")).flatten(1)


def mix(x: torch.Tensor, layer: MixtureOfExperts, experts: Experts, multiply_gate: _Gate, ops: Ops) -> torch.Tensor:
    """Compute the weighted sum of each row's experts.

    Args:
        x: [T, hidden].
        layer: router and experts.
        experts: the model's experts.
        multiply_gate: activation of the gate half times the other half, [T, 2 n] to [T, n].
        ops: operations of the kernel backend.

    Returns:
        [T, hidden]. The shared expert is added last.
    """
    weights, chosen = choose_experts(layer.router(x), experts, layer.correction)
    if isinstance(layer.experts, ExpertWeights):
        assert ops.run_experts is not None
        out = ops.run_experts(x, chosen, weights, layer.experts, multiply_gate)
    else:
        out = _one_by_one(x, chosen, weights, layer.experts, multiply_gate)
    if layer.shared is not None:
        y = layer.shared.down(multiply_gate(layer.shared.gate_up(x)))
        out += y if layer.shared_gate is None else torch.sigmoid(layer.shared_gate(x)) * y
    return out


def _one_by_one(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Sequence[Mlp], multiply_gate: _Gate
) -> torch.Tensor:
    """Compute the weighted sum of each row's experts, [T, hidden], in the order of their indices. The number of rows of
    each expert is read back to the host."""
    order = torch.argsort(chosen.flatten(), stable=True)  # pairs of row and rank, by expert
    rows, shares = order // chosen.shape[1], weights.flatten()[order].to(x.dtype)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    out = torch.zeros_like(x)
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            at = slice(first, first + count)
            y = expert.down(multiply_gate(expert.gate_up(x[rows[at]])))
            out.index_add_(0, rows[at], y * shares[at, None])
            first += count
    return out
