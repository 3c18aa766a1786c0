"""Reference model operations in plain torch: norms, rotary embedding, KV writes, paged attention, projections.

Each operation computes in the precision of its inputs, so the difference between float64 and a low precision gives the
error tolerance of tests. The modules `sampling` and `blocks` contain the other operations of `DeviceOps`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from kvferry.kernels.batch import (
    AttentionBatch,
    AttentionRules,
    ExpertWeights,
    LatentUp,
    LowRankGroup,
    SingleRows,
)
from kvferry.kernels.ops import AttentionPlan, DeviceOps, Linear, Ops
from kvferry.kernels.reference import blocks, sampling
from kvferry.kernels.unfused import place_latent_of, place_qkv_of


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
        if slot < 0:
            continue
        pages[slot // block_tokens, layer, :, :, slot % block_tokens] = kv[row]


def plan_attention(batch: AttentionBatch, pages: torch.Tensor, num_heads: int) -> AttentionPlan:
    return batch


def plan_rows(rows: SingleRows, pages: torch.Tensor, num_heads: int) -> AttentionPlan:
    return rows


def paged_attention(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    return attend(q, pages, layer, plan, AttentionRules(scale))


def attend(
    q: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan, rules: AttentionRules
) -> torch.Tensor:
    block_tokens, outputs, first = pages.shape[4], [], 0
    for index, (queries, context, table) in enumerate(_sequences(plan)):
        if context == 0:  # padding row
            outputs.append(torch.zeros_like(q[first : first + queries].flatten(1)))
            first += queries
            continue
        places = torch.arange(context, device=q.device)
        page = torch.as_tensor(table, device=q.device)[places // block_tokens]
        kv = pages[page, layer, :, :, places % block_tokens]  # [context, 2, K, D]
        rows = q[first : first + queries]
        group = q.shape[1] // kv.shape[2]
        keys, values = kv[:, 0].repeat_interleave(group, dim=1), kv[:, 1].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,chd->hqc", rows, keys) * rules.scale
        if rules.soft_cap is not None:
            scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
        seen = _seen(plan, index, first, queries, context, rules.window).to(q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        if rules.sinks is not None:
            sinks = rules.sinks.to(scores.dtype)[:, None, None].expand(-1, queries, 1)
            weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        outputs.append(torch.einsum("hqc,chd->qhd", weights, values).flatten(1))
        first += queries
    return torch.cat(outputs)


def _seen(plan: AttentionPlan, index: int, first: int, queries: int, context: int, window: int | None) -> torch.Tensor:
    """Return the tokens to which the rows of a sequence attend, [queries, context]."""
    if isinstance(plan, AttentionBatch) and plan.trees is not None and plan.trees.sizes[index]:
        return torch.from_numpy(plan.trees.attended(index, first, queries, context, window))
    places, position = torch.arange(context), torch.arange(context - queries, context)[:, None]
    seen = places <= position
    return seen if window is None else seen & (places > position - window)


def _sequences(plan: AttentionPlan) -> Iterator[tuple[int, int, list[int]]]:
    """Return (number of rows, context length, block table) of each sequence."""
    if isinstance(plan, SingleRows):
        return zip([1] * len(plan.places), plan.contexts.tolist(), plan.tables[plan.places].tolist(), strict=True)
    assert isinstance(plan, AttentionBatch)
    return zip(plan.queries.tolist(), plan.contexts.tolist(), plan.block_tables.tolist(), strict=True)


def attend_latent(
    q: torch.Tensor, up: LatentUp, pages: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    rank, outputs, first = up.keys.shape[2], [], 0
    for index, (queries, context, table) in enumerate(_sequences(plan)):
        if context == 0:  # padding row
            outputs.append(q.new_zeros(queries, q.shape[1] * up.values.shape[1]))
            first += queries
            continue
        places = torch.arange(context, device=q.device)
        page = torch.as_tensor(table, device=q.device)[places // pages.shape[4]]
        vectors = pages[page, layer, 0, 0, places % pages.shape[4]]  # [context, rank + R]
        shared = vectors[:, None, rank:].expand(-1, q.shape[1], -1)
        keys = torch.cat((torch.einsum("cr,hpr->chp", vectors[:, :rank], up.keys), shared), dim=-1)
        values = torch.einsum("cr,hvr->chv", vectors[:, :rank], up.values)
        scores = torch.einsum("qhd,chd->hqc", q[first : first + queries], keys) * scale
        seen = _seen(plan, index, first, queries, context, None).to(q.device)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        outputs.append(torch.einsum("hqc,chd->qhd", weights, values).flatten(1))
        first += queries
    return torch.cat(outputs)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def add_low_rank(y: torch.Tensor, x: torch.Tensor, groups: Sequence[LowRankGroup]) -> None:
    for group in groups:
        weights = group.weights
        wide = torch.promote_types(x.dtype, torch.float32)
        a, b = weights.a.to(wide), weights.b.to(wide)
        for row in group.rows.tolist():
            out = y[row, weights.first : weights.first + len(b)]
            out.copy_(out.to(wide) + b @ (a @ x[row].to(wide)))


def run_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    weights: ExpertWeights,
    multiply_gate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x)
    for row, (listed, weighed) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
        total = torch.zeros(x.shape[1], dtype=wide, device=x.device)
        for expert, share in zip(listed, weighed, strict=True):
            inner = weights.gate_up[expert] @ x[row]
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[expert]
            y = weights.down[expert] @ multiply_gate(inner[None])[0]
            if weights.down_bias is not None:
                y = y + weights.down_bias[expert]
            total += y.to(wide) * share
        out[row] = total
    return out


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
    place_qkv=place_qkv_of(rms_norm, rotate, write_kv),
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    attend=attend,
    silu_mul=silu_mul,
    gelu_mul=gelu_mul,
    gather_rows=gather_rows,
    add_low_rank=add_low_rank,
    place_latent=place_latent_of(rms_norm, rotate, write_kv),
    attend_latent=attend_latent,
    run_experts=run_experts,
)

DEVICE_OPS = DeviceOps(
    attend=attend,
    plan_rows=plan_rows,
    adjust_logits=sampling.adjust_logits,
    sample=sampling.sample,
    log_probabilities=sampling.log_probabilities,
    gather_blocks=blocks.gather_blocks,
    scatter_blocks=blocks.scatter_blocks,
    relayout_blocks=blocks.relayout_blocks,
    digest_blocks=blocks.digest_blocks,
)
