"""Configurations of published models by name, without weights; for benchmarks with random weights.

The values come from each model's `config.json`.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvferry.core.errors import UnknownModel
from kvferry.model import tiny
from kvferry.model.catalog import DEFAULT_MODEL
from kvferry.weights.config import ModelConfig
from kvferry.weights.rope import Llama3RopeScaling

_LLAMA_8B = ModelConfig(
    name="llama-3.1-8b",
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_model_tokens=131072,
    rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
)
_LLAMA_1B = replace(
    _LLAMA_8B,
    name="llama-3.2-1b",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192),
    tie_word_embeddings=True,
)
_QWEN3_8B = ModelConfig(
    name="qwen3-8b",
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_model_tokens=40960,
    qk_norm=True,
)
_QWEN25_7B = ModelConfig(
    name="qwen2.5-7b",
    architecture="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_model_tokens=32768,
    qkv_bias=True,
)
_SMOLLM2_135M = ModelConfig(
    name="smollm2-135m",
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_model_tokens=8192,
    tie_word_embeddings=True,
)
SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _LLAMA_8B,
            _LLAMA_1B,
            _QWEN3_8B,
            _QWEN25_7B,
            _SMOLLM2_135M,
            replace(_SMOLLM2_135M, name=DEFAULT_MODEL),  # for commands without --model
            tiny.config(),
        )
    }
)


def shape_of(name: str) -> ModelConfig:
    """Return the configuration of the model `name`.

    Raises:
        UnknownModel: the name is unknown; the message lists all names.
    """
    try:
        return SHAPES[name]
    except KeyError:
        known = ", ".join(SHAPES)
        raise UnknownModel(
            f"unknown shape {name!r} for --load-format dummy; use one of {known}",
            reason="UNKNOWN_SHAPE",
            field="model",
        ) from None
