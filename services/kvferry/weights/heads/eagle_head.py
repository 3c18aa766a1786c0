"""EAGLE heads: a decoder layer that continues the hidden states of the target model (Li et al., EAGLE, 2024, section
4; EAGLE-3, 2025, section 3).

    row of position p   token t(p + 1), hidden state h(p) of the target model   ─►  token t(p + 2)

    EAGLE     x = fc [embedding of t, h]                                 h after the final norm
              layer without norm on its input:   q, k, v from x          logits by the target model's output head
    EAGLE-3   h = fc [h of a low, a middle and a high layer]             inputs of these layers
              q, k, v from [norm(embedding of t), norm(h)], added to h   logits = lm_head norm(output), of fewer tokens

The output of the layer takes the place of h in the row of the next draft token. Embeddings, and the output head of
EAGLE, are the target model's; copies of them in the file are not read.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.safetensors_dir import read_json
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.rope_fields import read_rope
from kvferry.weights.heads.head_files import CONFIG_FILE, HeadTensors, open_head
from kvferry.weights.tensors import Shape, layer_prefix

LAYER = layer_prefix(0)
"""Prefix of the layer's tensors."""
FC, FC_BIAS, HEAD, NORM, D2T, T2D = "fc.weight", "fc.bias", "lm_head.weight", "norm.weight", "d2t", "t2d"
EMBEDDING_NORM, HIDDEN_NORM = LAYER + "input_layernorm.weight", LAYER + "hidden_norm.weight"
"""Norms of EAGLE-3's two inputs."""
_FILES = ("model.safetensors",)
_RENAMED = {"midlayer.": LAYER, "layers.0.": LAYER, "model.layers.0.": LAYER, "model.": ""}
_COPIES = ("embed_tokens.weight",)
_MAX_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """A head whose files fit a model."""

    config: ModelConfig
    """Configuration of the layer; its vocabulary is the draft vocabulary."""
    layers: tuple[int, ...]
    """EAGLE-3: layers of the target model whose inputs are the hidden states. Empty: they are its last hidden states
    after the final norm."""
    tensors: HeadTensors
    """Tensors by the names in this module, and a Llama layer's tensors under the prefix `LAYER`."""
    token_ids: npt.NDArray[np.int64] | None
    """[draft vocabulary]: token of the target model by token of the head; `None` if they are the same."""

    @property
    def is_fused(self) -> bool:
        """Whether this is an EAGLE-3 head."""
        return bool(self.layers)


def read_eagle(folder: Path, model: ModelConfig) -> EagleHead:
    """Read and check a head.

    Args:
        folder: the folder with config.json and model.safetensors.
        model: configuration of the target model.

    Raises:
        ModelFileError: a file is missing or damaged, the head is of an unknown variant, or it does not fit the model;
            the message names the file, the field or tensor, its value and a remedy.
    """
    where = folder / CONFIG_FILE
    fields = ConfigFields(read_json(where), where)
    tensors = open_head(folder, _FILES, _RENAMED, _COPIES)
    is_fused = HIDDEN_NORM in tensors
    config = _config(fields, model, has_bias=LAYER + "self_attn.q_proj.bias" in tensors, is_fused=is_fused)
    layers = _layers(fields, model) if is_fused else ()
    fields.refuse_unread()
    shapes = _shapes(config, len(layers), tensors)
    tensors.check(shapes, whole=(D2T, T2D))
    return EagleHead(config, layers, tensors, _token_ids(tensors, config.vocab_size, model.vocab_size))


def _config(fields: ConfigFields, model: ModelConfig, *, has_bias: bool, is_fused: bool) -> ModelConfig:
    """Return the configuration of the head's layer, as for a Llama model."""
    hidden, vocabulary = fields.whole("hidden_size"), fields.whole("vocab_size")
    for field, value, expected in (
        ("hidden_size", hidden, model.hidden_size),
        ("target_hidden_size", fields.whole("target_hidden_size", model.hidden_size), model.hidden_size),
        ("vocab_size", vocabulary, model.vocab_size),
        ("num_hidden_layers", fields.whole("num_hidden_layers", 1), 1),
    ):
        if value != expected:
            raise ModelFileError(
                f"{fields.where}: {field} is {value}, but {model.name} needs {expected}; use a head that was trained "
                "for this model",
                field=field,
            )
    drafted = fields.whole("draft_vocab_size", vocabulary) if is_fused else vocabulary
    if drafted > vocabulary:
        raise ModelFileError(
            f"{fields.where}: draft_vocab_size is {drafted}, more than vocab_size {vocabulary}; correct it",
            field="draft_vocab_size",
        )
    heads = fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", max(1, hidden // heads))
    rope = read_rope(fields, head_dim, default_theta=10000.0)
    if rope.rotary_dim != head_dim:
        fields.refuse("partial_rotary_factor")
    fields.ignore("attention_bias", "qkv_bias")  # read from the tensors instead
    found = ModelConfig(
        name="eagle",
        architecture="llama",
        vocab_size=drafted,
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        # Rows are counted from the first one of the head's context, which is not longer than the model's.
        max_model_tokens=min(model.max_model_tokens, _MAX_CONTEXT),
        rope_scaling=rope.scaling,
        qkv_bias=has_bias,
    )
    if found.num_heads % found.num_kv_heads or found.head_dim % 2 or found.head_dim > 1024:
        raise ModelFileError(
            f"{fields.where}: {found.num_heads} attention heads with {found.num_kv_heads} KV heads of size "
            f"{found.head_dim} are not supported; correct num_attention_heads, num_key_value_heads or head_dim",
            field="num_attention_heads",
        )
    return found


def _layers(fields: ConfigFields, model: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head reads."""
    inner = fields.inner("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    value = fields.value(key)
    if value is None and inner is not None:
        value = inner.value(key)
    count = model.num_layers
    if value is None:
        value = [2, count // 2, count - 3]
    if not isinstance(value, list) or len(value) != 3 or not all(type(i) is int and 0 <= i < count for i in value):
        raise ModelFileError(
            f"{fields.where}: {key} must be three layers from 0 to {count - 1}, not {repr(value)[:60]}; use a head "
            "that was trained for this model",
            field=key,
        )
    return tuple(value)


def _shapes(config: ModelConfig, num_layers: int, tensors: HeadTensors) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inputs = 2 * hidden if num_layers else hidden
    attention = LAYER + "self_attn."
    shapes: dict[str, Shape] = {
        FC: (hidden, (num_layers or 2) * hidden),
        f"{attention}q_proj.weight": (q, inputs),
        f"{attention}k_proj.weight": (kv, inputs),
        f"{attention}v_proj.weight": (kv, inputs),
        f"{attention}o_proj.weight": (hidden, q),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
        f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {f"{attention}{x}_proj.bias": (size,) for x, size in (("q", q), ("k", kv), ("v", kv))}
    if FC_BIAS in tensors:
        shapes[FC_BIAS] = (hidden,)
    if num_layers:
        shapes |= {EMBEDDING_NORM: (hidden,), HIDDEN_NORM: (hidden,), NORM: (hidden,)}
        shapes[HEAD] = (config.vocab_size, hidden)
        # Without these, the head drafts from the whole vocabulary.
        shapes |= {D2T: (config.vocab_size,)} if D2T in tensors else {}
        shapes |= {T2D: tensors.shapes()[T2D]} if T2D in tensors else {}
    return shapes


def _token_ids(tensors: HeadTensors, drafted: int, vocabulary: int) -> npt.NDArray[np.int64] | None:
    """Return the tokens of the target model by token of the head: d2t has the differences of the two ids."""
    if D2T not in tensors:
        if drafted != vocabulary:
            tensors.refuse(D2T, "is missing; without it, draft_vocab_size must be vocab_size. Save the head again")
        return None
    ids = np.arange(drafted) + tensors.whole_numbers(D2T)
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) != drafted:
        tensors.refuse(D2T, f"does not list {drafted} different tokens of {vocabulary}; save the head again")
    if T2D in tensors:
        expected = np.zeros(vocabulary, np.int64)
        expected[ids] = 1
        if not np.array_equal(tensors.whole_numbers(T2D), expected):
            tensors.refuse(T2D, "does not have the tokens of d2t; save the head again")
    return ids
