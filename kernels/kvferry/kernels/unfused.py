"""Unfused fallbacks: fused operations built from simple operations, for backends without fused kernels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from kvferry.kernels.batch import HeadNorms

_RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
_Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_WriteKv = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
_PlaceQkv = Callable[
    [torch.Tensor, HeadNorms | None, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None
]
_PlaceLatent = Callable[
    [torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None
]


def place_qkv_of(rms_norm: _RmsNorm, rotate: _Rotate, write_kv: _WriteKv) -> _PlaceQkv:
    """Build `Ops.place_qkv` from a backend's `rms_norm`, `rotate` and `write_kv`."""

    def place_qkv(
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
    ) -> None:
        kv_heads = pages.shape[3]
        heads = qkv.shape[1] - 2 * kv_heads
        queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if norms is not None:
            queries.copy_(rms_norm(queries, norms.query, norms.epsilon))
            keys.copy_(rms_norm(keys, norms.key, norms.epsilon))
        rotate(qkv[:, : heads + kv_heads], cos, sin)
        write_kv(qkv[:, heads:].view(len(qkv), 2, kv_heads, qkv.shape[2]), pages, layer, slots)

    return place_qkv


def place_latent_of(rms_norm: _RmsNorm, rotate: _Rotate, write_kv: _WriteKv) -> _PlaceLatent:
    """Build `Ops.place_latent` from a backend's `rms_norm`, `rotate` and `write_kv`."""

    def place_latent(
        vectors: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
    ) -> None:
        rank = len(norm)
        vectors[:, :rank] = rms_norm(vectors[:, :rank], norm, epsilon)
        rotate(vectors[:, None, rank:], cos, sin)
        write_kv(vectors[:, None, None], pages, layer, slots)

    return place_latent


def clamped_swiglu(gate_up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """Multiply g sigmoid(alpha g) of the first half of each row by u + 1 of the second half: [T, 2 n] to [T, n]. g is
    clamped to `limit` from above, u on both sides (OpenAI, gpt-oss model card, 2025, section 2.2).

    Args:
        gate_up: [T, 2 n], a floating-point dtype.
        alpha: factor of g in the sigmoid.
        limit: bound of the values, above 0.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Ops.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
