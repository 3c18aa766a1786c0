"""Frequency scalings of the rotary position embedding, as values: `families/rope_fields.py` reads them from a config,
and `engine/execute/models/rotary.py` computes the tables.

A scaling changes the frequencies of RoPE (Su et al., RoFormer, 2021) for contexts longer than those of the first
training. Dynamic NTK and LongRoPE depend on a length. An engine computes KV once for all later requests, so one length
applies to all sequences: the context length that the engine serves (`ModelConfig.max_model_tokens`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Linear scaling: all frequencies are divided by `factor` (Chen et al., Position Interpolation, 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNtkRope:
    """Dynamic NTK scaling: the base grows with the served context beyond the original length."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: low frequencies are divided by `factor` and high ones kept, with a ramp in between (Peng et al., 2023)."""

    factor: float
    original_max_position: int
    attention_factor: float
    """Factor of cosines and sines."""
    beta_fast: float = 32.0
    """Number of turns within the original length; frequencies with at least this number are kept."""
    beta_slow: float = 1.0
    """Number of turns within the original length; frequencies with at most this number are divided."""
    truncate: bool = True
    """Whether the bounds of the ramp are rounded to whole dimensions."""


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE: a divisor per frequency, one list within the original length and one beyond (Ding et al., 2024)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    """Factor of cosines and sines."""


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class DividedRope:
    """A divisor per frequency for all lengths: the form in which GGUF files store the scaling of Llama 3.1."""

    divisors: tuple[float, ...]


RopeScaling = LinearRope | DynamicNtkRope | YarnRope | LongRope | Llama3RopeScaling | DividedRope
