"""Rotary position tables (Su et al., RoFormer, 2021), with Llama 3.1's frequency scaling.

Frequencies are rounded to float32, and angles are float32 products, as in other implementations; sines and cosines are
computed in float64 and rounded once, so that numpy gives bitwise equal results with all instruction sets.
"""

import math

import numpy as np
import numpy.typing as npt

from kvferry.model.config import Llama3RopeScaling, ModelConfig

Floats = npt.NDArray[np.float32]


def inverse_frequencies(config: ModelConfig) -> Floats:
    """Return the rotary frequencies, [head_dim / 2], in radians per position."""
    exponents = (i / config.head_dim for i in range(0, config.head_dim, 2))
    plain = np.array([config.rope_theta**-exponent for exponent in exponents], np.float32)
    return plain if config.rope_scaling is None else _scaled(plain, config.rope_scaling)


def rotary_table(config: ModelConfig) -> tuple[Floats, Floats]:
    """Return the cosines and signed sines of every position, each [max_model_tokens, head_dim].

    Both halves of a row hold the same angles; the first half of the sines is negated, as `Ops.rotate` expects.
    """
    positions = np.arange(config.max_model_tokens, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(config)).astype(np.float64)
    sin, cos = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    return np.concatenate((cos, cos), axis=1), np.concatenate((-sin, sin), axis=1)


def _scaled(plain: Floats, scaling: Llama3RopeScaling) -> Floats:
    """Apply Llama 3.1 scaling: divide low frequencies by `factor`, keep high frequencies, interpolate in between."""
    wavelength = np.float32(2 * math.pi) / plain
    turns = np.float32(scaling.original_max_position) / wavelength
    low, high, factor = (np.float32(x) for x in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    share = np.clip((turns - low) / (high - low), 0.0, 1.0).astype(np.float32)
    blended: Floats = (1 - share) * plain / factor + share * plain
    return blended
