"""Unsupported features of a family are refused by file, field, value and remedy; absent fields have the family's
defaults.
"""

import json
import math
from pathlib import Path

import pytest

from kvferry.core.errors import ModelFileError
from kvferry.weights.config import Activation, Experts, Latent, LayerRope, ModelConfig, NormPlacement, Scoring
from kvferry.weights.families.registry import FAMILIES, read_config
from kvferry.weights.families.rope_fields import ORIGINAL
from kvferry.weights.rope import YarnRope

WHERE = Path("/models/m/config.json")
BASE: dict[str, object] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}


def read(family: str, **raw: object) -> ModelConfig:
    given = {"architectures": [FAMILIES[family].architecture], **BASE, **raw}
    return read_config(json.loads(json.dumps(given)), "m", WHERE)


@pytest.mark.parametrize(
    ("family", "raw", "message"),
    [
        (
            "llama",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0 is not supported: kvferry does not implement this feature",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is not supported: the model has 8 experts"),
        ("mixtral", {"num_local_experts": 100000}, "at most 1024 experts"),
        ("gpt_oss", {"num_local_experts": 2}, "num_experts_per_tok = 4 is not supported: the model has 2 experts"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a positive number, not 0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("gpt_oss", {"attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of token ids, not '</s>'"),
        ("gpt_oss", {"eos_token_id": [2, None]}, "eos_token_id must be a token id or a list of token ids, not None"),
        ("mixtral", {"swiglu_limit": 7.0}, "swiglu_limit = 7.0 is not supported"),
        (
            "deepseek_v2",
            {"num_experts_per_tok": 6, "topk_method": "best"},
            "topk_method = 'best' is not supported: known",
        ),
        ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"num_experts_per_tok": 6, "scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v2", {"num_experts_per_tok": 6, "moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v2", {}, "num_experts_per_tok must be a positive whole number, not None"),
        ("deepseek_v3", {"n_group": 7}, "n_group = 7 is not supported: 256 experts are not divisible by it"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group = 9 is not supported: there are 8 groups of 32 experts"),
        (
            "deepseek_v3",
            {"n_group": 128, "topk_group": 2},
            "topk_group = 2 is not supported: there are 128 groups of 2",
        ),
        (
            "deepseek_v3",
            {"n_group": 256, "topk_group": 9},
            "n_group = 256 is not supported: a group needs at least two experts",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported: only sigmoid is"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported: only noaux_tc is"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 is not supported: it must be even"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk = 2048"),
        ("llama", {"kv_lora_rank": 512}, "kv_lora_rank = 512"),
        ("qwen2_moe", {"mlp_only_layers": "1"}, "mlp_only_layers = '1'"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a positive"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number"),
        ("llama", {"num_local_experts": 8}, "num_local_experts = 8"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
        ("llama", {"sliding_window": 128}, "sliding_window = 128"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("llama", {"vision_config": {"x": 1}}, "vision_config"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ("phi3", {"head_dim": 16, "partial_rotary_factor": 0.55, "hidden_size": 60}, None),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor rotates 8 of 16 values of a head, but LlamaFor",
        ),
        ("deepseek_v2", {"num_experts_per_tok": 6, "partial_rotary_factor": 0.5}, "partial_rotary_factor rotates 8"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}},
            "rope_parameters.full_attention = {'rope_theta': 5.0} is not supported: this class has one rotary",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "this class has an object for each layer type; add full_attention",
        ),
        (
            "qwen2",
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling = {'type': 'linear', 'factor': 2.0} is not supported: it differs from rope_parameters",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_scaling.high_freq_factor = 4.0 is not supported: it must be larger than low_freq_factor, 4",
        ),
        (
            "qwen2",
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "its rope_theta must be larger than 1, not 1",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 5e-324}},
            "rope_scaling.beta_slow must be a positive number, not 5e-324; values from 1e-20 to 1e+15",
        ),
        ("qwen2", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "more than two rotated values"),
        ("llama", {"rope_theta": 1e-300}, "rope_theta must be a positive number, not 1e-300"),
        ("granite", {"logits_scaling": 1e-40}, "logits_scaling must be a positive number, not 1e-40"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "this class applies sliding_window to all layers"),
        ("phi3", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types = ["),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob must be true or false, not None"),
        ("llama", {"head_dim": 65536}, "heads of 65536 values for a context of 8192 tokens; at most 1024 values"),
        ("llama", {"head_dim": 1024, "max_position_embeddings": 4 << 20}, "1073741824 values in all positions"),
        ("qwen3_moe", {"num_hidden_layers": 4000}, "4000 layers of 128 experts; at most 131072 experts in all layers"),
        ("llama", {"partial_rotary_factor": 1.5}, "rotates 24 of 16 values of a head; it must rotate an even number"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window must be a positive whole number, not 'wide'"),
        ("mistral", {"attention_bias": True}, "attention_bias = True"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false, not 1"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "but sliding_window is missing"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "known layer types are full_attention, sliding"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 items, but num_hidden_layers is 4"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor must be a list of 8 positive numbers, not 1 items",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
            "long_factor must contain positive numbers, not 0.0",
        ),
        ("phi3", {"rope_scaling": {"type": "xpos"}}, "'xpos' is not supported; use one of default, linear"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("granite", {"attention_multiplier": -1}, "attention_multiplier must be a positive number, not -1"),
        ("granite", {"mlp_bias": True}, "mlp_bias = True"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a list with 0 or 1 for each layer"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported: only gelu_pytorch"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type = 'linear' is not supported: layers with a sliding window",
        ),
    ],
)
def test_unsupported_features_of_a_family_are_refused(family: str, raw: dict[str, object], message: str | None) -> None:
    if message is None:
        assert read(family, **raw).rotary_dim == 8
        return
    with pytest.raises(ModelFileError) as caught:
        read(family, **raw)
    assert str(WHERE) in str(caught.value)
    assert message in str(caught.value)


def test_a_class_that_is_not_listed_is_refused_by_name() -> None:
    with pytest.raises(
        ModelFileError, match=r"'Llama4ForConditionalGeneration', which is not supported.*Gemma3ForCausal"
    ):
        read_config({"architectures": ["Llama4ForConditionalGeneration"], **BASE}, "m", WHERE)


def test_fields_that_are_absent_have_the_defaults_of_the_family() -> None:
    assert read("mistral").windows == (4096,) * 4
    assert read("mistral", sliding_window=None).windows == ()
    assert read("mistral", sliding_window=None, layer_types=["full_attention"] * 4).windows == ()
    assert read("mixtral").rope_theta == 1e6
    assert read("qwen2", sliding_window=4096, attention_bias=True).windows == ()
    assert read("qwen2", use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 4096)
    assert read("smollm3").unrotated_layers == (3,)
    assert read("smollm3").rope_theta == 2e6
    gemma = read("gemma2", hidden_act="gelu_pytorch_tanh")
    assert (gemma.head_dim, gemma.attention_soft_cap, gemma.logit_soft_cap) == (256, 50.0, 30.0)
    assert gemma.windows == (4096, None, 4096, None)
    assert gemma.tie_word_embeddings
    assert (gemma.norm_placement, gemma.activation) == (NormPlacement.BOTH, Activation.GELU_TANH)


def test_the_published_forms_of_gemma_3_are_read_equally() -> None:
    new = read(
        "gemma3_text",
        sliding_window=512,
        num_hidden_layers=7,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    )
    old = read(
        "gemma3_text",
        sliding_window=512,
        num_hidden_layers=7,
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )
    assert new == old
    assert new.local_rope_theta == 10000.0
    assert [layer for layer in range(7) if new.rope_of(layer) is LayerRope.FULL] == [5]


def test_phi_3_has_the_original_length_beside_its_scaling() -> None:
    config = read(
        "phi3",
        original_max_position_embeddings=2048,
        rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    )
    scaling = config.rope_scaling
    assert scaling is not None
    assert getattr(scaling, "original_max_position", 0) == 2048
    assert getattr(scaling, "attention_factor", 0) == math.sqrt(1 + math.log(4) / math.log(2048))


def test_an_original_length_beside_the_scaling_takes_precedence_as_in_transformers() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read("llama", original_max_position_embeddings=32, rope_scaling=scaling | {ORIGINAL: 64})
    assert getattr(config.rope_scaling, "original_max_position", 0) == 32


def test_the_published_form_of_gpt_oss_is_read() -> None:
    config = read(
        "gpt_oss",
        attention_bias=True,
        experts_per_token=4,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=32,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        max_position_embeddings=131072,
        swiglu_limit=7.0,
    )
    assert config == read("gpt_oss", num_local_experts=32, max_position_embeddings=131072)
    assert config.windows == (128, None, 128, None)
    assert config.max_model_tokens == 131072
    assert config.experts == Experts(32, 4, 80, renormalizes=True, has_biases=True)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (64, 8, 150000.0)
    scaling = config.rope_scaling
    assert isinstance(scaling, YarnRope)
    assert (scaling.truncate, scaling.attention_factor) == (False, 0.1 * math.log(32) + 1)


def test_the_published_form_of_deepseek_v3_is_read() -> None:
    config = read(
        "deepseek_v3",
        hidden_size=7168,
        num_attention_heads=128,
        num_key_value_heads=128,
        num_hidden_layers=61,
        max_position_embeddings=163840,
        moe_layer_freq=1,
        n_group=8,
        topk_group=4,
        n_routed_experts=256,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    )
    assert config.latent == Latent(512, 64, 128, 128, 1536)
    assert config.latent.width == 576
    experts = config.experts
    assert experts is not None
    assert (experts.count, experts.active, experts.groups, experts.active_groups) == (256, 8, 8, 4)
    assert (experts.scoring, experts.weight_scale, experts.renormalizes) == (Scoring.SIGMOID, 2.5, True)
    assert (experts.shared_size, experts.has_shared_gate, experts.dense_layers) == (2048, False, (0, 1, 2))
    assert config.score_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert getattr(config.rope_scaling, "attention_factor", 0) == 1.0
    assert read("deepseek_v3", first_k_dense_replace=9).experts is None


def test_windows_as_long_as_the_context_are_left_out() -> None:
    config = read("mistral", sliding_window=4096)
    assert config.served(4096).windows == ()
    assert config.served(4096).max_model_tokens == 4096
    assert config.served(5000) is config
    assert read("mistral", sliding_window=8192).served(0).windows == ()
