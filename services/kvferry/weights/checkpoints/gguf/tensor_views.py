"""Tensors of a GGUF file under their Hugging Face names, as ranges of rows of the stored tensors.

blk.0.attn_q.weight           -> model.layers.0.self_attn.q_proj.weight
blk.0.attn_qkv.weight         -> q_proj, k_proj, v_proj: consecutive ranges of rows
blk.0.ffn_down_exps.weight    -> mlp.experts.0.down_proj.weight, ...: a range of rows per expert
blk.0.attn_k_b, attn_v_b      -> kv_b_proj.weight, whose heads have transposed keys, then values (`LatentUp`)
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvferry.weights.checkpoints.gguf.header import TensorInfo
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SHARED_GATE,
    SINKS,
    Shape,
    expert_prefix,
    layer_prefix,
)

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_BLOCK = re.compile(r"blk\.(\d{1,9})\.([a-z_]+)(?:\.(\d{1,9}))?\.(weight|bias)")
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ONE_EXPERT = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
"""Names of earlier files, which have a tensor per expert: blk.0.ffn_gate.3.weight."""
_COMPLETE = {"attn_sinks": SINKS, "exp_probs_b": CORRECTION, "ffn_gate_inp_shexp": SHARED_GATE}
"""Tensors whose Hugging Face names do not end like the names in the file."""
ROPE_DIVISORS, LONG_FACTORS, SHORT_FACTORS = FREQUENCIES = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Divisors of the rotary frequencies: of Llama 3.1, and the two lists of LongRoPE."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """A range of rows of a stored tensor. All dimensions but the last one count as rows."""

    info: TensorInfo
    first: int
    """First row."""
    shape: Shape
    """Shape under the Hugging Face name."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the range."""
        return math.prod(self.shape) * self.info.row_bytes // self.info.shape[-1]


@dataclass(frozen=True, slots=True)
class LatentUp:
    """The projection from latent vectors to keys and values [heads * (plain + value), rank] of DeepSeek models, in the
    form of newer files: keys transposed to [heads, rank, plain], and values [heads, value, rank]."""

    keys: TensorInfo
    values: TensorInfo

    @property
    def shape(self) -> Shape:
        """Shape under the Hugging Face name."""
        heads, rank, plain = self.keys.shape
        return (heads * (plain + self.values.shape[1]), rank)


View = TensorView | LatentUp


def views_of(
    tensors: Mapping[str, TensorInfo], names: Mapping[str, str], config: ModelConfig, *, has_fused_mlp: bool
) -> dict[str, View]:
    """Return the tensors of a file by their Hugging Face names. Unknown names are unchanged, and tensors of unexpected
    dimensions are whole, so that the shape check reports them.

    Args:
        tensors: tensors by name in the file.
        names: Hugging Face names, after the layer's prefix, by name in the file; both without `.weight` or `.bias`.
        config: the model's configuration.
        has_fused_mlp: whether `ffn_up` has the rows of gate and up.
    """
    found: dict[str, View] = {}
    for name, info in tensors.items():
        if name not in FREQUENCIES:
            found.update(_views(name, info, names, config, has_fused_mlp=has_fused_mlp))
    for index in range(config.num_layers if config.latent is not None else 0):
        keys, values = (tensors.get(f"blk.{index}.attn_{part}_b.weight") for part in "kv")
        if keys is not None and values is not None and len(keys.shape) == len(values.shape) == 3:
            del found[keys.name], found[values.name]
            found[f"{layer_prefix(index)}self_attn.kv_b_proj.weight"] = LatentUp(keys, values)
    return found


def _views(
    name: str, info: TensorInfo, names: Mapping[str, str], config: ModelConfig, *, has_fused_mlp: bool
) -> Iterator[tuple[str, View]]:
    match = _BLOCK.fullmatch(name)
    if match is None:
        yield _TOP.get(name, name), TensorView(info, 0, info.shape)
        return
    prefix, part, last = layer_prefix(int(match[1])), match[2], match[4]
    if match[3] is not None:
        room = expert_prefix(int(match[3]))
        yield (
            (f"{prefix}{room}{_ONE_EXPERT[part]}.{last}" if part in _ONE_EXPERT else name),
            TensorView(info, 0, info.shape),
        )
    elif (
        part in _EXPERTS
        and config.experts is not None
        and info.shape[0] == config.experts.count
        and int(match[1]) < config.num_layers
    ):
        inner = info.shape[1:]
        for expert in range(config.experts.count):
            rows = expert * math.prod(inner[:-1])
            yield f"{prefix}{expert_prefix(expert)}{_EXPERTS[part]}.{last}", TensorView(info, rows, inner)
    elif part == "attn_qkv":
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        yield from _split(name, info, f"{prefix}self_attn.", (("q_proj", q), ("k_proj", kv), ("v_proj", kv)))
    elif part == "ffn_up" and has_fused_mlp:
        inner_size = config.intermediate_size
        yield from _split(name, info, f"{prefix}mlp.", (("gate_proj", inner_size), ("up_proj", inner_size)))
    elif part in _COMPLETE:
        shape = (1, *info.shape) if _COMPLETE[part] == SHARED_GATE and len(info.shape) == 1 else info.shape
        yield f"{prefix}{_COMPLETE[part]}", TensorView(info, 0, shape)
    elif part in names:
        yield f"{prefix}{names[part]}.{last}", TensorView(info, 0, info.shape)
    else:
        yield name, TensorView(info, 0, info.shape)


def _split(name: str, info: TensorInfo, prefix: str, parts: tuple[tuple[str, int], ...]) -> Iterator[tuple[str, View]]:
    """Yield the parts of a fused projection or of its biases, each with its number of rows; the whole tensor if the
    number of rows is not their sum."""
    if len(info.shape) > 2 or info.shape[0] != sum(rows for _, rows in parts):
        yield name, TensorView(info, 0, info.shape)
        return
    rows_of = info if len(info.shape) == 2 else replace(info, shape=(*info.shape, 1))
    first = 0
    for part, rows in parts:
        yield f"{prefix}{part}.{name.rpartition('.')[2]}", TensorView(rows_of, first, (rows, *info.shape[1:]))
        first += rows
