"""Row kernels: gather of table rows (embedding, logit rows), and SiLU gating of the MLP. Both are memory bound."""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose


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
    small = tl.exp(-tl.abs(gate))  # the exponential cannot overflow
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
