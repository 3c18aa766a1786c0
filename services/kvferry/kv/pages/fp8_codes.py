"""Conversion between float32 and fp8 codes: e4m3, with 4 bits of exponent (bias 7), 3 bits of fraction and no
infinities (Micikevicius et al., FP8 formats for deep learning, 2022)."""

import numpy as np
import numpy.typing as npt

from kvferry.weights.quantized.float8_matrix import E4M3

MAX_FP8 = np.float32(448)
"""Largest number with a code."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST_CODE = np.uint32(0x7E)
_MIN_NORMAL = np.float32(2.0**-6)
_STEP_IN_ULPS = np.float32(2.0**14)
"""A float32 whose last place is 2^-9, the step between subnormal codes."""


def decode(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Convert codes to float32, exactly; the codes 0x7F and 0xFF are NaN.

    Args:
        codes: uint8 of any shape; the result has the same shape.
    """
    return E4M3[codes]


def encode(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round values to the nearest codes, ties to even.

    Args:
        values: float32 of any shape, contiguous, of magnitude up to `MAX_FP8`; larger ones and NaN become 448.
    """
    bits = values.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    sizes = magnitude.view(np.float32)
    steps = (sizes + _STEP_IN_ULPS).view(np.uint32) & np.uint32(0xF)
    normal = (magnitude + np.uint32(0x7FFFF) + (magnitude >> 20 & np.uint32(1))) >> 20
    codes = np.minimum(np.where(sizes < _MIN_NORMAL, steps, normal - np.uint32(120 << 3)), _LARGEST_CODE)
    found: npt.NDArray[np.uint8] = (codes | bits >> 24 & np.uint32(0x80)).astype(np.uint8)
    return found
