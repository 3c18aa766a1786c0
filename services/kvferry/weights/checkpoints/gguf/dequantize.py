"""Dequantizes GGUF blocks to float32.

The unquantized types and those of the embedded model are implemented here, which avoids importing the `gguf` library
(0.3 s) and is twice as fast. All other types use the library. A block has 32 values: a scale (for Q4_1 also a minimum)
as float16, then the quantized values.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.weights.checkpoints.gguf.header import TensorInfo
from kvferry.weights.quantized.mxfp4 import kept_blocks, kept_type
from kvferry.weights.quantized.representation import Kept

Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]
"""Quantized blocks, uint8 [blocks, bytes per block]."""


def dequantize(data: npt.NDArray[np.uint8], info: TensorInfo) -> Floats:
    """Dequantize a tensor to a newly allocated float32 array of the tensor's shape.

    Args:
        data: the tensor's bytes.
        info: the tensor's type and shape.
    """
    simple = _SIMPLE.get(info.type_name)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; the loader checks the values
        if simple is not None:
            return simple(data.reshape(-1, info.block_bytes)).reshape(info.shape)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as by_library

        rows = data.reshape(*info.shape[:-1], -1)
        values: Floats = by_library(rows, GGMLQuantizationType(info.type_id))
    return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


def kept_mxfp4(data: npt.NDArray[np.uint8]) -> tuple[Kept, Callable[[], npt.NDArray[np.uint8]]]:
    """Return the type in which MXFP4 rows are kept, and a function that converts them. A block has a scale in e8m0,
    then 16 bytes of e2m1 values in the order of the kept types (`quantized.mxfp4`).

    Args:
        data: bytes of the rows.
    """
    blocks = data.reshape(-1, 17)
    kept = kept_type(blocks[:, 0])

    def convert() -> npt.NDArray[np.uint8]:
        return kept_blocks(kept, blocks[:, 0], blocks[:, 1:])

    return kept, convert


def _f32(blocks: Blocks) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Blocks) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Blocks) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Blocks) -> Floats:
    """Dequantize [ scale f16 ][ 32 x int8 ]: scale * value."""
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks, 0)
    return values


def _q4_1(blocks: Blocks) -> Floats:
    """Dequantize [ scale f16 ][ minimum f16 ][ 16 bytes ]: scale * nibble + minimum, low nibbles first."""
    values = _nibbles(blocks[:, 4:])
    values *= _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q4_0(blocks: Blocks) -> Floats:
    """Dequantize [ scale f16 ][ 16 bytes ]: scale * (nibble - 8), low nibbles first."""
    values = _nibbles(blocks[:, 2:])
    values -= np.float32(8)
    values *= _half(blocks, 0)
    return values


def _half(blocks: Blocks, at: int) -> Floats:
    """Return the float16 at byte offset `at` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Floats:
    """Unpack [blocks, 16] bytes to [blocks, 32] values: first all low nibbles, then all high nibbles."""
    values = np.empty((packed.shape[0], 32), dtype=np.float32)
    values[:, :16] = packed & np.uint8(15)
    values[:, 16:] = packed >> np.uint8(4)
    return values


_SIMPLE: dict[str, Callable[[Blocks], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_1": _q4_1,
    "Q4_0": _q4_0,
}
