"""MoE layer: matrix products grouped by expert, and the weighted sum of each row's experts (Shazeer et al., 2017).

    chosen [T, A] ─► pairs of row and place, sorted by expert, and tiles of pairs of one expert   (on the device)
    x [T, hidden] ─► gate and up of each pair ─► gate function ─► down of each pair ─► sum over a row's pairs

A tile is a range of the sorted pairs of one expert, so that each program multiplies with one matrix. The number of
tiles is known only on the device; the grid has the maximum number, and programs without a tile return immediately. The
host therefore never waits, and launches can be captured.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kvferry.kernels.batch import ExpertWeights
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.device import INTERPRETED
from kvferry.kernels.gpu.experts.expert_tiles import ExpertTiles, divide
from kvferry.kernels.gpu.launch import Choice, choose

Gate = Callable[[torch.Tensor], torch.Tensor]
_FEW_PAIRS = 16
"""Average number of pairs per expert up to which tiles are small: the products are then bound by reading weights."""


@triton.jit
def _multiply_pairs(
    out: tl.tensor,
    x: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    expert_of: tl.tensor,
    first_of: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    pairs_per_row: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    precision: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert >= experts:
        return
    place = tl.load(first_of + tile) + tl.arange(0, rows)
    inside = place < tl.load(ends + expert)
    pair = tl.load(order + place, mask=inside, other=0)
    column = tl.program_id(1) * outputs + tl.arange(0, outputs)
    known = column < columns
    matrix = weights + expert * columns * depth + column.to(tl.int64)[None, :] * depth
    source = x + (pair // pairs_per_row)[:, None] * x_stride
    total = tl.zeros([rows, outputs], tl.float32)
    for start in range(0, depth, inputs):
        at = start + tl.arange(0, inputs)
        a = tl.load(source + at[None, :], mask=inside[:, None] & (at < depth)[None, :], other=0.0)
        b = tl.load(matrix + at[:, None], mask=known[None, :] & (at < depth)[:, None], other=0.0)
        if widens:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total += tl.dot(a, b, input_precision=precision)
    if has_bias:
        total += tl.load(bias + expert * columns + column, mask=known, other=0.0).to(tl.float32)[None, :]
    target = out + pair[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit
def _sum_pairs(
    out: tl.tensor,
    y: tl.tensor,
    shares: tl.tensor,
    columns: tl.tensor,
    active: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros([block], tl.float32)
    for place in range(active):
        pair = row * active + place
        values = tl.load(y + pair * columns + column, mask=inside, other=0.0).to(tl.float32)
        total += values * tl.load(shares + pair)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def _product(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, tiles: ExpertTiles, choice: Choice, per_row: int
) -> torch.Tensor:
    """Multiply the row of each pair by the matrix of its expert: [rows, in] to [pairs, out]. Row r belongs to the
    pairs `per_row` * r and up."""
    experts, columns, depth = weights.shape
    out = x.new_empty(len(tiles.order), columns)
    outputs = min(choice.sizes["outputs"], max(16, triton.next_power_of_2(columns)))
    inputs = min(choice.sizes["inputs"], max(16, triton.next_power_of_2(depth)))
    choice.run(
        _multiply_pairs,
        (len(tiles.expert_of), triton.cdiv(columns, outputs)),
        out,
        x,
        weights,
        weights if bias is None else bias,
        tiles.order,
        tiles.ends,
        tiles.expert_of,
        tiles.first_of,
        experts,
        columns,
        depth,
        x.stride(0),
        pairs_per_row=per_row,
        has_bias=bias is not None,
        rows=choice.sizes["rows"],
        outputs=outputs,
        inputs=inputs,
        precision="ieee" if x.dtype == torch.float32 else "tf32",
        widens=INTERPRETED and x.dtype == torch.bfloat16,
    )
    return out


def run_experts(
    x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, weights: ExpertWeights, multiply_gate: Gate
) -> torch.Tensor:
    """See `Ops.run_experts`. The matrices of the chosen experts are read once per tile of their pairs. Products are
    accumulated in float32 and rounded to the type of `x`; sums over a row's experts are in float32, in the order of
    `chosen`.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    check.ready("x", x, chosen, shares, weights.gate_up, weights.down)
    check.floats("x", x)
    check.dense("x", x)
    check.typed("chosen", chosen, torch.int64)
    check.typed("shares", shares, torch.float32)
    experts, twice, hidden = weights.gate_up.shape
    if chosen.ndim != 2 or len(chosen) != len(x):
        raise check.fault("chosen", "SHAPE", f"{tuple(chosen.shape)} is not [{len(x)}, A]")
    rows, active = chosen.shape
    check.shaped("x", x, rows, hidden)
    check.shaped("shares", shares, rows, active)
    check.shaped("down", weights.down, experts, hidden, twice // 2)
    for name, tensor in (("gate_up", weights.gate_up), ("down", weights.down), ("shares", shares), ("chosen", chosen)):
        check.contiguous(name, tensor)
    for name, bias, outputs in (
        ("gate_up_bias", weights.gate_up_bias, twice),
        ("down_bias", weights.down_bias, hidden),
    ):
        if bias is not None:
            check.ready(name, bias, x)
            check.shaped(name, bias, experts, outputs)
            check.contiguous(name, bias)
            check.floats(name, bias, like=x)
    check.floats("gate_up", weights.gate_up, like=x)
    check.floats("down", weights.down, like=x)
    out = x.new_empty(rows, hidden)
    if not rows:
        return out
    size = "few" if rows * active <= _FEW_PAIRS * experts else "many"
    choice = choose("experts", x.device, "32bit" if x.dtype == torch.float32 else size)
    tiles = divide(chosen, experts, choice.sizes["rows"])
    inner = multiply_gate(_product(x, weights.gate_up, weights.gate_up_bias, tiles, choice, active))
    y = _product(inner, weights.down, weights.down_bias, tiles, choice, 1)
    c = choose("sum_pairs", x.device)
    block = min(c.sizes["block"], triton.next_power_of_2(hidden))
    c.run(_sum_pairs, (rows, triton.cdiv(hidden, block)), out, y, shares, hidden, active=active, block=block)
    return out
