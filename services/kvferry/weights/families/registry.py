"""The families that can be served, by their class in config.json, and the reader of config.json for all of them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvferry.core.errors import ModelFileError
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields, Json, listed
from kvferry.weights.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from kvferry.weights.families.family import Family
from kvferry.weights.families.gemma import GEMMA2, GEMMA3
from kvferry.weights.families.gpt_oss import GPT_OSS
from kvferry.weights.families.granite import GRANITE
from kvferry.weights.families.image_classes import GEMMA3_IMAGES, MISTRAL3, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from kvferry.weights.families.llama import LLAMA, MISTRAL
from kvferry.weights.families.mixtures import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from kvferry.weights.families.olmo2 import OLMO2
from kvferry.weights.families.phi3 import PHI3
from kvferry.weights.families.qwen import QWEN2, QWEN3
from kvferry.weights.families.rope_fields import read_rope
from kvferry.weights.families.smollm3 import SMOLLM3
from kvferry.weights.families.text_part import text_fields

_MAX_MODEL_TOKENS = 4 << 20
"""Longest context in tokens; it bounds the tables of rotary angles, which have a row per position."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            LLAMA,
            MISTRAL,
            QWEN2,
            QWEN3,
            PHI3,
            OLMO2,
            GRANITE,
            SMOLLM3,
            GEMMA2,
            GEMMA3,
            MIXTRAL,
            QWEN2_MOE,
            QWEN3_MOE,
            GPT_OSS,
            DEEPSEEK_V2,
            DEEPSEEK_V3,
            GEMMA3_IMAGES,
            MISTRAL3,
            QWEN2_VL,
            QWEN2_5_VL,
            QWEN3_VL,
        )
    }
)
"""The families by name."""
_BY_CLASS = {family.architecture: family for family in FAMILIES.values()}
_MAX_LAYERS = 4096
_MAX_HEAD_DIM = 1024
_MAX_ROTATED = 1 << 30
"""Most values of a head in all positions of the context: the size of a table of rotary angles."""
_MAX_EXPERTS = 1 << 17
"""Most experts in all layers, each of which has several tensors; published models have up to 25,000."""


def family_of(raw: Json, where: Path) -> Family:
    """Return the family of a config.json.

    Raises:
        ModelFileError: its class is not supported; the message lists all classes.
    """
    named = listed(raw.get("architectures"))
    first = named[0] if named else None
    if not isinstance(first, str) or first not in _BY_CLASS:
        raise ModelFileError(
            f"{where}: architectures names {repr(first)[:80]}, which is not supported; supported classes: "
            f"{', '.join(_BY_CLASS)}. Use a model of one of these classes"
        )
    return _BY_CLASS[first]


def read_config(raw: Json, name: str, where: Path, ends: Json | None = None, *, has_head: bool = False) -> ModelConfig:
    """Convert the content of a config.json to a `ModelConfig`.

    Args:
        raw: the content.
        name: model name for clients.
        where: the file, for messages.
        ends: content of generation_config.json, which has additional end tokens for chat.
        has_head: whether the files have an output head. In classes for text and images, a head is tied exactly if there
            is none, unless `tie_word_embeddings` is false.

    Raises:
        ModelFileError: the class or a feature is not supported, or a field is missing; the message contains the field.
    """
    family = family_of(raw, where)
    place: Path | str = where
    if family.text is not None:
        raw, place = text_fields(raw, family.text, where, has_head=has_head)
    fields = ConfigFields(raw, place, family.defaults)
    fields.ignore(*family.ignores)
    config = family.adapt(fields, _as_llama(fields, family, name, ends or {}))
    fields.refuse_unread()
    if config.experts is not None and config.experts.count * config.num_layers > _MAX_EXPERTS:
        raise ModelFileError(
            f"{place}: {config.num_layers} layers of {config.experts.count} experts; at most {_MAX_EXPERTS} experts in"
            " all layers are supported"
        )
    if config.head_dim * config.max_model_tokens > _MAX_ROTATED or config.head_dim > _MAX_HEAD_DIM:
        raise ModelFileError(
            f"{place}: heads of {config.head_dim} values for a context of {config.max_model_tokens} tokens; at most"
            f" {_MAX_HEAD_DIM} values, and {_MAX_ROTATED} values in all positions, are supported. Correct head_dim or"
            " max_position_embeddings"
        )
    return config


def _as_llama(fields: ConfigFields, family: Family, name: str, ends: Json) -> ModelConfig:
    """Read the fields that all families have."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.value("head_dim") is None and hidden % heads:
        raise ModelFileError(f"{fields.where}: hidden_size {hidden} is not divisible by {heads} heads")
    head_dim = fields.whole("head_dim", hidden // heads)
    rope = read_rope(fields, head_dim, default_theta=10000.0, inner="full_attention" if family.has_local_rope else None)
    if rope.rotary_dim != head_dim and not family.rotates_part:
        raise ModelFileError(
            f"{fields.where}: partial_rotary_factor rotates {rope.rotary_dim} of {head_dim} values of a head, but"
            f" {family.architecture} rotates all of them; remove the field, or use the class that the model was"
            " trained with"
        )
    if rope.context_tokens > _MAX_MODEL_TOKENS:
        raise ModelFileError(
            f"{fields.where}: max_position_embeddings is {fields.whole('max_position_embeddings')}, a context of"
            f" {rope.context_tokens} tokens with its scaling; at most {_MAX_MODEL_TOKENS} is supported"
        )
    num_layers = fields.whole("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise ModelFileError(f"{fields.where}: num_hidden_layers is {num_layers}; at most {_MAX_LAYERS} is supported")
    ends_for_chat = ConfigFields(ends, fields.where).tokens("eos_token_id")
    return ModelConfig(
        name=name,
        architecture=family.name,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        max_model_tokens=rope.context_tokens,
        rope_scaling=rope.scaling,
        rotary_dim=None if rope.rotary_dim == head_dim else rope.rotary_dim,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=tuple(sorted(fields.tokens("eos_token_id") | ends_for_chat)),
        bos_token_id=fields.optional_token("bos_token_id"),
    )
