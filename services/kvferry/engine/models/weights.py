"""Parameters from a model's tensors: one dtype, fused where layers read several matrices with the same input."""

from dataclasses import dataclass

import torch

from kvferry.core.errors import ModelFileError
from kvferry.engine.models.random_tensors import RandomTensors
from kvferry.kernels.batch import HeadNorms
from kvferry.kernels.ops import Linear, Ops
from kvferry.model.config import ModelConfig
from kvferry.model.tensors import EMBEDDING, FINAL_NORM, HEAD, TensorSource, check_shapes, layer_prefix


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Norm weights are [hidden]; projections take [T, in]."""

    attention_norm: torch.Tensor
    qkv: Linear
    """[T, hidden] to [T, (H + 2 K) * D]: queries, keys, values."""
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    """[T, hidden] to [T, 2 * intermediate]."""
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A model's parameters."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


def load_weights(
    config: ModelConfig, tensors: TensorSource, ops: Ops, *, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Read every tensor once.

    Raises:
        ModelFileError: a tensor is missing, unexpected, of another shape, or not finite.
    """
    check_shapes(config, tensors.shapes(), f"model {config.name!r}")
    # One after the other: torch's own threads share the work of each. A second thread of ours would bring a second
    # set of them, and gained nothing on two cores.
    reader = _Reader(tensors, ops, dtype, device)
    embedding = reader.tensor(EMBEDDING)
    head = ops.pack_linear(embedding, None) if config.tie_word_embeddings else reader.linear(HEAD)
    layers = tuple(_layer(reader, config, index) for index in range(config.num_layers))
    return Weights(embedding, layers, reader.tensor(FINAL_NORM), head)


def _layer(reader: "_Reader", config: ModelConfig, index: int) -> LayerWeights:
    at = layer_prefix(index)
    attention, mlp = at + "self_attn.", at + "mlp."
    bias = tuple(f"{attention}{x}_proj.bias" for x in "qkv") if config.qkv_bias else ()
    return LayerWeights(
        attention_norm=reader.tensor(at + "input_layernorm.weight"),
        qkv=reader.linear(*(f"{attention}{x}_proj.weight" for x in "qkv"), bias=bias),
        head_norms=_head_norms(reader, attention, config.rms_norm_eps) if config.qk_norm else None,
        output=reader.linear(attention + "o_proj.weight"),
        mlp_norm=reader.tensor(at + "post_attention_layernorm.weight"),
        gate_up=reader.linear(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=reader.linear(mlp + "down_proj.weight"),
    )


def _head_norms(reader: "_Reader", attention: str, epsilon: float) -> HeadNorms:
    query, key = (reader.tensor(f"{attention}{x}_norm.weight") for x in "qk")
    return HeadNorms(query, key, epsilon)


class _Reader:
    """Turns named arrays into parameters of one dtype on one device."""

    def __init__(self, tensors: TensorSource, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = tensors
        self._ops = ops
        self._dtype = dtype
        self._device = device

    def tensor(self, *names: str) -> torch.Tensor:
        """The tensors, one after the other along the first axis, in memory of their own."""
        if isinstance(self._tensors, RandomTensors):  # drawn in place: billions of them would take minutes on a host
            parts = [self._tensors.draw(name).to(self._device, self._dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        arrays = [self._tensors.read(name) for name in names]
        shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
        joined = torch.empty(shape, dtype=self._dtype)
        at = 0
        for name, array in zip(names, arrays, strict=True):
            part = joined[at : at + array.shape[0]]
            # A mapped file's view is read-only, which torch warns about although it only reads here.
            part.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
            if not torch.isfinite(part.sum(dtype=torch.float32)):
                raise ModelFileError(f"tensor {name!r} holds values that are not finite in {self._dtype}")
            at += array.shape[0]
        return joined.to(self._device)

    def linear(self, *names: str, bias: tuple[str, ...] = ()) -> Linear:
        """One projection out of several with the same input."""
        return self._ops.pack_linear(self.tensor(*names), self.tensor(*bias) if bias else None)
