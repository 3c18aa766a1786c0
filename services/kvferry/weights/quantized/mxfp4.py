"""MXFP4 experts of gpt-oss (Rouhani et al., Microscaling Data Formats for Deep Learning, 2023, sections 3 and 4).

All experts of a layer are one module with tensors `*_blocks` [experts, outputs, inputs / 32, 16] and `*_scales`
[experts, outputs, inputs / 32]. A byte of a block has two e2m1 values, the first in the lower bits; a scale s is
2^(s - 127), in e8m0. The outputs of gate and up alternate. value = scale * e2m1.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.files.safetensors_file import StoredTensor
from kvferry.weights.files.stacked_experts import OUTPUTS
from kvferry.weights.quantized.method import Method
from kvferry.weights.quantized.names import name_list
from kvferry.weights.quantized.packed_words import ModuleTensors
from kvferry.weights.quantized.representation import BLOCK, Kept, MatrixChoice, QuantizedMatrix
from kvferry.weights.tensors import Shape, Stored

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each of the 16 e2m1 numbers: 1 sign bit, 2 exponent bits with bias 1, 1 mantissa bit."""
_HALF_BIAS = 128
"""Exponent bias of half a scale, by which `TWICE` is multiplied."""
_MAX_SCALE = 252
"""Largest scale for which values stay in the range of float32; 255 is NaN."""
_MIN_HALF, _MAX_HALF = _HALF_BIAS - 24, _HALF_BIAS + 15
"""Scales whose halves can be stored as float16: from the smallest subnormal to the largest power of two."""
_SCHEME = "MXFP4"
_UNEVEN = "e2m1 values are not evenly spaced"


def read_mxfp4(fields: ConfigFields) -> Method:
    """Read the fields of `quantization_config`.

    Raises:
        ModelFileError: a field has a value that is not supported.
    """
    if fields.flag("dequantize"):
        fields.refuse("dequantize", "remove the field: weights are dequantized where the kernels need it")
    skipped = tuple(name.split(".") for name in name_list(fields, "modules_to_not_convert"))
    parts = frozenset(f"{stack}_{kind}" for stack in OUTPUTS for kind in ("blocks", "scales"))
    return Method("mxfp4", parts, read_many=_read, is_excluded=lambda module: _is_named(skipped, module.split(".")))


def _is_named(names: tuple[list[str], ...], module: list[str]) -> bool:
    """Return whether a name is the start of a module's name, part by part; `*` matches any part."""
    return any(
        len(name) <= len(module) and all(a in ("*", b) for a, b in zip(name, module, strict=False)) for name in names
    )


def _read(parts: ModuleTensors) -> Mapping[str, QuantizedMatrix]:
    """Describe the matrices of all experts of a layer.

    Raises:
        ModelFileError: a tensor is missing, has a wrong type or shape, or a scale is NaN or too large.
    """
    found: dict[str, QuantizedMatrix] = {}
    for stack, projections in OUTPUTS.items():
        blocks = parts.take(f"{stack}_blocks", ("U8",), dimensions=4)
        if blocks.shape[3] != BLOCK // 2:
            raise parts.damaged(f"has {stack}_blocks with {blocks.shape[3]} bytes per block instead of {BLOCK // 2}")
        scales = parts.take(f"{stack}_scales", ("U8",), blocks.shape[:3])
        largest = int(np.max(scales.raw()))
        if largest > _MAX_SCALE:
            raise parts.damaged(
                f"has {stack}_scales with a scale of {largest}"
                f" ({'NaN' if largest == 255 else f'2^{largest - 127}'}); at most {_MAX_SCALE} is possible in float32"
            )
        outputs, inputs = blocks.shape[1], blocks.shape[2] * BLOCK
        for expert in range(blocks.shape[0]):
            for projection, span in projections.items():
                shape = (len(range(*span.indices(outputs))), inputs)
                found[f"{expert}.{projection}.weight"] = Mxfp4Matrix(shape, blocks, scales, expert, span)
    return found


@dataclass(frozen=True, eq=False)
class Mxfp4Matrix:
    """A projection of one expert; the module docstring has the format."""

    shape: Shape
    blocks: StoredTensor
    scales: StoredTensor
    expert: int
    outputs: slice

    def rows(self, first: int, count: int) -> "Mxfp4Matrix":
        """See `QuantizedMatrix.rows`."""
        begin, _, step = self.outputs.indices(self.blocks.shape[1])
        span = slice(begin + first * step, begin + (first + count) * step, step)
        return replace(self, shape=(count, self.shape[1]), outputs=span)

    @functools.cached_property
    def choice(self) -> MatrixChoice:
        """See `QuantizedMatrix.choice`."""
        kept, passed = kept_type(self._scales()), ((Kept.CODES4, _UNEVEN),)
        if kept is Kept.E2M1:
            return MatrixChoice(kept, _SCHEME, passed)
        return MatrixChoice(kept, _SCHEME, (*passed, (Kept.E2M1, "scales are not float16")))

    def _scales(self) -> Codes:
        """Return the scales of the matrix, [outputs, inputs / 32]."""
        found: Codes = self.scales.raw()[self.expert].view(np.uint8)[self.outputs]
        return found

    def _codes(self) -> Codes:
        """Return the e2m1 numbers, [outputs, inputs / 32, 32]."""
        packed = self.blocks.raw()[self.expert].view(np.uint8)[self.outputs]
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:2], BLOCK)

    def values(self) -> Floats:
        """See `QuantizedMatrix.values`."""
        return (TWICE[self._codes()] * _halves(self._scales())).reshape(self.shape)

    def grouped(self) -> None:
        """See `QuantizedMatrix.grouped`: e2m1 values are not whole numbers."""
        return

    def stored(self) -> Stored:
        """See `QuantizedMatrix.stored`."""
        return Stored.later(self.choice.kept.type_id, self._rows, self.shape[0])

    def _rows(self) -> Codes:
        codes = self._codes()
        nibbles = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << np.uint8(4)
        return kept_blocks(self.choice.kept, self._scales(), nibbles)


def kept_type(scales: Codes) -> Kept:
    """Return the type in which a matrix with these scales in e8m0 is kept."""
    is_half = int(scales.min()) >= _MIN_HALF and int(scales.max()) <= _MAX_HALF
    return Kept.E2M1 if is_half else Kept.E2M1_WIDE


def kept_blocks(kept: Kept, scales: Codes, nibbles: Codes) -> Codes:
    """Return the bytes of rows in a kept type.

    Args:
        kept: the type.
        scales: scales in e8m0, [..].
        nibbles: values in e2m1, [.., 16]: value i of a block in the lower bits of byte i, value i + 16 in the upper
            bits.
    """
    halves = _halves(scales).astype("<f2" if kept is Kept.E2M1 else "<f4")
    return np.concatenate((np.ascontiguousarray(halves).view(np.uint8), nibbles), axis=-1).reshape(-1)


def _halves(scales: Codes) -> Floats:
    """Return half of each scale, [.., 1]."""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - _HALF_BIAS)[..., None]
