"""Functions that together launch every Triton kernel, with the shapes of served models."""

from collections.abc import Callable

import numpy as np
import torch

from harness.kernels.coded_cases import coded_weight
from kvferry.kernels.batch import (
    AttentionBatch,
    AttentionRules,
    ExpertWeights,
    HeadNorms,
    LatentUp,
    LowRankGroup,
    LowRankWeights,
    SingleRows,
)
from kvferry.kernels.block_moves import Overlay
from kvferry.kernels.coded_pages import CODES, coded_pages
from kvferry.kernels.coded_weights import CodeKind
from kvferry.kernels.gpu import blocks, digest, heads, norms, rows
from kvferry.kernels.gpu.attention import attend, plan
from kvferry.kernels.gpu.experts import products
from kvferry.kernels.gpu.latent import place
from kvferry.kernels.gpu.latent.attend import attend_latent
from kvferry.kernels.gpu.sampling import draw, logits
from kvferry.kernels.gpu.weights import products as coded_products
from kvferry.kernels.logit_rows import Adjustments, Draws, TokenLists

BF16 = torch.bfloat16


def _rows() -> None:
    x = torch.zeros(2, 4096, dtype=BF16)
    rows.take_rows(x, torch.zeros(2, dtype=torch.int64))
    rows.silu_mul(x)
    for rank in (8, 64, 256):
        weights = LowRankWeights(torch.zeros(rank, 4096, dtype=BF16), torch.zeros(1024, rank, dtype=BF16), 4096)
        group = LowRankGroup(torch.zeros(2, dtype=torch.int64), weights)
        rows.add_low_rank(torch.zeros(2, 6144, dtype=BF16), x, [group])
    for columns in (576, 4096, 8192):
        x, weight = torch.zeros(2, columns, dtype=BF16), torch.zeros(columns, dtype=BF16)
        norms.rms_norm(x, weight, 1e-5)
        norms.add_rms_norm(x, x.clone(), weight, 1e-5)


def _pool(kv_heads: int, head_dim: int, dtype: torch.dtype | str) -> torch.Tensor:
    """Return two pages of two layers; `dtype` is a key of `CODES` for codes."""
    dims = (2, 2, kv_heads, 16, head_dim)
    if isinstance(dtype, torch.dtype):
        return torch.zeros(2, *dims, dtype=dtype)
    return coded_pages(torch.zeros(2 * 2 * 2 * kv_heads * 16 * (head_dim + 4), dtype=torch.uint8), 2, dims, dtype)


def _heads(head_dim: int, dtype: torch.dtype | str = BF16) -> None:
    qkv, pages = torch.zeros(2, 48, head_dim, dtype=BF16), _pool(8, head_dim, dtype)
    angles, weight = torch.zeros(2, head_dim), torch.zeros(head_dim, dtype=BF16)
    slots = torch.zeros(2, dtype=torch.int64)
    heads.rotate(qkv, angles, angles)
    heads.place_qkv(qkv, None, angles, angles, pages, 0, slots)
    heads.place_qkv(qkv, HeadNorms(weight, weight, 1e-6), angles, angles, pages, 0, slots)
    heads.write_kv(torch.zeros(2, 2, 8, head_dim, dtype=BF16), pages, 0, slots)


def _attention(head_dim: int, dtype: torch.dtype | str, rules: AttentionRules) -> None:
    queries, contexts = np.array([1, 1, 40]), np.array([1200, 1100, 100])
    tables = np.zeros((3, 75), np.int64)
    batch = AttentionBatch(queries, contexts, tables, torch.zeros(42, dtype=torch.int64))
    pages = _pool(2, head_dim, dtype)
    q = torch.zeros(42, 8, head_dim, dtype=dtype if isinstance(dtype, torch.dtype) else BF16)
    attend.attend(q, pages, 0, plan.plan_attention(batch, pages, 8), rules)
    contexts_there = torch.tensor([1200, 1100])
    rows_of_one = SingleRows(torch.zeros(2, 75, dtype=torch.int32), torch.arange(2), contexts_there, 1200)
    attend.attend(q[:2], pages, 0, plan.plan_rows(rows_of_one, pages, 8), rules)


def _attention_cases() -> dict[str, Callable[[], None]]:
    plain = AttentionRules(0.1)
    every = AttentionRules(0.1, window=200, soft_cap=30.0, sinks=torch.zeros(8))
    cases: dict[str, Callable[[], None]] = {}
    for head_dim in (64, 80, 96, 128, 256):
        cases[f"attention {head_dim} bfloat16"] = lambda d=head_dim: _attention(d, BF16, plain)  # type: ignore[misc]
    cases["attention 128 float16"] = lambda: _attention(128, torch.float16, plain)
    cases["attention 64 float32"] = lambda: _attention(64, torch.float32, plain)
    cases["attention 128 float32"] = lambda: _attention(128, torch.float32, plain)
    for codes in CODES:
        cases[f"attention 128 {codes}"] = lambda codes=codes: _attention(128, codes, plain)  # type: ignore[misc]
        cases[f"attention 64 {codes}, window, cap, sinks"] = lambda codes=codes: _attention(64, codes, every)  # type: ignore[misc]
        cases[f"heads 128 {codes}"] = lambda codes=codes: _heads(128, codes)  # type: ignore[misc]
    cases["attention 128 bfloat16, window, cap, sinks"] = lambda: _attention(128, BF16, every)
    return cases


def _latent(heads: int, rank: int, dtype: torch.dtype) -> None:
    """Decode rows and a chunk, decode rows whose lengths are on the device, and writes, with heads of DeepSeek V2 and
    V3."""
    plain, turned, value = 128, 64, 128
    pages, q = (torch.zeros(*shape, dtype=dtype) for shape in ((2, 2, 1, 1, 16, rank + turned), (42, heads, 192)))
    up = LatentUp(*(torch.zeros(heads, size, rank, dtype=dtype) for size in (plain, value)))
    tables, slots = np.zeros((3, 300), np.int64), torch.zeros(42, dtype=torch.int64)
    for longest in (900, 4800):  # one partition, and several
        batch = AttentionBatch(np.array([1, 1, 40]), np.array([longest, 1100, 100]), tables, slots)
        attend_latent(q, up, pages, 0, plan.plan_attention(batch, pages, heads), 0.1)
    contexts = torch.tensor([4800, 1100])
    rows_of_one = SingleRows(torch.zeros(2, 300, dtype=torch.int32), torch.arange(2), contexts, 4800)
    attend_latent(q[:2], up, pages, 0, plan.plan_rows(rows_of_one, pages, heads), 0.1)
    vectors, angles = torch.zeros(2, rank + turned, dtype=dtype), torch.zeros(2, turned)
    place.write_kv(vectors[:, None, None], pages, 0, slots[:2])
    place.place_latent(vectors, torch.zeros(rank, dtype=dtype), 1e-6, angles, angles, pages, 0, slots[:2])


def _latent_blocks() -> None:
    pages, some = torch.zeros(3, 2, 1, 1, 16, 576, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    digest.digest_blocks(pages, some)
    blocks.relayout_blocks(pages, torch.zeros(3, 2, 1, 1, 32, 576, dtype=BF16), some, Overlay(0, 48, 0, 100))


def _experts(dtype: torch.dtype) -> None:
    for hidden, inner, has_biases in ((2880, 2880, True), (2048, 768, False)):
        weights = ExpertWeights(
            torch.zeros(4, 2 * inner, hidden, dtype=dtype),
            torch.zeros(4, 2 * inner, dtype=dtype) if has_biases else None,
            torch.zeros(4, hidden, inner, dtype=dtype),
            torch.zeros(4, hidden, dtype=dtype) if has_biases else None,
        )
        for count in (2, 64):
            chosen = torch.zeros(count, 2, dtype=torch.int64)
            products.run_experts(torch.zeros(count, hidden, dtype=dtype), chosen, torch.zeros(count, 2), weights, _half)


def _half(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.chunk(2, dim=-1)[0].contiguous()


def _coded_weights(kind: CodeKind, dtype: torch.dtype) -> None:
    forms = {
        CodeKind.INT4: ("middle", "zeros", "minima"),
        CodeKind.INT8: ("middle", "zeros"),
        CodeKind.FP8: ("middle",),
    }
    for form in forms[kind]:
        for group in (32, 128):
            run = coded_products.pack_codes(coded_weight(kind, 256, 4096, group, form), None)
            assert not isinstance(run, str), run
            for count in (2, 64):
                run(torch.zeros(count, 4096, dtype=dtype))
            run.values_into(torch.zeros(256, 4096, dtype=dtype), 0)


def _sampling() -> None:
    given = torch.zeros(2, 128256)
    ints, floats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    listed = TokenLists(
        torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float64), 4
    )
    allowed = torch.zeros(2, 4008, dtype=torch.int32)
    adjusted = logits.adjust_logits(given, Adjustments(listed, listed, listed, listed, allowed))
    for some in (given, adjusted):
        draw.sample(some, Draws(floats, ints, floats, floats, ints, ints, ints))
    logits.log_probabilities(given, ints)


def _blocks() -> None:
    pages, some = torch.zeros(3, 2, 2, 8, 16, 128, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    blocks.scatter_blocks(blocks.gather_blocks(pages, some), pages, some)
    digest.digest_blocks(pages, some)
    for dtype, tokens in ((torch.float16, 16), (BF16, 24)):
        target = torch.zeros(3, 2, 2, 4, tokens, 128, dtype=dtype)
        blocks.relayout_blocks(pages, target, some, Overlay(0, 48, 2, 100))


CASES: dict[str, Callable[[], None]] = {
    "rows": _rows,
    **{f"heads {d}": lambda d=d: _heads(d) for d in (64, 80, 128)},  # type: ignore[misc]
    **_attention_cases(),
    **{f"latent {h} bfloat16": lambda h=h: _latent(h, 512, BF16) for h in (16, 32, 128)},  # type: ignore[misc]
    "latent 128 float16": lambda: _latent(128, 512, torch.float16),
    "latent 16 float32": lambda: _latent(16, 512, torch.float32),
    "latent, padded rank": lambda: _latent(20, 96, BF16),
    "latent blocks": _latent_blocks,
    "experts bfloat16": lambda: _experts(BF16),
    "experts float32": lambda: _experts(torch.float32),
    **{
        f"coded weights {kind.value} {name}": lambda kind=kind, name=name: _coded_weights(kind, getattr(torch, name))  # type: ignore[misc]
        for kind in CodeKind
        for name in ("bfloat16", "float16", "float32")
    },
    "sampling": _sampling,
    "blocks": _blocks,
}
"""Functions by name; together they launch every kernel."""
