"""The digest of features differs between models with different computations, and is empty for Llama's computation."""

from dataclasses import replace

from kvferry.model import tiny
from kvferry.weights.config import Activation, Experts, Latent, ModelConfig, NormPlacement
from kvferry.weights.features import FEATURES, features_digest
from kvferry.weights.rope import DynamicNtkRope, LinearRope, LongRope

OTHER: dict[str, object] = {
    "rope_scaling": LinearRope(2.0),
    "rotary_dim": 8,
    "local_rope_theta": 100.0,
    "unrotated_layers": (1,),
    "windows": (8, None),
    "attention_scale": 0.3,
    "attention_soft_cap": 20.0,
    "logit_soft_cap": 20.0,
    "embedding_scale": 2.0,
    "residual_scale": 0.5,
    "logit_scale": 0.5,
    "norm_placement": NormPlacement.BOTH,
    "norm_offset": 1.0,
    "qk_norm_spans_heads": True,
    "activation": Activation.GELU_TANH,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 3.0,
    "attention_sinks": True,
    "output_bias": True,
    "latent": Latent(32, 16, 16, 16, None),
    "experts": Experts(4, 2, 16, renormalizes=True),
}


def digest(config: ModelConfig, served: int = 2048) -> str:
    return features_digest(config, served)


def test_every_feature_changes_the_digest() -> None:
    assert set(OTHER) == set(FEATURES)
    digests = {digest(replace(tiny.config(), **{name: value})) for name, value in OTHER.items()}
    assert len(digests) == len(OTHER)
    assert all(len(found) == 16 for found in digests)


def test_models_with_llama_s_computation_have_an_empty_digest() -> None:
    for config in (tiny.config(), tiny.config(qk_norm=True), tiny.config(qkv_bias=True)):
        assert digest(config) == ""


def test_the_served_length_counts_where_frequencies_depend_on_it() -> None:
    long = replace(tiny.config(), rope_scaling=LongRope((1.0,) * 8, (2.0,) * 8, 512, 1.1))
    assert digest(long, 512) != digest(long, 513) == digest(long, 2048)
    dynamic = replace(tiny.config(), rope_scaling=DynamicNtkRope(2.0, 512))
    assert digest(dynamic, 100) == digest(dynamic, 512) != digest(dynamic, 513)
    linear = replace(tiny.config(), rope_scaling=LinearRope(2.0))
    assert digest(linear, 100) == digest(linear, 2048)
