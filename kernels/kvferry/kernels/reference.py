"""Every operation in plain torch, written to be read: the definition that the fast families are tested against.

Each works in whatever precision its inputs have, so the same code in float64 and in the low precision tells how
much error is fair.
"""

import torch

from kvferry.kernels.batch import AttentionBatch
from kvferry.kernels.ops import AttentionPlan, Linear, Ops


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    def project(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight.T
        return y if bias is None else y + bias

    return project


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[token_ids]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed * weight).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    residual.copy_(residual + x)
    return rms_norm(residual, weight, epsilon)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    x.copy_(x * cos[:, None, :] + swapped * sin[:, None, :])


def write_kv(kv: torch.Tensor, pages: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    block_tokens = pages.shape[4]
    for row, slot in enumerate(slots.tolist()):
        pages[slot // block_tokens, layer, :, :, slot % block_tokens] = kv[row]


def plan_attention(batch: AttentionBatch, pages: torch.Tensor) -> AttentionPlan:
    return batch


def paged_attention(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    assert isinstance(plan, AttentionBatch)
    block_tokens, outputs, first = pages.shape[4], [], 0
    for queries, context, table in zip(plan.queries.tolist(), plan.contexts.tolist(), plan.block_tables, strict=True):
        places = torch.arange(context)
        page = torch.as_tensor(table)[places // block_tokens]
        kv = pages[page, layer, :, :, places % block_tokens]  # [context, 2, K, D]
        rows = q[first : first + queries]
        group = q.shape[1] // kv.shape[2]
        keys, values = kv[:, 0].repeat_interleave(group, dim=1), kv[:, 1].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,chd->hqc", rows, keys) * scale
        seen = places[None, :] <= torch.arange(context - queries, context)[:, None]
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        outputs.append(torch.einsum("hqc,chd->qhd", weights, values).flatten(1))
        first += queries
    return torch.cat(outputs)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x[rows]


OPS = Ops(
    name="reference",
    pack_linear=pack_linear,
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotate=rotate,
    write_kv=write_kv,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    gather_rows=gather_rows,
)
