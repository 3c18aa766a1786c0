"""RMSNorm kernels (Zhang and Sennrich, 2019), plain and fused with the residual addition; each row is read once.

Rows may be the heads of a wider tensor: row r has an outer and an inner index, each with its own stride.
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.launch import choose

MAX_COLUMNS = 65536
"""Maximum number of values per row; more values do not fit into the registers of a program."""


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
        # The sum is rounded like the stored residual, so that the norm is computed from the stored values.
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
        raise check.fault("x", "SHAPE", f"rows have {columns} values; at most {MAX_COLUMNS} are supported")
    if x.ndim > 3:
        raise check.fault("x", "SHAPE", f"the tensor must have 1 to 3 dimensions, not {x.ndim}")
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
    """See `Ops.rms_norm`. Every value is read and written once. Sums are in float32, and the result is rounded once.

    Args:
        x: [n], [T, n] or [T, heads, n], with a contiguous last dimension.
        weight: [n], with the dtype of `x`.
        epsilon: added to the mean square.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    return _run(x, None, weight, epsilon)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `Ops.add_rms_norm`. 2 T n values are read and 2 T n are written; without fusion, memory traffic would be 50 %
    higher.

    Args:
        x: [T, n].
        residual: [T, n], replaced by the sum.
        weight: [n].
        epsilon: added to the mean square.

    Raises:
        BadKernelInput: unsupported dtype, shape, stride or device.
    """
    if x.ndim != 2:
        raise check.fault("x", "SHAPE", f"the tensor must have 2 dimensions, [T, n], not {x.ndim}")
    check.ready("residual", residual, x)
    check.shaped("residual", residual, *x.shape)
    check.floats("residual", residual, like=x)
    check.dense("residual", residual)
    return _run(x, residual, weight, epsilon)
