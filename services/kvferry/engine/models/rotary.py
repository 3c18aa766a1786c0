"""Rotary position tables (Su et al., RoFormer, 2021), with Llama 3.1's frequency scaling."""

import math

import torch

from kvferry.model.config import Llama3RopeScaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    return plain if config.rope_scaling is None else _scaled(plain, config.rope_scaling)


def rotary_table(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of every position, each [max_model_tokens, head_dim] float32.

    Both halves of a row hold the same angles; the first half of the sines is negated, as `Ops.rotate` wants.
    """
    positions = torch.arange(config.max_model_tokens, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    sin = angles.sin()
    cos = angles.cos()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def _scaled(plain: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, those between blended by wavelength."""
    wavelength = 2 * math.pi / plain
    turns = scaling.original_max_position / wavelength
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / scaling.factor + share * plain
