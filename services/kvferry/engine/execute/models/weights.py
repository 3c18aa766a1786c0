"""Weight loading for the torch decoder: parameters in one dtype; projections with the same input are fused."""

from dataclasses import dataclass

import torch

from kvferry.core.errors import ModelFileError
from kvferry.engine.execute.models.coded_linears import CodedLinears
from kvferry.engine.execute.models.latent import LatentWeights
from kvferry.engine.execute.models.random_tensors import RandomTensors
from kvferry.kernels.batch import ExpertWeights, HeadNorms, LatentUp
from kvferry.kernels.ops import Linear, Ops
from kvferry.weights.config import Experts, Latent, ModelConfig, Scoring
from kvferry.weights.tensors import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROUTER,
    ROUTER_BIAS,
    SHARED,
    SHARED_GATE,
    SINKS,
    TensorSource,
    check_shapes,
    expert_prefix,
    layer_norms,
    layer_prefix,
)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """A gated MLP, of a layer or of an expert."""

    gate_up: Linear
    """[T, hidden] to [T, 2 * intermediate]."""
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """Router and experts of a layer."""

    router: Linear
    """[T, hidden] to [T, experts]."""
    experts: tuple[Mlp, ...] | ExpertWeights
    """One MLP per expert, or stacked weights of all experts for `Ops.run_experts`."""
    shared: Mlp | None
    """Shared expert, which computes all rows; `None` if there is none."""
    shared_gate: Linear | None
    """[T, hidden] to [T, 1]; `None` if the shared expert is not weighted."""
    correction: torch.Tensor | None
    """[experts] float32: added to scores when experts are chosen; `None` if nothing is added."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Parameters of one layer. Norm weights are [hidden], or `None` where the layer has no norm; inputs of projections
    are [T, in]."""

    attention_norm: torch.Tensor | None
    qkv: Linear | LatentWeights
    """[T, hidden] to [T, (H + 2 K) * D]: queries, keys, values; or latent attention."""
    head_norms: HeadNorms | None
    """Norms of each query and key head."""
    whole_norms: HeadNorms | None
    """Norms over all query heads together and over all key heads together."""
    output: Linear
    sinks: torch.Tensor | None
    """[H] float32: attention sinks."""
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | MixtureOfExperts
    mlp_output_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Parameters of a model on a torch device."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear
    coded_values: int = 0
    """Number of weights that are kept as codes."""
    coded_bytes: int = 0
    """Bytes of these codes, with their scales."""


def load_weights(
    config: ModelConfig, tensors: TensorSource, ops: Ops, *, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Load all parameters, reading every tensor once.

    Args:
        config: configuration of the model.
        tensors: the model's tensors.
        ops: kernels, which define the packed form of linear layers.
        dtype: dtype of the parameters.
        device: device of the parameters.

    Raises:
        ModelFileError: a tensor is missing or unexpected, or has a wrong shape or non-finite values.
    """
    check_shapes(config, tensors.shapes(), f"model {config.name!r}")
    # Tensors are read sequentially, since torch parallelizes each conversion. A second Python thread would start a
    # second set of torch threads and was not faster on two cores.
    reader = Reader(tensors, ops, dtype, device)
    embedding = reader.tensor(EMBEDDING)
    head = ops.pack_linear(embedding, None) if config.tie_word_embeddings else reader.linear(HEAD)
    layers = tuple(_layer(reader, config, index) for index in range(config.num_layers))
    reader.coded.report()
    if reader.coded.values and device.type == "cuda":
        torch.cuda.empty_cache()  # codes were converted on the device; what is free here is counted for KV
    final = reader.norm(FINAL_NORM, config)
    return Weights(embedding, layers, final, head, reader.coded.values, reader.coded.num_bytes)


def _layer(reader: "Reader", config: ModelConfig, index: int) -> LayerWeights:
    at = layer_prefix(index)
    attention = at + "self_attn."
    bias = tuple(f"{attention}{x}_proj.bias" for x in "qkv") if config.qkv_bias else ()
    norms = layer_norms(config)
    pair = _head_norms(reader, attention, config) if config.qk_norm else None

    def norm(name: str | None) -> torch.Tensor | None:
        return None if name is None else reader.norm(at + name, config)

    return LayerWeights(
        attention_norm=norm(norms.attention),
        qkv=reader.linear(*(f"{attention}{x}_proj.weight" for x in "qkv"), bias=bias)
        if config.latent is None
        else _latent(reader, attention, config.num_heads, config.latent),
        head_norms=None if config.qk_norm_spans_heads else pair,
        whole_norms=pair if config.qk_norm_spans_heads else None,
        output=reader.linear(
            attention + "o_proj.weight", bias=(attention + "o_proj.bias",) if config.output_bias else ()
        ),
        sinks=reader.tensor(at + SINKS).float() if config.attention_sinks else None,
        attention_output_norm=norm(norms.attention_output),
        mlp_norm=norm(norms.mlp),
        mlp=_mlp(reader, at + "mlp.") if config.experts_of(index) is None else _mixture(reader, config, at),
        mlp_output_norm=norm(norms.mlp_output),
    )


def _latent(reader: "Reader", at: str, heads: int, latent: Latent) -> LatentWeights:
    up = reader.tensor(at + "kv_b_proj.weight").view(heads, latent.plain + latent.value, latent.rank)
    has_down = latent.query_rank is not None
    return LatentWeights(
        query_down=reader.linear(at + "q_a_proj.weight") if has_down else None,
        query_norm=reader.tensor(at + "q_a_layernorm.weight") if has_down else None,
        query=reader.linear(at + ("q_b_proj.weight" if has_down else "q_proj.weight")),
        down=reader.linear(at + "kv_a_proj_with_mqa.weight"),
        norm=reader.tensor(at + "kv_a_layernorm.weight"),
        up=LatentUp(up[:, : latent.plain].contiguous(), up[:, latent.plain :].contiguous()),
    )


def _mlp(reader: "Reader", at: str, *, has_biases: bool = False) -> Mlp:
    first, last = (at + "gate_proj.", at + "up_proj."), (at + "down_proj.",)

    def linear(modules: tuple[str, ...]) -> Linear:
        bias = tuple(f"{module}bias" for module in modules) if has_biases else ()
        return reader.linear(*(f"{module}weight" for module in modules), bias=bias)

    return Mlp(linear(first), linear(last))


def _mixture(reader: "Reader", config: ModelConfig, at: str) -> MixtureOfExperts:
    experts = config.experts
    assert experts is not None
    has_shared = experts.shared_size > 0
    return MixtureOfExperts(
        reader.linear(at + ROUTER, bias=(at + ROUTER_BIAS,) if experts.has_biases else ()),
        _experts(reader, at, experts),
        _mlp(reader, at + SHARED) if has_shared else None,
        reader.linear(at + SHARED_GATE) if has_shared and experts.has_shared_gate else None,
        reader.tensor(at + CORRECTION).float() if experts.scoring is Scoring.SIGMOID else None,
    )


def _experts(reader: "Reader", at: str, experts: Experts) -> tuple[Mlp, ...] | ExpertWeights:
    prefixes = [at + expert_prefix(index) for index in range(experts.count)]
    if not reader.stacks_experts:
        return tuple(_mlp(reader, prefix, has_biases=experts.has_biases) for prefix in prefixes)

    def stacked(*names: str) -> torch.Tensor:
        return reader.stacked([[prefix + name for name in names] for prefix in prefixes])

    has_biases = experts.has_biases
    return ExpertWeights(
        gate_up=stacked("gate_proj.weight", "up_proj.weight"),
        gate_up_bias=stacked("gate_proj.bias", "up_proj.bias") if has_biases else None,
        down=stacked("down_proj.weight"),
        down_bias=stacked("down_proj.bias") if has_biases else None,
    )


def _head_norms(reader: "Reader", attention: str, config: ModelConfig) -> HeadNorms:
    query, key = (reader.norm(f"{attention}{x}_norm.weight", config) for x in "qk")
    return HeadNorms(query, key, config.rms_norm_eps)


class Reader:
    """Reader that converts named tensors to parameters of one dtype on one device."""

    def __init__(self, tensors: TensorSource, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            tensors: the stored tensors, read as float32, or random ones, drawn on `device`.
            ops: operations of the kernel backend, which pack the linear layers.
            dtype: floating-point type of the parameters.
            device: device of the parameters.
        """
        self._tensors = tensors
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self.coded = CodedLinears(tensors, ops, device)
        """The projections whose weights stay codes."""

    def tensor(self, *names: str) -> torch.Tensor:
        """Read tensors and concatenate them along the first axis, [sum of their rows, ..], in newly allocated memory.

        Raises:
            ModelFileError: a tensor has values that are not finite in this dtype.
        """
        # Generated on the device, since billions of values would take minutes on the host.
        if isinstance(self._tensors, RandomTensors):
            parts = [self._tensors.draw(name).to(self._device, self._dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        arrays = [self._tensors.read(name) for name in names]
        shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
        joined = torch.empty(shape, dtype=self._dtype)
        at = 0
        for name, array in zip(names, arrays, strict=True):
            part = joined[at : at + array.shape[0]]
            # Views of a mapped file are read-only; torch warns about them, although `copy_` only reads.
            part.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
            if not torch.isfinite(part.sum(dtype=torch.float32)):
                raise ModelFileError(f"tensor {name!r} holds values that are not finite in {self._dtype}")
            at += array.shape[0]
        return joined.to(self._device)

    @property
    def stacks_experts(self) -> bool:
        """Whether the backend runs all experts of a layer at once."""
        return self._ops.run_experts is not None

    def stacked(self, names: list[list[str]]) -> torch.Tensor:
        """Read one stacked tensor [items, ..]; each item is the concatenation of the tensors named in one item of
        `names`. Besides the result, only one item is in memory."""
        first = self.tensor(*names[0])
        stack = torch.empty((len(names), *first.shape), dtype=self._dtype, device=self._device)
        stack[0] = first
        for index, each in enumerate(names[1:], 1):
            stack[index] = self.tensor(*each)
        return stack

    def norm(self, name: str, config: ModelConfig) -> torch.Tensor:
        """Read the weight [n] of a norm, with the model family's offset.

        Args:
            name: name of the tensor in the checkpoint.
            config: configuration of the model.
        """
        weight = self.tensor(name)
        return weight + config.norm_offset if config.norm_offset else weight

    def linear(self, *names: str, bias: tuple[str, ...] = ()) -> Linear:
        """Read and fuse projections that have the same input. Their weights stay codes if the kernels support it."""
        added = self.tensor(*bias) if bias else None
        coded = self.coded.linear(names, added)
        return self._ops.pack_linear(self.tensor(*names), added) if coded is None else coded
