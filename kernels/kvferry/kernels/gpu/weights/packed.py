"""The form of coded weights in device memory.

Codes of 4 bits: int32 [outputs, tiles * 32]. A tile has 256 inputs; nibble i of its word j is the code of input 32 i +
j of the tile. A program therefore reads 128 bytes of a row at once, and the 32 inputs of a nibble are a tile of a
product without any exchange between threads. Codes of 8 bits: int8 (code - 128) or the bytes of e4m3 values
[outputs, inputs]. Rows are padded with zeros to whole tiles; scales, zero points and minima are [groups, outputs], so
that a program reads those of its outputs at once.
"""

import math
from dataclasses import dataclass

import torch

from kvferry.kernels.coded_weights import CodedWeight, CodeKind

NIBBLES, LANES = 8, 32
_TILE = {CodeKind.INT4: NIBBLES * LANES, CodeKind.INT8: 128, CodeKind.FP8: 128}
"""Inputs to whose multiple rows are padded."""
NO_SHIFT, MIDDLE, ZEROS, MINIMA = range(4)
"""What is subtracted from codes: nothing (signed codes), the middle of the range, zero points; or what is added to
scaled codes."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [outputs, inputs] in the form of this module."""

    kind: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    """[groups, outputs] float16, bfloat16 or float32: the first that is exact."""
    shifts: torch.Tensor | None
    """[groups, outputs]: zero points, uint8, or int8 for 8-bit codes; or minima, like `scales`."""
    shift: int
    inputs: int
    group: int
    order: torch.Tensor | None

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes in device memory."""
        parts = (self.codes, self.scales, self.shifts, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def piece(self) -> int:
        """Number of inputs of a dot product whose codes share a scale, a power of two of at most 128."""
        return LANES if self.kind is CodeKind.INT4 else math.gcd(self.group, 128)

    @property
    def span(self) -> int:
        """Number of consecutive nibbles of a tile that share a scale."""
        return math.gcd(self.group // LANES, NIBBLES) if self.kind is CodeKind.INT4 else 1


def why_not(weight: CodedWeight) -> str | None:
    """Return the reason why a matrix cannot be packed, as a clause; `None` if it can."""
    if weight.group % LANES and weight.scales.shape[1] > 1:
        return f"groups of {weight.group} inputs are not a multiple of {LANES}"
    if weight.minima is not None and (weight.kind is not CodeKind.INT4 or weight.zeros is not None):
        return "minima are supported with 4-bit codes without zero points"
    if weight.zeros is not None and weight.kind is CodeKind.FP8:
        return "FP8 values have zero points"
    return None


def pack(weight: CodedWeight) -> PackedWeight:
    """Convert a matrix for which `why_not` is `None`."""
    outputs, inputs = weight.codes.shape
    tile = _TILE[weight.kind]
    padded = -(-inputs // tile) * tile
    group = weight.group if weight.scales.shape[1] > 1 else padded
    codes = weight.codes
    if weight.kind is CodeKind.INT8:
        codes = codes ^ 128
    if padded > inputs:
        codes = torch.nn.functional.pad(codes, (0, padded - inputs))
    if weight.kind is CodeKind.INT4:
        parts = codes.view(outputs, -1, NIBBLES, LANES)
        words = torch.zeros(outputs, padded // tile, LANES, dtype=torch.int32, device=codes.device)
        for place in range(NIBBLES):
            words |= parts[:, :, place].to(torch.int32) << (4 * place)
        codes = words.view(outputs, -1)
    elif weight.kind is CodeKind.INT8:
        codes = codes.view(torch.int8)
    shift, shifts = _shifts(weight)
    scales = _narrowed(weight.scales.t().contiguous())
    return PackedWeight(weight.kind, codes.contiguous(), scales, shifts, shift, inputs, group, weight.order)


def _shifts(weight: CodedWeight) -> tuple[int, torch.Tensor | None]:
    if weight.minima is not None:
        return MINIMA, _narrowed(weight.minima.t().contiguous())
    if weight.zeros is None:
        return (MIDDLE if weight.kind is CodeKind.INT4 else NO_SHIFT), None
    zeros = weight.zeros.t().contiguous()
    return ZEROS, zeros if weight.kind is CodeKind.INT4 else (zeros ^ 128).view(torch.int8)


def _narrowed(values: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return values
