"""Adapters for the torch kernel backends: weights as tensors, and the rows of a step grouped by adapter."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.device_batch import to_device
from kvferry.kernels.batch import LowRankGroup, LowRankWeights
from kvferry.weights.adapters.adapter_folder import Adapter
from kvferry.weights.config import ModelConfig

QKV, OUTPUT, GATE_UP, DOWN = "qkv", "output", "gate_up", "down"
Layer = dict[str, tuple[LowRankWeights, ...]]
"""Updates by the name of the fused projection."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter on a torch device."""

    layers: tuple[Layer, ...]
    num_bytes: int


def pack_adapter(adapter: Adapter, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> TorchAdapter:
    """Convert an adapter to tensors.

    Args:
        adapter: the adapter, with float32 matrices.
        config: configuration of the model.
        dtype: dtype of the tensors.
        device: device of the tensors.
    """
    places = _places(config)
    layers: list[Layer] = []
    num_bytes = 0
    for layer in range(config.num_layers):
        updates: Layer = {}
        for part, (name, first) in places.items():
            update = adapter.updates.get((layer, part))
            if update is None:
                continue
            a, b = (torch.tensor(values, dtype=dtype, device=device) for values in (update.a, update.b))
            num_bytes += a.nbytes + b.nbytes
            updates[name] = (*updates.get(name, ()), LowRankWeights(a, b, first))
        layers.append(updates)
    return TorchAdapter(tuple(layers), num_bytes)


def _places(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return the fused projection of each linear layer, and the column of its first output."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (QKV, 0),
        "self_attn.k_proj": (QKV, q),
        "self_attn.v_proj": (QKV, q + kv),
        "self_attn.o_proj": (OUTPUT, 0),
        "mlp.gate_proj": (GATE_UP, 0),
        "mlp.up_proj": (GATE_UP, config.intermediate_size),
        "mlp.down_proj": (DOWN, 0),
    }


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step, each with its rows."""

    groups: Sequence[tuple[torch.Tensor, TorchAdapter]]

    def of(self, layer: int, name: str) -> list[LowRankGroup]:
        """Return the updates of a fused projection, by adapter.

        Args:
            layer: index of the layer.
            name: name of the fused projection, for example `QKV`.
        """
        return [
            LowRankGroup(rows, weights)
            for rows, adapter in self.groups
            for weights in adapter.layers[layer].get(name, ())
        ]


def step_adapters(batch: StepBatch, device: torch.device) -> StepAdapters | None:
    """Group the rows of a batch by adapter; `None` if no row has an adapter.

    Args:
        batch: the step's batch, whose adapters are `TorchAdapter`s.
        device: device of the row numbers.
    """
    if not batch.adapters:
        return None
    groups: list[tuple[torch.Tensor, TorchAdapter]] = []
    for index, adapter in enumerate(batch.adapters):
        assert isinstance(adapter, TorchAdapter)
        rows = np.flatnonzero(batch.adapter_of_row == index)
        groups.append((to_device(torch.from_numpy(rows), device), adapter))
    return StepAdapters(groups)
