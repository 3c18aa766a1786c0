"""A matrix of FP8 values (e4m3) with scales for the matrix, each output, or blocks: value = scale * e4m3.

Source of the type: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; without infinities ("e4m3fn").
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvferry.weights.quantized.grouped import CodeType, GroupedCodes
from kvferry.weights.quantized.representation import Kept, MatrixChoice
from kvferry.weights.tensors import Shape, Stored

Floats = npt.NDArray[np.float32]


def _table() -> Floats:
    """Return the value of each of the 256 bytes: 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


E4M3 = _table()
_CODES = (Kept.CODES4, Kept.CODES4_WIDE, Kept.CODES8, Kept.CODES8_WIDE)
_PASSED = (
    *((kept, "FP8 values have no common step in a block") for kept in _CODES),
    (Kept.FLOAT16, "values with small scales are beyond its range"),
)


@dataclass(frozen=True, eq=False)
class Float8Matrix:
    """A matrix of FP8 values; see the module's docstring."""

    shape: Shape
    scheme: str
    load_bytes: Callable[[], npt.NDArray[np.uint8]]
    """Returns [outputs, inputs], e4m3."""
    load_scales: Callable[[], Floats]
    """Returns [blocks of outputs, blocks of inputs]; a single row or column applies to all blocks."""
    block: tuple[int, int]
    """Outputs and inputs of a block; the last blocks may be smaller."""
    span: slice = field(default_factory=lambda: slice(None))
    """This matrix's rows of the loaded arrays."""

    def rows(self, first: int, count: int) -> "Float8Matrix":
        """See `QuantizedMatrix.rows`."""
        start = (self.span.start or 0) + first
        return replace(self, shape=(count, self.shape[1]), span=slice(start, start + count))

    @property
    def choice(self) -> MatrixChoice:
        """See `QuantizedMatrix.choice`."""
        return MatrixChoice(Kept.BFLOAT16, self.scheme, _PASSED)

    def values(self) -> Floats:
        """See `QuantizedMatrix.values`."""
        codes = self.load_bytes()
        scales = self.load_scales()
        outputs = np.minimum(np.arange(codes.shape[0]) // self.block[0], len(scales) - 1)
        inputs = np.minimum(np.arange(codes.shape[1]) // self.block[1], scales.shape[1] - 1)
        values = E4M3[codes[self.span]]
        with np.errstate(all="ignore"):  # a damaged scale may be infinite; the loader checks the values
            values *= scales[outputs[self.span]][:, inputs]
        return values

    def grouped(self) -> GroupedCodes:
        """See `QuantizedMatrix.grouped`. Scales of blocks are repeated for each output."""
        codes, scales = self.load_bytes(), self.load_scales()
        outputs = np.minimum(np.arange(codes.shape[0]) // self.block[0], len(scales) - 1)
        size = self.block[1] if scales.shape[1] > 1 else self.shape[1]
        return GroupedCodes(CodeType.FP8, codes[self.span], scales[outputs[self.span]], size)

    def stored(self) -> Stored:
        """See `QuantizedMatrix.stored`."""
        return Stored.later(self.choice.kept.type_id, lambda: self.values().view(np.uint8).reshape(-1), self.shape[0])
