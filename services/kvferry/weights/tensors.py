"""Names and shapes of the tensors of a model, and the interface to read them.

Names and shapes follow Hugging Face checkpoints for all file formats ([out, in] for projections).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.config import Experts, Latent, ModelConfig, NormPlacement, Scoring

Shape = tuple[int, ...]
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SINKS = "self_attn.sinks"
"""Attention sinks [heads], after the layer's prefix."""


class Stored:
    """The rows of a tensor in their stored format."""

    __slots__ = ("_load", "order", "type_id")

    def __init__(
        self,
        type_id: int,
        data: npt.NDArray[np.uint8] | Callable[[], npt.NDArray[np.uint8]],
        order: npt.NDArray[np.int64],
    ) -> None:
        """
        Args:
            type_id: number of the row format: a GGUF type, which also covers unquantized types, or one of
                `quantized.representation.Kept`.
            data: bytes of the rows, flat, in stored order, or a function that returns them. May be a read-only view of
                the mapped file.
            order: index of the stored row for each row of the tensor.
        """
        self.type_id = type_id
        self._load = data
        self.order = order

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Bytes of the rows, flat, in stored order."""
        return self._load() if callable(self._load) else self._load

    @classmethod
    def plain(cls, type_id: int, data: npt.NDArray[np.uint8], rows: int) -> "Stored":
        """Create a tensor whose rows are stored in order.

        Args:
            type_id: number of the row format.
            data: the rows' bytes, one row after another.
            rows: number of rows.
        """
        return cls(type_id, data, np.arange(rows, dtype=np.int64))

    @classmethod
    def later(cls, type_id: int, load: Callable[[], npt.NDArray[np.uint8]], rows: int) -> "Stored":
        """Create a tensor whose rows, in order, are converted each time `data` is read.

        Args:
            type_id: number of the row format.
            load: returns the rows' bytes, one row after another.
            rows: number of rows.
        """
        return cls(type_id, load, np.arange(rows, dtype=np.int64))

    def reordered(self, order: npt.NDArray[np.int64]) -> "Stored":
        """Return the tensor with rows in another order: row i is the previous row `order[i]`."""
        return Stored(self.type_id, self._load, self.order[order])


F32, F16, BF16 = 0, 1, 30
"""GGUF type numbers of the unquantized types."""


class TensorSource(Protocol):
    """Reads weights one tensor at a time. Thread-safe."""

    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor by name."""
        ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a tensor as float32 in C order. The result may be a read-only view of the mapped file.

        Raises:
            KeyError: the model has no tensor `name`.
        """
        ...

    def stored(self, name: str) -> Stored:
        """Return a matrix in its stored format, without rounding or dequantization.

        Raises:
            KeyError: the model has no tensor `name`.
        """
        ...

    def weights(self) -> list[str]:
        """Return lines for the log: the types of the tensors, how quantized matrices are kept, and why no smaller type
        was chosen. May read all scales."""
        ...

    def release(self) -> None:
        """Release the memory of the mapped file; later reads load it again."""
        ...


def layer_prefix(layer: int) -> str:
    """Return the prefix of the tensor names of a layer."""
    return f"model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of the norms of a layer, after its prefix; `None` where the layer has no norm."""

    attention: str | None
    """Norm of the input of attention."""
    attention_output: str | None
    mlp: str | None
    """Norm of the input of the MLP."""
    mlp_output: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The norms that the layer has."""
        found = (self.attention, self.attention_output, self.mlp, self.mlp_output)
        return tuple(name for name in found if name is not None)


_INPUT, _AFTER_ATTENTION = "input_layernorm.weight", "post_attention_layernorm.weight"
_BEFORE_MLP, _AFTER_MLP = "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"
_LAYER_NORMS = {
    NormPlacement.BEFORE: LayerNorms(_INPUT, None, _AFTER_ATTENTION, None),
    NormPlacement.AFTER: LayerNorms(None, _AFTER_ATTENTION, None, _AFTER_MLP),
    NormPlacement.BOTH: LayerNorms(_INPUT, _AFTER_ATTENTION, _BEFORE_MLP, _AFTER_MLP),
}


def layer_norms(config: ModelConfig) -> LayerNorms:
    """Return the names of the norms of a layer. Llama's `post_attention_layernorm` is on the input of the MLP."""
    return _LAYER_NORMS[config.norm_placement]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of all tensors of a model with this configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
    }
    if config.latent is not None:
        layer = _latent_shapes(config.latent, config.num_heads, hidden)
    layer |= dict.fromkeys(layer_norms(config).names, (hidden,))
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.attention_sinks:
        layer[SINKS] = (config.num_heads,)
    if config.qk_norm:
        spans = config.qk_norm_spans_heads
        layer |= {
            "self_attn.q_norm.weight": (q if spans else config.head_dim,),
            "self_attn.k_norm.weight": (kv if spans else config.head_dim,),
        }
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    dense = _mlp_shapes("mlp.", hidden, inner)
    sparse = _expert_shapes(config.experts, hidden) if config.experts is not None else {}
    for index in range(config.num_layers):
        mlp = dense if config.experts_of(index) is None else sparse
        shapes |= {layer_prefix(index) + name: shape for name, shape in (layer | mlp).items()}
    return shapes


def _latent_shapes(latent: Latent, heads: int, hidden: int) -> dict[str, Shape]:
    queries, at = heads * (latent.plain + latent.rotated), "self_attn."
    shapes: dict[str, Shape] = {
        f"{at}kv_a_proj_with_mqa.weight": (latent.width, hidden),
        f"{at}kv_a_layernorm.weight": (latent.rank,),
        f"{at}kv_b_proj.weight": (heads * (latent.plain + latent.value), latent.rank),
        f"{at}o_proj.weight": (hidden, heads * latent.value),
    }
    if latent.query_rank is None:
        return shapes | {f"{at}q_proj.weight": (queries, hidden)}
    return shapes | {
        f"{at}q_a_proj.weight": (latent.query_rank, hidden),
        f"{at}q_a_layernorm.weight": (latent.query_rank,),
        f"{at}q_b_proj.weight": (queries, latent.query_rank),
    }


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


ROUTER = "mlp.gate.weight"
"""Weight of the router [experts, hidden], after the layer's prefix."""
ROUTER_BIAS = "mlp.gate.bias"
CORRECTION = "mlp.gate.e_score_correction_bias"
"""Corrections that are added to experts' scores when experts are chosen, [experts]."""
SHARED, SHARED_GATE = "mlp.shared_expert.", "mlp.shared_expert_gate.weight"
"""Prefix of the shared expert's tensors, and its gate [1, hidden]."""


def expert_prefix(index: int) -> str:
    """Return the prefix of the tensor names of an expert, after the layer's prefix."""
    return f"mlp.experts.{index}."


def _expert_shapes(experts: Experts, hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {ROUTER: (experts.count, hidden)}
    if experts.has_biases:
        shapes[ROUTER_BIAS] = (experts.count,)
    for index in range(experts.count):
        shapes |= _mlp_shapes(expert_prefix(index), hidden, experts.intermediate_size)
        if experts.has_biases:
            sizes = {"gate_proj": experts.intermediate_size, "up_proj": experts.intermediate_size, "down_proj": hidden}
            shapes |= {f"{expert_prefix(index)}{name}.bias": (size,) for name, size in sizes.items()}
    if experts.scoring is Scoring.SIGMOID:
        shapes[CORRECTION] = (experts.count,)
    if experts.shared_size and experts.has_shared_gate:
        shapes[SHARED_GATE] = (1, hidden)
    if experts.shared_size:
        shapes |= _mlp_shapes(SHARED, hidden, experts.shared_size)
    return shapes


def linear_weights(config: ModelConfig) -> int:
    """Return the number of weights in all layers' projections that compute one token, without embedding and output
    head. Of the experts, only the active ones count."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if config.latent is not None:
        shapes = _latent_shapes(config.latent, config.num_heads, config.hidden_size)
        attention = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2) // config.hidden_size
    total = 0
    for index in range(config.num_layers):
        experts, inner = config.experts_of(index), 3 * config.intermediate_size
        if experts is not None:
            inner = experts.count + 3 * (experts.active * experts.intermediate_size + experts.shared_size)
        total += (attention + inner) * config.hidden_size
    return total


def check_shapes(config: ModelConfig, found: Mapping[str, Shape], where: str) -> None:
    """Check a file's tensors against its configuration.

    Args:
        config: configuration of the model.
        found: shape of each tensor in the file.
        where: path of the file, for error messages.

    Raises:
        ModelFileError: tensors are missing, unexpected or have the wrong shape (the message lists the first few), or
            the configuration is inconsistent.
    """
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{where}: the number of heads must be a multiple of the {config.num_kv_heads} KV heads, not "
            f"{config.num_heads}. The file is damaged"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{where}: the head size must be even, not {config.head_dim}. The file is damaged")
    if config.num_layers > len(found):
        raise ModelFileError(
            f"{where}: there are only {len(found)} tensors for {config.num_layers} layers. The file is damaged"
        )
    beyond = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if beyond:
        raise ModelFileError(f"{where}: end token {beyond[0]} is not in the vocabulary of {config.vocab_size} tokens")
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing ({_some(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors are unknown for {config.architecture} ({_some(unexpected)})")
    if wrong:
        problems.append(f"{len(wrong)} tensors have a wrong shape ({_some(wrong)})")
    if problems:
        raise ModelFileError(f"{where}: {'; '.join(problems)}. The file is damaged or of an unsupported variant")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
