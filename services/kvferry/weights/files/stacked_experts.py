"""Splits tensors that hold all experts of a layer into a tensor per expert and projection.

gpt-oss stores, under a layer's prefix and `mlp.experts.`, gate_up_proj [experts, hidden, 2 * inner] and down_proj
[experts, inner, hidden], in the order [inputs, outputs], and their biases [experts, outputs] with the suffix `_bias`.
The outputs of gate and up alternate.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.weights.config import Experts
from kvferry.weights.files.safetensors_file import StoredTensor, as_float32
from kvferry.weights.tensors import Shape, expert_prefix

_STACKED = re.compile(r"^(model\.layers\.(\d{1,9})\.)mlp\.experts\.(gate_up_proj|down_proj)(_bias)?$")
OUTPUTS: Mapping[str, Mapping[str, slice]] = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Outputs of each projection in a stacked tensor."""


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of one expert, which is part of a stacked tensor."""

    stack: StoredTensor
    expert: int
    outputs: slice
    is_transposed: bool
    """Whether the stack has [inputs, outputs] instead of [outputs, ..]."""

    @property
    def dtype(self) -> str:
        """Type of the values, as in the file."""
        return self.stack.dtype

    @property
    def shape(self) -> Shape:
        """Shape as a tensor of one expert: [outputs, inputs] or [outputs]."""
        inner = self.stack.shape[1:]
        if self.is_transposed:
            inner = inner[::-1]
        return (len(range(*self.outputs.indices(inner[0]))), *inner[1:])

    def raw(self) -> npt.NDArray[np.generic]:
        """Return the values in C order; types that numpy lacks are integers of the same size."""
        found = self.stack.raw()[self.expert]
        return np.ascontiguousarray((found.T if self.is_transposed else found)[self.outputs])

    def values(self) -> npt.NDArray[np.float32]:
        """Read the values as float32."""
        return as_float32(self.raw(), self.dtype)


def split_experts(
    tensors: Mapping[str, StoredTensor], experts: Experts, num_layers: int
) -> tuple[dict[str, StoredTensor], dict[str, ExpertTensor]]:
    """Return the tensors by name, with each stack replaced by one tensor per expert. A stack of an unknown layer, or
    with an unexpected number of experts or dimensions, is left for the shape check.

    Args:
        tensors: tensors of the files by name.
        experts: the model's experts.
        num_layers: number of the model's layers.
    """
    plain: dict[str, StoredTensor] = {}
    found: dict[str, ExpertTensor] = {}
    for name, stored in tensors.items():
        match = _STACKED.match(name)
        dimensions = 2 if match and match[4] else 3
        is_known = match is not None and int(match[2]) < num_layers
        if match is None or not is_known or len(stored.shape) != dimensions or stored.shape[0] != experts.count:
            plain[name] = stored
            continue
        last = "bias" if match[4] else "weight"
        for index in range(experts.count):
            for projection, outputs in OUTPUTS[match[3]].items():
                found[f"{match[1]}{expert_prefix(index)}{projection}.{last}"] = ExpertTensor(
                    stored, index, outputs, is_transposed=not match[4]
                )
    return plain, found
