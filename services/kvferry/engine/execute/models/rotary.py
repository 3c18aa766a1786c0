"""Rotary position tables (Su et al., RoFormer, 2021), with the frequency scalings of `weights/rope.py`.

Frequencies are rounded to float32, and angles are float32 products, as in other implementations; sines and cosines are
computed in float64 and rounded once, so that numpy gives bitwise equal results with all instruction sets.
"""

import math

import numpy as np
import numpy.typing as npt

from kvferry.weights.config import LayerRope, ModelConfig
from kvferry.weights.rope import DividedRope, DynamicNtkRope, LinearRope, Llama3RopeScaling, LongRope, YarnRope

Floats = npt.NDArray[np.float32]
_ROWS = 1 << 14
"""Positions whose angles are computed at once."""


def inverse_frequencies(config: ModelConfig, kind: LayerRope = LayerRope.FULL) -> Floats:
    """Return the rotary frequencies, [rotary_dim / 2], in radians per position.

    Args:
        config: configuration of the model.
        kind: whether the layer uses the scaled frequencies or those of local attention.
    """
    size = config.rotary_dim or _width(config)
    scaling, theta = config.rope_scaling, config.rope_theta
    if kind is LayerRope.LOCAL and config.local_rope_theta is not None:
        scaling, theta = None, config.local_rope_theta
    if isinstance(scaling, DynamicNtkRope):
        served = max(config.max_model_tokens, scaling.original_max_position)
        stretch = scaling.factor * served / scaling.original_max_position - (scaling.factor - 1)
        theta *= stretch ** (size / (size - 2))
    plain = np.array([theta ** -(i / size) for i in range(0, size, 2)], np.float32)
    if isinstance(scaling, LinearRope):
        return (plain / np.float32(scaling.factor)).astype(np.float32)
    if isinstance(scaling, DividedRope):
        return (plain / np.array(scaling.divisors, np.float32)).astype(np.float32)
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(plain, scaling)
    if isinstance(scaling, YarnRope):
        return _yarn(plain, scaling, theta)
    if isinstance(scaling, LongRope):
        is_long = config.max_model_tokens > scaling.original_max_position
        factors = np.array(scaling.long_factors if is_long else scaling.short_factors, np.float32)
        return (plain / factors).astype(np.float32)
    return plain


def _width(config: ModelConfig) -> int:
    return config.head_dim if config.latent is None else config.latent.rotated


def rotary_table(config: ModelConfig, kind: LayerRope = LayerRope.FULL) -> tuple[Floats, Floats]:
    """Return the cosines and signed sines of every position, each [max_model_tokens, head_dim], or with latent
    attention [max_model_tokens, rotated].

    Both halves of a row hold the same angles; the first half of the sines is negated, as `Ops.rotate` expects. Values
    that are not rotated have angle zero: with a `rotary_dim`, the values at the end of each half; without rotary
    embedding, all values, in a view of one row.

    Args:
        config: the model's configuration.
        kind: which of the model's rotary embeddings.
    """
    shape = (config.max_model_tokens, _width(config))
    if kind is LayerRope.NONE:
        return np.broadcast_to(np.float32(1), shape), np.broadcast_to(np.float32(0), shape)
    rates, middle = inverse_frequencies(config, kind), shape[1] // 2
    scaling = config.rope_scaling if kind is LayerRope.FULL else None
    factor = scaling.attention_factor if isinstance(scaling, YarnRope | LongRope) else 1.0
    all_cos, all_sin = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    for first in range(0, len(all_cos), _ROWS):  # the angles of a long context would take several times the tables
        rows = slice(first, min(first + _ROWS, len(all_cos)))
        angles = np.outer(np.arange(rows.start, rows.stop, dtype=np.float32), rates).astype(np.float64)
        sin, cos = np.sin(angles) * factor, np.cos(angles) * factor
        for half in (0, middle):
            all_cos[rows, half : half + len(rates)] = cos
            all_sin[rows, half : half + len(rates)] = sin
    np.negative(all_sin[:, :middle], out=all_sin[:, :middle])
    return all_cos, all_sin


def _llama3(plain: Floats, scaling: Llama3RopeScaling) -> Floats:
    """Apply Llama 3.1 scaling: divide low frequencies by `factor`, keep high frequencies, interpolate in between."""
    wavelength = np.float32(2 * math.pi) / plain
    turns = np.float32(scaling.original_max_position) / wavelength
    low, high, factor = (np.float32(x) for x in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    share = np.clip((turns - low) / (high - low), 0.0, 1.0).astype(np.float32)
    blended: Floats = (1 - share) * plain / factor + share * plain
    return blended


def _yarn(plain: Floats, scaling: YarnRope, theta: float) -> Floats:
    """Apply YaRN (Peng et al., 2023, section 3.2): a ramp over the dimensions, from kept to divided frequencies."""
    size = 2 * len(plain)

    def dimension(turns: float) -> float:
        """Return the dimension whose frequency makes `turns` turns within the original length."""
        return size * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(len(plain), dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept = (1 - ramp).astype(np.float32)
    blended: Floats = (plain / np.float32(scaling.factor) * (1 - kept) + plain * kept).astype(np.float32)
    return blended
