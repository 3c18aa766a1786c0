"""RMSNorm (Zhang and Sennrich, 2019), alone and with the residual's addition: a row stays in registers, read once.

Rows may be the heads of a wider tensor: row r is `inner` of `outer`, each with its stride.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose

MAX_COLUMNS = 65536
"""Of one row; more do not fit into the registers of one program."""


@triton.jit
def _rms_norm(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    residual_stride: tl.tensor,
    columns: tl.tensor,
    epsilon: tl.tensor,
    adds: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    at = x + (row // inner) * outer_stride + (row % inner) * inner_stride + column
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        sums = residual + row * residual_stride + column
        # Rounded as it is kept, so that the norm is that of what the next layer adds to.
        rounded = (values + tl.load(sums, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(sums, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / columns + epsilon)
    normed = values * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, normed.to(out.dtype.element_ty), mask=inside)


def _run(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    check.ready("x", x, weight)
    check.floats("x", x)
    check.floats("weight", weight, like=x)
    check.dense("x", x)
    columns = x.shape[-1]
    check.shaped("weight", weight, columns)
    check.contiguous("weight", weight)
    if columns > MAX_COLUMNS:
        raise check.fault("x", "SHAPE", f"rows of {columns} values; at most {MAX_COLUMNS} are supported")
    if x.ndim > 3:
        raise check.fault("x", "SHAPE", f"{x.ndim} dimensions; 1 to 3 are supported")
    inner = x.shape[1] if x.ndim == 3 else 1
    inner_stride = x.stride(1) if x.ndim == 3 else 0
    outer_stride = x.stride(0) if x.ndim > 1 else 0
    rows = x.numel() // columns if columns else 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    choose("rms_norm", x.device, "wide" if block > 2048 else "narrow").run(
        _rms_norm,
        (rows,),
        out,
        x,
        x if residual is None else residual,
        weight,
        inner,
        outer_stride,
        inner_stride,
        0 if residual is None else residual.stride(0),
        columns,
        epsilon,
        adds=residual is not None,
        block=block,
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `Ops.rms_norm`. Moves as many values in as out; sums in float32, rounds once.

    Args:
        x: [n], [T, n] or [T, heads, n], its last dimension dense.
        weight: [n] of the same type.
        epsilon: added to the mean square.

    Raises:
        BadKernelInput: a type, a shape, a stride or a device that this does not take.
    """
    return _run(x, None, weight, epsilon)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `Ops.add_rms_norm`. Moves 2 T n values in and 2 T n out; apart, the two steps would move half as many again.

    Args:
        x: [T, n].
        residual: [T, n], becomes the sum.
        weight: [n].
        epsilon: added to the mean square.

    Raises:
        BadKernelInput: a type, a shape, a stride or a device that this does not take.
    """
    if x.ndim != 2:
        raise check.fault("x", "SHAPE", f"{x.ndim} dimensions, not [T, n]")
    check.ready("residual", residual, x)
    check.shaped("residual", residual, *x.shape)
    check.floats("residual", residual, like=x)
    check.dense("residual", residual)
    return _run(x, residual, weight, epsilon)
