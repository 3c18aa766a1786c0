"""Latent attention of the torch decoder (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1): projections and their weights.

Per layer, with T rows:

    x -> (down, norm) -> queries [T, H, plain + rotated], whose last values are rotated
    x -> down -> vector [T, rank + rotated]: norm of the first values, rotation of the last -> page
"""

from dataclasses import dataclass

import torch

from kvferry.kernels.batch import LatentUp
from kvferry.kernels.ops import Linear, Ops
from kvferry.weights.config import Latent

EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, independent of the model's `rms_norm_eps`, as in transformers."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Parameters of a layer's latent attention, without the output projection."""

    query_down: Linear | None
    """[T, hidden] to [T, query rank]; `None` if queries are projected from the hidden state."""
    query_norm: torch.Tensor | None
    query: Linear
    """[T, query rank or hidden] to [T, H * (plain + rotated)]."""
    down: Linear
    """[T, hidden] to [T, rank + rotated]."""
    norm: torch.Tensor
    """Weight of the norm of vectors, [rank]."""
    up: LatentUp


@dataclass(frozen=True, slots=True, eq=False)
class LatentRows:
    """Places of a step's rows in the pages, and the angles of their positions."""

    pages: torch.Tensor
    layer: int
    slots: torch.Tensor
    cos: torch.Tensor
    """[T, rotated], as `Ops.rotate` expects it."""
    sin: torch.Tensor


def project(
    x: torch.Tensor, weights: LatentWeights, latent: Latent, heads: int, ops: Ops, at: LatentRows
) -> torch.Tensor:
    """Write the latent vectors of rows to their pages, and return the rows' queries.

    Args:
        x: [T, hidden], inputs of attention.
        weights: parameters of the layer.
        latent: sizes of the model's latent attention.
        heads: number of query heads.
        ops: operations of the kernel backend.
        at: see `LatentRows`.

    Returns:
        [T, heads, plain + rotated].
    """
    source = x
    if weights.query_down is not None and weights.query_norm is not None:
        source = ops.rms_norm(weights.query_down(x), weights.query_norm, EPSILON)
    queries = weights.query(source).view(len(x), heads, latent.plain + latent.rotated)
    ops.rotate(queries[..., latent.plain :], at.cos, at.sin)
    assert ops.place_latent is not None
    ops.place_latent(weights.down(x), weights.norm, EPSILON, at.cos, at.sin, at.pages, at.layer, at.slots)
    return queries
