"""Latent attention in torch (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1): absorbed decode rows, expanded chunks.

Pages have a latent vector per token: [rank], and the rotated part [R] of the key, which all heads share. In the
expanded form, keys and values of every head are computed from a sequence's vectors. In the absorbed form, the key
projection is applied to the queries instead, so that all heads attend to the vectors themselves, and the value
projection is applied to the results.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.kernels.batch import LatentUp
from kvferry.kernels.ops import AttentionPlan
from kvferry.kernels.torch_family.attention import Chunk, Group, Plan


def attend_latent(
    q: torch.Tensor, up: LatentUp, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """See `Ops.attend_latent`."""
    assert isinstance(plan, Plan)
    out = q.new_empty(q.shape[0], q.shape[1], up.values.shape[1])
    block_tokens, width = pages.shape[4], pages.shape[5]
    stretch = pages.view(-1, block_tokens * width)[layer:]  # the plan selects rows of layer 0
    for group in plan.groups:
        if group.rows is None:
            out = _attend_group(q, up, stretch, group, width, scale)
        else:
            out[group.rows] = _attend_group(q.index_select(0, group.rows), up, stretch, group, width, scale)
    for chunk in plan.chunks:
        vectors = stretch.index_select(0, chunk.page_rows).view(-1, width)[: chunk.context]
        span = slice(chunk.first, chunk.first + chunk.queries)
        out[span] = _attend_chunk(q[span], up, vectors, chunk, scale)
    return out.flatten(1)


def _attend_group(
    q: torch.Tensor, up: LatentUp, stretch: torch.Tensor, group: Group, width: int, scale: float
) -> torch.Tensor:
    """Compute the rows of a group, absorbed: q [sequences, H, plain + R] -> [sequences, H, value]."""
    gathered = stretch.index_select(0, group.page_rows)
    if group.beyond is not None:
        gathered.view(-1, width).index_fill_(0, group.beyond, 0)
    vectors = gathered.view(len(q), 1, -1, width)
    if group.context is not None:
        vectors = vectors[:, :, : group.context]
    rank = up.keys.shape[2]
    seen = F.scaled_dot_product_attention(
        _absorbed(q, up).unsqueeze(1), vectors, vectors[..., :rank], attn_mask=group.mask, scale=scale
    )
    return torch.einsum("thr,hvr->thv", seen.squeeze(1), up.values)


def _attend_chunk(q: torch.Tensor, up: LatentUp, vectors: torch.Tensor, chunk: Chunk, scale: float) -> torch.Tensor:
    """Compute the rows of a sequence: q [queries, H, plain + R], vectors [context, rank + R] -> [queries, H, value]."""
    _, plain, rank = up.keys.shape
    turned = vectors.shape[1] - rank
    is_causal = chunk.mask is None
    if expands(chunk.queries, chunk.context, plain=plain, turned=turned, rank=rank, value=up.values.shape[1]):
        latent = vectors[:, :rank]
        shared = vectors[:, rank:].expand(q.shape[1], -1, -1)
        keys = torch.cat((torch.einsum("cr,hpr->hcp", latent, up.keys), shared), dim=-1)
        values = torch.einsum("cr,hvr->hcv", latent, up.values)
        rows = q.transpose(0, 1)
        seen = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=chunk.mask, is_causal=is_causal, scale=scale
        )
        return seen.squeeze(0).transpose(0, 1)
    rows = _absorbed(q, up).transpose(0, 1)  # [H, queries, rank + R]
    keys = vectors.expand(1, 1, -1, -1)
    seen = F.scaled_dot_product_attention(
        rows[None], keys, keys[..., :rank], attn_mask=chunk.mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return torch.einsum("htr,hvr->thv", seen.squeeze(0), up.values)


def _absorbed(q: torch.Tensor, up: LatentUp) -> torch.Tensor:
    """Return queries for latent vectors: [T, H, plain + R] -> [T, H, rank + R]."""
    plain = up.keys.shape[1]
    return torch.cat((torch.einsum("thp,hpr->thr", q[..., :plain], up.keys), q[..., plain:]), dim=-1)


def expands(queries: int, context: int, *, plain: int, turned: int, rank: int, value: int) -> bool:
    """Return whether a sequence's attention takes fewer multiply-adds per head in the expanded than in the absorbed
    form.

    Args:
        queries: number of the sequence's rows in this step.
        context: context length of the sequence.
        plain: number of unrotated elements of a query.
        turned: number of rotated elements of a query.
        rank: number of elements of a latent vector.
        value: number of elements of a value head.
    """
    expanded = context * rank * (plain + value) + queries * context * (plain + turned + value)
    absorbed = queries * rank * (plain + value) + queries * context * (2 * rank + turned)
    return expanded < absorbed
