"""Projections with coded weights (`packed`): y = x @ W^T + b, with 16-bit activations (W4A16, W8A16, FP8 weights).

    up to 256 rows    codes become exact numbers in the dtype of x, tiles are multiplied by tensor cores, and each
                      product is scaled in float32; inputs are split between programs if there are few outputs
    more rows         weights are dequantized to a buffer of limited size, which the GPU library multiplies

Codes are exact in 16 bits, so that weights are not rounded in the first case. Splits are summed in order by a second
kernel. The number of splits depends on the shape of the matrix only: within each class of launch sizes, a row's bits do
not depend on its batch. Between classes, and with the GPU library, they may, as for other projections.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import triton
import triton.language as tl

from kvferry.kernels.coded_weights import CodedWeight, CodeKind
from kvferry.kernels.gpu import check
from kvferry.kernels.gpu.codes import FP8, INT8, numbers
from kvferry.kernels.gpu.device import INTERPRETED
from kvferry.kernels.gpu.launch import choose
from kvferry.kernels.gpu.weights.packed import MIDDLE, MINIMA, NIBBLES, ZEROS, PackedWeight, pack, why_not

FEW_ROWS, MOST_ROWS = 16, 256
"""Rows up to which products are bound by reading weights, and up to which codes are multiplied in tiles."""
BUFFER_BYTES = 64 << 20
"""Largest buffer of dequantized weights, in bytes."""
_INT4 = 0
_KIND = {CodeKind.INT4: _INT4, CodeKind.INT8: INT8, CodeKind.FP8: FP8}
_2_23, _BITS_OF_2_23 = tl.constexpr(8388608.0), tl.constexpr(0x4B00_0000)
_NIBBLE_CODES = tl.constexpr(_INT4)
_FP8_CODES = tl.constexpr(FP8)
_MIDDLE, _ZEROS, _MINIMA = tl.constexpr(MIDDLE), tl.constexpr(ZEROS), tl.constexpr(MINIMA)


@triton.jit
def _exact(
    codes: tl.tensor,
    place: tl.constexpr,
    kind: tl.constexpr,
    shift: tl.constexpr,
    zeros: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Convert a tile of codes to numbers in `dtype`, exactly, less the zero points.

    Args:
        codes: int32 words, of which nibble `place` is used; or int8 or the bytes of e4m3 values.
        place: index of the nibble.
        kind: kind of the codes.
        shift: see `packed`.
        zeros: zero points that can be broadcast to the tile; any tensor without zero points.
        dtype: dtype of the result.
    """
    if kind == _NIBBLE_CODES:
        # 2^23 plus a code is the code in the lowest bits of a float32: cheaper than the conversion of an integer.
        found = (((codes >> (4 * place)) & 15) | _BITS_OF_2_23).to(tl.float32, bitcast=True)
        if shift == _ZEROS:
            return (found - (zeros.to(tl.float32) + _2_23)).to(dtype)
        if shift == _MIDDLE:
            return (found - (_2_23 + 8.0)).to(dtype)
        return (found - _2_23).to(dtype)
    if kind == _FP8_CODES:
        return numbers(codes, kind, dtype)
    if shift == _ZEROS:
        return (codes.to(tl.int32) - zeros.to(tl.int32)).to(tl.float32).to(dtype)
    return codes.to(dtype)


@triton.jit
def _multiply(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    bias: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    x_stride: tl.tensor,
    width: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    tiles: tl.tensor,
    tiles_per_split: tl.tensor,
    kind: tl.constexpr,
    shift: tl.constexpr,
    has_bias: tl.constexpr,
    nibbles: tl.constexpr,
    span: tl.constexpr,
    piece: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    precision: tl.constexpr,
    dtype: tl.constexpr,
) -> None:
    column = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    split = tl.program_id(2)
    known, inside, lane = column < columns, row < count, tl.arange(0, piece)
    matrix = codes + column.to(tl.int64)[None, :] * width + lane[:, None]
    source = x + row.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([rows, outputs], tl.float32)
    first = split * tiles_per_split
    for tile in range(first, tl.minimum(first + tiles_per_split, tiles)):
        words = tl.load(matrix + tile * piece, mask=known[None, :], other=0)
        start = tile * (nibbles * piece)
        for part in tl.static_range(nibbles // span):
            number = tl.minimum((start + part * span * piece) // group, groups - 1)
            zeros = number
            if shift == _ZEROS:
                zeros = tl.load(shifts + number * columns + column, mask=known, other=0)[None, :]
            product = tl.zeros([rows, outputs], tl.float32)
            sums = tl.zeros([rows], tl.float32)
            for place in tl.static_range(span):
                at = start + (part * span + place) * piece + lane
                a = tl.load(source + at[None, :], mask=inside[:, None] & (at < depth)[None, :], other=0.0).to(dtype)
                b = _exact(words, part * span + place, kind, shift, zeros, dtype)
                product = tl.dot(a, b, product, input_precision=precision)
                if shift == _MINIMA:
                    sums += tl.sum(a.to(tl.float32), axis=1)
            scale = tl.load(scales + number * columns + column, mask=known, other=0.0).to(tl.float32)
            total += product * scale[None, :]
            if shift == _MINIMA:
                least = tl.load(shifts + number * columns + column, mask=known, other=0.0).to(tl.float32)
                total += sums[:, None] * least[None, :]
    if has_bias:
        total += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    target = out + (split.to(tl.int64) * count + row[:, None]) * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit
def _sum_splits(
    out: tl.tensor,
    parts: tl.tensor,
    bias: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    splits: tl.tensor,
    has_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    known = column < columns
    total = tl.zeros([block], tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * count + row) * columns + column, mask=known, other=0.0)
    if has_bias:
        total += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=known)


@triton.jit
def _dequantize(
    out: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    kind: tl.constexpr,
    shift: tl.constexpr,
    nibbles: tl.constexpr,
    piece: tl.constexpr,
    outputs: tl.constexpr,
) -> None:
    tile, lane = tl.program_id(1), tl.arange(0, piece)
    column = first + tl.program_id(0) * outputs + tl.arange(0, outputs)
    known = column < last
    words = tl.load(
        codes + column.to(tl.int64)[:, None] * width + (tile * piece + lane)[None, :], mask=known[:, None], other=0
    )
    for place in tl.static_range(nibbles):
        at = (tile * nibbles + place) * piece
        number = tl.minimum(at // group, groups - 1)
        side = number * columns + column
        zeros = number
        if shift == _ZEROS:
            zeros = tl.load(shifts + side, mask=known, other=0)[:, None]
        values = _exact(words, place, kind, shift, zeros, tl.float32)
        values *= tl.load(scales + side, mask=known, other=0.0).to(tl.float32)[:, None]
        if shift == _MINIMA:
            values += tl.load(shifts + side, mask=known, other=0.0).to(tl.float32)[:, None]
        target = out + (column - first).to(tl.int64)[:, None] * depth + (at + lane)[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=known[:, None] & ((at + lane) < depth)[None, :])


class CodedLinear:
    """A projection with coded weights; see the module's docstring."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        """
        Args:
            weight: the matrix.
            bias: [outputs]; `None` without a bias.
        """
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.num_bytes
        self._nibbles = NIBBLES if weight.kind is CodeKind.INT4 else 1
        self._codes = weight.codes
        self._depth = weight.codes.shape[1] * self._nibbles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, inputs] to [T, outputs] in the dtype of `x`, accumulated in float32.

        Raises:
            BadKernelInput: unsupported dtype, shape, stride or device.
        """
        weight = self.weight
        check.ready("x", x, weight.codes)
        check.floats("x", x)
        check.shaped("x", x, len(x), weight.inputs)
        check.dense("x", x)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        return self._in_tiles(x) if len(x) <= MOST_ROWS else self._dequantized(x)

    def _in_tiles(self, x: torch.Tensor) -> torch.Tensor:
        weight, count = self.weight, len(x)
        is_wide = x.dtype == torch.float32
        size = "few" if count <= FEW_ROWS else "many"
        choice = choose(f"linear_{weight.kind.value.lower()}", x.device, "32bit" if is_wide else size)
        block, rows = choice.sizes["outputs"], choice.sizes["rows"]
        tiles = self._depth // (self._nibbles * weight.piece)
        across = triton.cdiv(weight.outputs, block)
        splits = min(tiles, max(1, choice.sizes["programs"] // across))
        per_split = triton.cdiv(tiles, splits)
        splits = triton.cdiv(tiles, per_split)
        out = x.new_empty(count, weight.outputs)
        parts = out if splits == 1 else torch.empty(splits, count, weight.outputs, dtype=torch.float32, device=x.device)
        bias = self.bias if self.bias is not None else out
        has_bias = self.bias is not None
        choice.run(
            _multiply,
            (across, triton.cdiv(count, rows), splits),
            parts,
            x,
            self._codes,
            weight.scales,
            weight.scales if weight.shifts is None else weight.shifts,
            bias,
            count,
            weight.outputs,
            weight.inputs,
            x.stride(0),
            weight.codes.shape[1],
            weight.group,
            weight.scales.shape[0],
            tiles,
            per_split,
            kind=_KIND[weight.kind],
            shift=weight.shift,
            has_bias=has_bias and splits == 1,
            nibbles=self._nibbles,
            span=weight.span,
            piece=weight.piece,
            rows=rows,
            outputs=block,
            precision="ieee" if is_wide else "tf32",
            dtype=_dot_type(x.dtype),
        )
        if splits > 1:
            c = choose("sum_splits", x.device)
            width = min(c.sizes["block"], triton.next_power_of_2(weight.outputs))
            grid = (count, triton.cdiv(weight.outputs, width))
            c.run(_sum_splits, grid, out, parts, bias, count, weight.outputs, splits, has_bias=has_bias, block=width)
        return out

    def _dequantized(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        most = max(1, BUFFER_BYTES // (x.element_size() * weight.inputs))
        step = min(weight.outputs, most)
        buffer = x.new_empty(step, weight.inputs)
        if step == weight.outputs:
            return F.linear(x, self.values_into(buffer, 0), self.bias)
        out = x.new_empty(len(x), weight.outputs)
        for first in range(0, weight.outputs, step):
            last = min(first + step, weight.outputs)
            bias = None if self.bias is None else self.bias[first:last]
            out[:, first:last] = F.linear(x, self.values_into(buffer[: last - first], first), bias)
        return out

    def values_into(self, out: torch.Tensor, first: int) -> torch.Tensor:
        """Write dequantized rows, rounded once to the dtype of `out`, and return it.

        Args:
            out: [rows, inputs], contiguous.
            first: first row (output).
        """
        weight = self.weight
        choice = choose("dequantize", out.device)
        block = choice.sizes["outputs"]
        piece = weight.piece
        choice.run(
            _dequantize,
            (triton.cdiv(len(out), block), self._depth // (self._nibbles * piece)),
            out,
            self._codes,
            weight.scales,
            weight.scales if weight.shifts is None else weight.shifts,
            first,
            first + len(out),
            weight.outputs,
            weight.inputs,
            weight.codes.shape[1],
            weight.group,
            weight.scales.shape[0],
            kind=_KIND[weight.kind],
            shift=weight.shift,
            nibbles=self._nibbles,
            piece=piece,
            outputs=block,
        )
        return out


def _dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the operands of dot products."""
    if dtype == torch.float16:
        return tl.float16
    return tl.float32 if dtype == torch.float32 or INTERPRETED else tl.bfloat16


def pack_codes(weight: CodedWeight, bias: torch.Tensor | None) -> CodedLinear | str:
    """See `Ops.pack_codes`."""
    reason = why_not(weight)
    return CodedLinear(pack(weight), bias) if reason is None else reason
