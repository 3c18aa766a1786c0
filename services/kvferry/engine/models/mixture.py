"""Mixture of experts over torch tensors: rows sorted by expert, one product per matrix of each active expert."""

from collections.abc import Callable

import torch

from kvferry.engine.models.weights import MixtureOfExperts
from kvferry.model.config import Experts


def choose_experts(logits: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row.

    Args:
        logits: [T, experts], the router's outputs.
        experts: how many are chosen, and whether their weights are renormalized.

    Returns:
        (weights [T, active] float32, indices [T, active] int64).
    """
    weights, chosen = torch.topk(torch.softmax(logits.float(), dim=-1), experts.active, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if experts.renormalizes else weights, chosen


def mix(
    x: torch.Tensor, layer: MixtureOfExperts, experts: Experts, multiply_gate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute the weighted sum of each row's experts.

    Args:
        x: [T, hidden].
        layer: router and experts.
        experts: the model's experts.
        multiply_gate: activation of the gate half times the other half, [T, 2 n] to [T, n].

    Returns:
        [T, hidden]. A row's experts are added in the order of their indices, the shared expert last.
    """
    weights, chosen = choose_experts(layer.router(x), experts)
    order = torch.argsort(chosen.flatten(), stable=True)  # pairs of row and place, by expert
    rows, shares = order // experts.active, weights.flatten()[order].to(x.dtype)
    counts = torch.bincount(chosen.flatten(), minlength=experts.count).tolist()
    out = torch.zeros_like(x)
    first = 0
    for expert, count in zip(layer.experts, counts, strict=True):
        if count:
            at = slice(first, first + count)
            y = expert.down(multiply_gate(expert.gate_up(x[rows[at]])))
            out.index_add_(0, rows[at], y * shares[at, None])
            first += count
    if layer.shared is not None and layer.shared_gate is not None:
        y = layer.shared.down(multiply_gate(layer.shared.gate_up(x)))
        out += torch.sigmoid(layer.shared_gate(x)) * y
    return out
