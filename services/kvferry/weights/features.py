"""Digest of the features by which a model's computation differs from Llama's, as part of the KV fingerprint.

The digest of a model's files covers the values of the fields but not their meaning: a worker that ignored a feature
would compute different KV from the same files.
"""

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum

from blake3 import blake3

from kvferry.weights.config import ModelConfig
from kvferry.weights.rope import DynamicNtkRope, LongRope

VERSION = 1
"""Incremented when the meaning of a feature changes, such as the order of rotated values in a head."""
FEATURES = (
    "rope_scaling", "rotary_dim", "local_rope_theta", "unrotated_layers", "windows", "attention_scale",
    "attention_soft_cap", "logit_soft_cap", "embedding_scale", "residual_scale", "logit_scale", "norm_placement",
    "norm_offset", "qk_norm_spans_heads", "activation", "swiglu_alpha", "swiglu_limit", "attention_sinks",
    "output_bias", "experts", "latent",
)  # fmt: skip
"""Fields of `ModelConfig` that `features_digest` covers."""


def features_in_use(config: ModelConfig) -> dict[str, object]:
    """Return the features that differ from Llama's, by field name."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    return {name: value for name in FEATURES if (value := getattr(config, name)) != defaults[name]}


def features_digest(config: ModelConfig, served_tokens: int) -> str:
    """Return 16 hex digits for a model's features; an empty string for a model without any.

    Args:
        config: the configuration as in the model's files.
        served_tokens: the context length that the engine serves, which determines some rotary frequencies.
    """
    used = features_in_use(config)
    if not used:
        return ""
    if isinstance(config.rope_scaling, LongRope):
        used["is_long"] = served_tokens > config.rope_scaling.original_max_position
    elif isinstance(config.rope_scaling, DynamicNtkRope):
        used["served_tokens"] = max(served_tokens, config.rope_scaling.original_max_position)
    text = "; ".join(f"{name}={v.value if isinstance(v, Enum) else v!r}" for name, v in sorted(used.items()))
    return blake3(f"kvferry-features v{VERSION} {text}".encode()).hexdigest(length=8)


def model_digest(files: str, config: ModelConfig, served_tokens: int, changes: Sequence[str] = ()) -> str:
    """Return the model digest for KV layouts, which covers the files, settings that change the weights, and the
    features.

    Args:
        files: digest of the model's files.
        config: see `features_digest`.
        served_tokens: see `features_digest`.
        changes: settings that change the weights or the numerics.
    """
    features = features_digest(config, served_tokens)
    return "-".join((files, *changes, *([f"features-{features}"] if features else [])))
