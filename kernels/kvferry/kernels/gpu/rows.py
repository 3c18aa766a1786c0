"""Row kernels: gather of table rows (embedding, logit rows), SiLU gating of the MLP, and adapter updates. All are
memory-bound."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import triton
import triton.language as tl

from kvferry.kernels.batch import LowRankGroup, LowRankWeights
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import Choice, choose

_TILE = 4096
"""Number of adapter weights that a program holds in registers."""
_FEW_ROWS = 32
"""Number of rows with the same adapter up to which their products are bound by reading the adapter's weights: one
launch reads them once per row. With more rows, torch calls cuBLAS."""


@triton.jit(do_not_specialize=["known"])
def _take_rows(
    out: tl.tensor,
    table: tl.tensor,
    numbers: tl.tensor,
    known: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    number = tl.load(numbers + row).to(tl.int64)
    # A row whose index is out of range is not read; the result is zeros.
    readable = tl.where((number >= 0) & (number < known), columns, 0)
    values = tl.load(table + number * row_stride + column, mask=column < readable, other=0.0)
    tl.store(out + row * out_stride + column, values, mask=column < columns)


def take_rows(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Gather rows of a table: token embeddings, or the rows whose logits are needed.

    R * n values are read and written, and the row indices are read.

    Args:
        table: [rows, n], each row contiguous.
        numbers: row indices, [R] int64 or int32.

    Returns:
        The selected rows, [R, n].

    Raises:
        BadKernelInput: unsupported dtype, stride or device.
    """
    check.ready("table", table, numbers)
    check.floats("table", table)
    check.dense("table", table)
    check.contiguous("numbers", numbers)
    if numbers.dtype not in (torch.int64, torch.int32):
        raise check.fault("numbers", "DTYPE", f"{numbers.dtype} is not supported; use int64 or int32")
    columns = table.shape[1]
    out = table.new_empty(len(numbers), columns)
    c = choose("take_rows", table.device)
    block = min(c.sizes["block"], triton.next_power_of_2(columns))
    grid = (len(numbers), triton.cdiv(columns, block))
    c.run(_take_rows, grid, out, table, numbers, len(table), columns, table.stride(0), columns, block=block)
    return out


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `Ops.embedding`."""
    return take_rows(table, token_ids)


@triton.jit
def _silu_mul(
    out: tl.tensor, gate_up: tl.tensor, columns: tl.tensor, row_stride: tl.tensor, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # the exponent is at most 0, so the exponential cannot overflow
    share = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * columns + column, (gate * share * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Ops.silu_mul` (Shazeer, GLU variants improve transformer, 2020). 2 T n values are read and T n are written.

    Raises:
        BadKernelInput: unsupported dtype, stride or device.
    """
    check.ready("gate_up", gate_up)
    check.floats("gate_up", gate_up)
    check.dense("gate_up", gate_up)
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    c = choose("silu_mul", gate_up.device)
    block = min(c.sizes["block"], triton.next_power_of_2(columns))
    c.run(_silu_mul, (rows, triton.cdiv(columns, block)), out, gate_up, columns, gate_up.stride(0), block=block)
    return out


@triton.jit
def _shrink(
    out: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    a: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    rank: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    row = tl.load(rows + number)
    ranks = tl.arange(0, padded)
    total = tl.zeros([padded], tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        values = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
        known = (ranks < rank)[:, None] & inside[None, :]
        weights = tl.load(a + ranks[:, None] * columns + column[None, :], mask=known, other=0.0).to(tl.float32)
        total += tl.sum(weights * values[None, :], axis=1)
    tl.store(out + number * rank + ranks, total, mask=ranks < rank)


@triton.jit
def _expand(
    y: tl.tensor,
    shrunk: tl.tensor,
    rows: tl.tensor,
    b: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    rank: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    row = tl.load(rows + number)
    column = tl.program_id(1) * block + tl.arange(0, block)
    ranks = tl.arange(0, padded)
    inside = column < columns
    values = tl.load(shrunk + number * rank + ranks, mask=ranks < rank, other=0.0)
    known = inside[:, None] & (ranks < rank)[None, :]
    weights = tl.load(b + column[:, None] * rank + ranks[None, :], mask=known, other=0.0).to(tl.float32)
    target = y + row * row_stride + first + column
    before = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    after = before + tl.sum(weights * values[None, :], axis=1)
    tl.store(target, after.to(y.dtype.element_ty), mask=inside)


def add_low_rank(y: torch.Tensor, x: torch.Tensor, groups: Sequence[LowRankGroup]) -> None:
    """See `Ops.add_low_rank`. For each row, the adapter's weights are read and the update is added in float32.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    if not groups:
        return
    check.ready("y", y, x)
    check.floats("y", y)
    check.dense("y", y)
    check.dense("x", x)
    for group in groups:
        weights = group.weights
        check.ready("rows", group.rows, y, weights.a, weights.b)
        check.typed("rows", group.rows, torch.int64)
        check.floats("a", weights.a, like=x)
        check.shaped("a", weights.a, len(weights.a), x.shape[1])
        check.shaped("b", weights.b, len(weights.b), len(weights.a))
        if weights.first + len(weights.b) > y.shape[1]:
            raise check.fault("b", "SHAPE", f"the update has columns beyond the {y.shape[1]} columns of the outputs")
        (_add_few if len(group.rows) <= _FEW_ROWS else _add_many)(y, x, group.rows, weights)


def _add_few(y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, weights: LowRankWeights) -> None:
    rank, columns = weights.a.shape
    padded = triton.next_power_of_2(rank)
    shrunk = torch.empty(len(rows), rank, dtype=torch.float32, device=x.device)
    shrink, expand, outputs = choose("low_rank_shrink", x.device), choose("low_rank_expand", x.device), len(weights.b)
    sizes = {"rank": rank, "padded": padded}
    block = _block(shrink, columns, padded)
    shrink.run(_shrink, (len(rows),), shrunk, x, rows, weights.a, columns, x.stride(0), block=block, **sizes)
    block = _block(expand, outputs, padded)
    grid = (len(rows), triton.cdiv(outputs, block))
    expand.run(_expand, grid, y, shrunk, rows, weights.b, weights.first, outputs, y.stride(0), block=block, **sizes)


def _block(choice: Choice, columns: int, padded: int) -> int:
    """Return the number of columns of a tile: as configured, but at most all, and few enough that the tile stays in
    registers."""
    return min(choice.sizes["block"], int(triton.next_power_of_2(columns)), max(1, _TILE // padded))


def _add_many(y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, weights: LowRankWeights) -> None:
    update = F.linear(F.linear(take_rows(x, rows), weights.a), weights.b)
    y[:, weights.first : weights.first + len(weights.b)].index_add_(0, rows, update.to(y.dtype))
