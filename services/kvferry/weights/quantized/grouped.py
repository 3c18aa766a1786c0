"""Codes of a matrix with scales per group of inputs, for kernels that multiply codes instead of 16-bit values.

value[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group]) + minimum[n, k // group]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class CodeType(Enum):
    """Type of a code: 0 .. 15, 0 .. 255, or the byte of an e4m3 value."""

    INT4 = 4
    INT8 = 8
    FP8 = 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupedCodes:
    """A matrix [outputs, inputs] of codes."""

    kind: CodeType
    codes: Codes
    """[outputs, inputs]."""
    scales: Floats
    """[outputs, groups]."""
    group: int
    """Inputs of a group; the last group may have fewer."""
    zeros: Codes | None = None
    """[outputs, groups]; `None`: half the range of whole numbers, no zero point for FP8."""
    minima: Floats | None = None
    """[outputs, groups]; if given, zero points are 0."""
    order: Ints | None = None
    """[inputs]: the input of each column, if groups are not ranges of inputs (act-order)."""

    def reordered(self, rows: Ints) -> "GroupedCodes":
        """Return the matrix with rows in another order: row i is the previous row `rows[i]`."""
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            minima=None if self.minima is None else self.minima[rows],
        )

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        parts = [self.scales] if self.minima is None else [self.scales, self.minima]
        is_nan = self.kind is CodeType.FP8 and bool(((self.codes & np.uint8(127)) == 127).any())
        return not is_nan and all(bool(np.isfinite(part).all()) for part in parts)


@runtime_checkable
class GroupedSource(Protocol):
    """A `TensorSource` that can return codes."""

    def grouped(self, name: str) -> GroupedCodes | None:
        """Return the codes of a matrix; `None` if it is not quantized, or in a format without this form.

        Raises:
            KeyError: the model has no tensor `name`.
        """
        ...


def gguf_codes(type_name: str, blocks: Codes, outputs: int) -> GroupedCodes | None:
    """Return the codes of a GGUF tensor; `None` for types without this form.

    Args:
        type_name: name of the type.
        blocks: the tensor's bytes.
        outputs: number of rows.
    """
    read = _OF_GGUF.get(type_name)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; the loader checks the values
        return None if read is None else read(blocks, outputs)


def _half(blocks: Codes, at: int, outputs: int) -> Floats:
    """Return the float16 at byte offset `at` of each block, [outputs, blocks of a row]."""
    halves = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return halves.astype(np.float32).reshape(outputs, -1)


def _nibbles(packed: Codes, outputs: int) -> Codes:
    """Unpack [blocks, bytes], first all low nibbles of a block, then all high ones, to [outputs, inputs]."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=1).reshape(outputs, -1)


def _q4_0(data: Codes, outputs: int) -> GroupedCodes:
    blocks = data.reshape(-1, 18)
    return GroupedCodes(CodeType.INT4, _nibbles(blocks[:, 2:], outputs), _half(blocks, 0, outputs), 32)


def _q4_1(data: Codes, outputs: int) -> GroupedCodes:
    blocks = data.reshape(-1, 20)
    scales, minima = (_half(blocks, at, outputs) for at in (0, 2))
    return GroupedCodes(CodeType.INT4, _nibbles(blocks[:, 4:], outputs), scales, 32, minima=minima)


def _q8_0(data: Codes, outputs: int) -> GroupedCodes:
    blocks = data.reshape(-1, 34)
    codes = (blocks[:, 2:] ^ np.uint8(128)).reshape(outputs, -1)
    return GroupedCodes(CodeType.INT8, codes, _half(blocks, 0, outputs), 32)


def _q4_k(data: Codes, outputs: int) -> GroupedCodes:
    """Read [ scale f16 ][ minimum f16 ][ 12 bytes: 6-bit scales and minima of 8 groups ][ 128 bytes: nibbles ], as
    ggml's `get_scale_min_k4` and `dequantize_row_q4_K` do."""
    blocks = data.reshape(-1, 144)
    packed, six, two = blocks[:, 4:16], np.uint8(63), np.uint8(6)
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & six, (high & np.uint8(15)) | (low >> two) << np.uint8(4)), axis=1)
    minima = np.concatenate((middle & six, (high >> np.uint8(4)) | (middle >> two) << np.uint8(4)), axis=1)
    of_blocks = [np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32) for at in (0, 2)]
    return GroupedCodes(
        CodeType.INT4,
        _nibbles(blocks[:, 16:].reshape(-1, 32), outputs),
        (of_blocks[0] * scales).reshape(outputs, -1),
        32,
        minima=-(of_blocks[1] * minima).reshape(outputs, -1),
    )


_OF_GGUF: Mapping[str, Callable[[Codes, int], GroupedCodes]] = MappingProxyType(
    {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k}
)
