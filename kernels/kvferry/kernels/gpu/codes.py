"""Conversions between numbers and codes of KV in 8 bits (`coded_pages`), for use in kernels. The results equal those of
the compiled CPU kernels, so that pages are interchangeable.

The conversions use integer operations, since GPUs before sm89 have none for fp8 (e4m3: Micikevicius et al., FP8
formats for deep learning, 2022).
"""

import torch
import triton
import triton.language as tl

from kvferry.kernels.coded_pages import is_coded, scales_of

INT8, FP8 = 1, 2
KIND_OF: dict[torch.dtype, int] = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
"""Constant that selects the conversion in a kernel; 0 for pages without codes."""
_FP8 = tl.constexpr(FP8)
_LARGEST_INT8, _LARGEST_FP8 = tl.constexpr(127.0), tl.constexpr(448.0)
_FLOAT32_STEP = tl.constexpr(2.0**120)
_SIGN_AND_CODE = tl.constexpr(-0x7810_0000)
"""0x87F00000 as int32: the sign, and the 7 other bits of a code shifted by 20."""
_MIN_WITH_INVERSE = tl.constexpr(1e-30)
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: a sum with a number of magnitude up to 2^22 is rounded to a whole number, ties to even."""


@triton.jit
def numbers(codes: tl.tensor, kind: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Convert codes to numbers, exactly.

    An fp8 code whose bits are moved to the exponent and fraction of float32 is its number times 2^-120, subnormal codes
    included: two integer operations and one product, since these instructions bound the speed of decode attention.

    Args:
        codes: int8, or fp8 as uint8.
        kind: value of `KIND_OF`.
        dtype: dtype of the result.
    """
    if kind == _FP8:
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & _SIGN_AND_CODE
        found = bits.to(tl.float32, bitcast=True) * _FLOAT32_STEP
    else:
        found = codes.to(tl.float32)
    return found.to(dtype)


@triton.jit
def deinterleaved(values: tl.tensor, rows: tl.constexpr, dim: tl.constexpr) -> tl.tensor:
    """Deinterleave the columns of a tile by four: all columns 4i, then 4i + 1, 4i + 2 and 4i + 3.

    In a product over rows, a thread then owns four adjacent columns, so that it loads four codes from shared memory at
    once instead of one.

    Args:
        values: [rows, dim].
        rows: number of rows.
        dim: number of columns, a multiple of 4.
    """
    return tl.reshape(tl.permute(tl.reshape(values, (rows, dim // 4, 4)), (0, 2, 1)), (rows, dim))


@triton.jit
def deinterleaved_columns(dim: tl.constexpr) -> tl.tensor:
    """Return the original position of each column of `deinterleaved`, [dim]."""
    column = tl.arange(0, dim)
    return column % (dim // 4) * 4 + column // (dim // 4)


@triton.jit
def code_steps(left: tl.tensor, right: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Return the scales of rows, and the factors from numbers to codes: the largest magnitude of a row has the largest
    code. A row with a non-finite number has the scale NaN and the factor 0.

    Args:
        left, right: [rows, D / 2] float32, the halves of the rows; 0 beyond their ends.
        kind: value of `KIND_OF`.
    """
    largest = _LARGEST_INT8
    if kind == _FP8:
        largest = _LARGEST_FP8
    first = tl.where(tl.abs(left) < float("inf"), tl.abs(left), -1.0)  # false for NaN, too
    second = tl.where(tl.abs(right) < float("inf"), tl.abs(right), -1.0)
    is_finite = tl.minimum(tl.min(first, axis=1), tl.min(second, axis=1)) >= 0.0
    top = tl.maximum(tl.max(first, axis=1), tl.max(second, axis=1))
    most = tl.full(top.shape, largest, tl.float32)
    has_inverse = is_finite & (top > _MIN_WITH_INVERSE)
    inverse = tl.where(has_inverse, tl.div_rn(most, tl.where(has_inverse, top, 1.0)), 0.0)
    return tl.where(is_finite, tl.div_rn(top, most), float("nan")), inverse


@triton.jit
def codes(values: tl.tensor, inverse: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Round numbers to codes, ties to even.

    Args:
        values: [rows, values] float32.
        inverse: [rows] factors of `code_steps`.
        kind: value of `KIND_OF`.
    """
    scaled = tl.where(tl.abs(values) < float("inf"), values, 0.0) * inverse[:, None]
    if kind == _FP8:
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        size = magnitude.to(tl.float32, bitcast=True)
        steps = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF  # subnormal codes: multiples of 2^-9
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        code = tl.minimum(tl.where(size < 0.015625, steps, normal), 0x7E)
        rounded = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        bounded = tl.minimum(tl.maximum(scaled, -_LARGEST_INT8), _LARGEST_INT8)
        rounded = ((bounded + _WHOLE) - _WHOLE).to(tl.int8)
    return rounded


def of_pages(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return pages as arguments of a kernel: values, or codes with fp8 as uint8; scales, or the values again without
    codes; and the constant of `KIND_OF`, 0 without codes. Both tensors begin with [pages, layers].

    Args:
        pages: [pages, layers, 2, K, B, D].
    """
    if not is_coded(pages):
        return pages, pages, 0
    kind = KIND_OF[pages.dtype]
    return pages.view(torch.uint8) if kind == FP8 else pages, scales_of(pages), kind
