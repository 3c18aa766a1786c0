"""Weights of projections as codes with scales, as quantized checkpoints have them, and their definition.

    value[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group]) + minimum[n, k // group]

Codes of 4 bits are 0 .. 15 (AWQ: Lin et al., 2024; GPTQ: Frantar et al., 2023; GGUF Q4_0, Q4_1, Q4_K); codes of 8 bits
are whole numbers (Q8_0, compressed-tensors) or FP8 values (e4m3: Micikevicius et al., 2022).
"""

from dataclasses import dataclass
from enum import Enum

import torch


class CodeKind(Enum):
    """Type of a code."""

    INT4 = "W4A16"
    INT8 = "W8A16"
    FP8 = "FP8"


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix [outputs, inputs] of codes, all tensors on one device."""

    kind: CodeKind
    codes: torch.Tensor
    """[outputs, inputs] uint8: 0 .. 15, 0 .. 255, or the bytes of e4m3 values."""
    scales: torch.Tensor
    """[outputs, groups] float32."""
    group: int
    """Inputs of a group; the last group may have fewer."""
    zeros: torch.Tensor | None = None
    """[outputs, groups] uint8; `None`: 8 for 4 bits, 128 for 8 bits, no zero point for FP8."""
    minima: torch.Tensor | None = None
    """[outputs, groups] float32, with codes of 4 bits and zero points of 0; `None` without minima."""
    order: torch.Tensor | None = None
    """[inputs] int64: the input of x for each column, if groups are not ranges of inputs (act-order)."""


def dequantized(weight: CodedWeight) -> torch.Tensor:
    """Return the values [outputs, inputs] in float32; column k belongs to input `order[k]` of x, or k without it."""
    is_float = weight.kind is CodeKind.FP8
    codes = weight.codes.view(torch.float8_e4m3fn).float() if is_float else weight.codes.float()
    inputs = codes.shape[1]

    def spread(groups: torch.Tensor) -> torch.Tensor:
        return groups.float().repeat_interleave(weight.group, dim=1)[:, :inputs]

    if weight.zeros is not None:
        codes = codes - spread(weight.zeros)
    elif weight.kind is not CodeKind.FP8 and weight.minima is None:
        codes = codes - (8 if weight.kind is CodeKind.INT4 else 128)
    values = codes * spread(weight.scales)
    return values if weight.minima is None else values + spread(weight.minima)
