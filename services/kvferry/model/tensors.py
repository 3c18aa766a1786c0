"""Weights by name: which tensors a model must have, in which shape, and how to read one.

Names and shapes are those of Hugging Face checkpoints ([out, in] for projections), whatever the file's format is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.model.config import ModelConfig

Shape = tuple[int, ...]
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One tensor's rows as a file holds them."""

    type_id: int
    """GGUF's number of the type; plain formats have theirs too."""
    data: npt.NDArray[np.uint8]
    """The rows' bytes, flat. May be a read-only view of the mapped file."""
    order: npt.NDArray[np.int64]
    """Which stored row each row of the tensor is."""

    @classmethod
    def plain(cls, type_id: int, data: npt.NDArray[np.uint8], rows: int) -> "Stored":
        """Rows in their own order."""
        return cls(type_id, data, np.arange(rows, dtype=np.int64))


F32, F16, BF16 = 0, 1, 30
"""GGUF's numbers of the plain types."""


class TensorSource(Protocol):
    """Weights that are read one at a time, when asked for. Safe to use from several threads."""

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as float32, C order. May be a read-only view of the mapped file.

        Raises:
            KeyError: there is no tensor of that name.
        """
        ...

    def stored(self, name: str) -> Stored:
        """A matrix as its file holds it, so that nothing is rounded or unpacked on the way.

        Raises:
            KeyError: there is no tensor of that name.
        """
        ...

    def release(self) -> None:
        """Give back the memory that reading took. What is read afterwards, or still looked at, comes in anew."""
        ...


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this configuration has, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {layer_prefix(index) + name: shape for name, shape in layer.items()}
    return shapes


def linear_weights(config: ModelConfig) -> int:
    """Weights that every row meets: all projections of all layers, without embedding and head."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    return config.num_layers * (attention + 3 * config.intermediate_size * config.hidden_size)


def check_shapes(config: ModelConfig, found: Mapping[str, Shape], where: str) -> None:
    """Compare a file's tensors with what its configuration promises.

    Raises:
        ModelFileError: tensors are missing, unexpected or of another shape; the first few are named. Or the
            configuration contradicts itself.
    """
    if config.num_heads % config.num_kv_heads or config.head_dim % 2 or config.num_layers > len(found):
        raise ModelFileError(
            f"{where}: {config.num_layers} layers of {config.num_heads} heads over {config.num_kv_heads} KV heads of"
            f" {config.head_dim} values cannot be, with {len(found)} tensors. The file is damaged"
        )
    beyond = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if beyond:
        raise ModelFileError(f"{where}: end token {beyond[0]} is not in the vocabulary of {config.vocab_size}")
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
        problems.append(f"{len(unexpected)} tensors are not known to {config.architecture} ({_some(unexpected)})")
    if wrong:
        problems.append(f"{len(wrong)} tensors have another shape ({_some(wrong)})")
    if problems:
        raise ModelFileError(f"{where}: {'; '.join(problems)}. The file is damaged or of an unsupported variant")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
