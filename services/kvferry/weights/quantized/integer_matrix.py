"""A matrix of quantized integers in groups with a scale and a zero point: q stands for scale * (q - zero).

AWQ, GPTQ and the integer formats of compressed-tensors differ in how they store values, scales and zero points; all are
converted to this form.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.weights.quantized.grouped import CodeType, GroupedCodes
from kvferry.weights.quantized.representation import BLOCK, Kept, MatrixChoice
from kvferry.weights.tensors import Shape, Stored

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Number = TypeVar("Number", np.float32, np.uint8)

_MIN_HALF, _MAX_HALF = 2.0**-14, 65504.0
"""Smallest normal and largest float16."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The assignment of inputs to scales."""

    size: int
    """Inputs of a group, before any reordering."""
    of_input: Ints | None = None
    """[inputs]: group of each input, if groups are not ranges of inputs (act-order)."""


@dataclass(frozen=True, eq=False)
class IntegerMatrix:
    """A matrix of integer codes; see the module's docstring. Loaders read from the mapped file and are called when
    their values are needed."""

    shape: Shape
    bits: int
    """Bits of a quantized value, 4 or 8."""
    grouping: Grouping
    scheme: str
    load_codes: Callable[[], Codes]
    """Returns [outputs, inputs], unsigned quantized values."""
    load_scales: Callable[[], Floats]
    """Returns [outputs, groups]."""
    load_zeros: Callable[[], Codes] | None
    """Returns [outputs, groups], unsigned zero points; `None` if all are half the range."""
    span: slice = field(default_factory=lambda: slice(None))
    """This matrix's rows of the loaded arrays."""

    def rows(self, first: int, count: int) -> "IntegerMatrix":
        """See `QuantizedMatrix.rows`."""
        start = (self.span.start or 0) + first
        return replace(self, shape=(count, self.shape[1]), span=slice(start, start + count))

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _scales_and_zeros(self) -> tuple[Floats, Codes]:
        scales = self.load_scales()[self.span]
        zeros = None if self.load_zeros is None else self.load_zeros()[self.span]
        return scales, np.full(scales.shape, self._middle, np.uint8) if zeros is None else zeros

    def _spread(self, groups: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return [outputs, inputs] from [outputs, groups]."""
        if self.grouping.of_input is not None:
            return groups[:, self.grouping.of_input]
        return np.repeat(groups, self.grouping.size, axis=1)[:, : self.shape[1]]

    def values(self) -> Floats:
        """See `QuantizedMatrix.values`."""
        scales, zeros = self._scales_and_zeros()
        values = self.load_codes()[self.span].astype(np.float32)
        values -= self._spread(zeros)
        with np.errstate(all="ignore"):  # a damaged scale may be infinite; the loader checks the values
            values *= self._spread(scales)
        return values

    def grouped(self) -> GroupedCodes | None:
        """See `QuantizedMatrix.grouped`. The inputs of act-order matrices are sorted by group; `None` if a group then
        has too few of them."""
        codes, size, order = self.load_codes()[self.span], self.grouping.size, None
        if self.grouping.of_input is not None:
            order = np.argsort(self.grouping.of_input, kind="stable")
            if not np.array_equal(self.grouping.of_input[order], np.arange(self.shape[1]) // size):
                return None
            codes = codes[:, order]
        scales, zeros = self._scales_and_zeros()
        has_middle = bool((zeros == self._middle).all())
        kind = CodeType.INT4 if self.bits == 4 else CodeType.INT8
        return GroupedCodes(kind, codes, scales, size, None if has_middle else zeros, order=order)

    @functools.cached_property
    def choice(self) -> MatrixChoice:
        """See `QuantizedMatrix.choice`."""
        scales, zeros = self._scales_and_zeros()
        has_middle = bool((zeros == self._middle).all())
        with np.errstate(all="ignore"):
            are_halves = bool((scales == scales.astype(np.float16)).all())
        passed: list[tuple[Kept, str]] = []
        reason_against_all = self._why_no_blocks()
        for kept in (Kept.CODES4, Kept.CODES4_WIDE, Kept.CODES8, Kept.CODES8_WIDE):
            reason = reason_against_all
            if not reason and kept in (Kept.CODES4, Kept.CODES4_WIDE) and self.bits > 4:
                reason = f"values have {self.bits} bits"
            if not reason and kept is not Kept.CODES4_WIDE and not has_middle:
                reason = f"zero points differ from {self._middle}"
            if not reason and kept in (Kept.CODES4, Kept.CODES8) and not are_halves:
                reason = "scales are not float16"
            if not reason:
                return MatrixChoice(kept, self.scheme, tuple(passed))
            passed.append((kept, reason))
        sizes = np.abs(scales[scales != 0])
        in_range = not sizes.size or bool(sizes.min() >= _MIN_HALF and sizes.max() * (1 << self.bits) < _MAX_HALF)
        if in_range:
            return MatrixChoice(Kept.FLOAT16, self.scheme, tuple(passed))
        return MatrixChoice(Kept.BFLOAT16, self.scheme, (*passed, (Kept.FLOAT16, "scales are beyond its range")))

    def _why_no_blocks(self) -> str:
        if self.grouping.of_input is not None:
            return "groups are not ranges of inputs (desc_act)"
        if self.shape[1] % BLOCK:
            return f"{self.shape[1]} inputs are not a multiple of {BLOCK}"
        if self.grouping.size % BLOCK:
            return f"groups of {self.grouping.size} inputs are not a multiple of {BLOCK}"
        return ""

    def stored(self) -> Stored:
        """See `QuantizedMatrix.stored`."""
        kept = self.choice.kept
        return Stored.later(kept.type_id, lambda: self._rows_as(kept), self.shape[0])

    def _rows_as(self, kept: Kept) -> npt.NDArray[np.uint8]:
        if kept in (Kept.FLOAT16, Kept.BFLOAT16):
            return self.values().view(np.uint8).reshape(-1)
        outputs, inputs = self.shape
        of_groups, zeros_of_groups = self._scales_and_zeros()
        scales = self._spread(of_groups)[:, ::BLOCK].reshape(outputs, -1, 1)
        zeros = self._spread(zeros_of_groups)[:, ::BLOCK].reshape(outputs, -1, 1)
        codes = self.load_codes()[self.span].reshape(outputs, inputs // BLOCK, BLOCK)
        if kept is Kept.CODES4:
            parts = [_bytes_of(scales.astype("<f2")), _nibbles(codes)]
        elif kept is Kept.CODES4_WIDE:
            wide = scales.astype("<f4")
            with np.errstate(all="ignore"):  # as above
                parts = [_bytes_of(wide), _bytes_of(-(wide * zeros.astype("<f4"))), _nibbles(codes)]
        else:
            kind = "<f2" if kept is Kept.CODES8 else "<f4"
            parts = [_bytes_of(scales.astype(kind)), codes ^ np.uint8(self._middle)]  # as int8
        return np.concatenate(parts, axis=-1).reshape(-1)


def _bytes_of(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return [outputs, blocks, bytes] from [outputs, blocks, 1]."""
    return np.ascontiguousarray(values).view(np.uint8)


def _nibbles(codes: Codes) -> Codes:
    """Pack [outputs, blocks, 32] values into [outputs, blocks, 16] bytes: input i in the low nibble, input i + 16 in
    the high one."""
    return codes[..., :16] | codes[..., 16:] << np.uint8(4)
