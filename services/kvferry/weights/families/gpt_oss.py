"""gpt-oss: mixtures of experts with biases and a clamped SwiGLU, attention sinks, a window in every other layer, YaRN.

Source: OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, 2025, section 2. The router's softmax over the chosen experts
    equals the renormalized softmax over all experts.
"""

import re
from dataclasses import replace

from kvferry.weights.config import Activation, ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of
from kvferry.weights.families.mixtures import read_experts

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _adapt(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    has_bias = fields.flag("attention_bias", default=True)
    window = fields.optional_whole("sliding_window")
    return replace(
        llama,
        windows=windows_of(fields, llama, window, lambda index: index % 2 == 0),
        qkv_bias=has_bias,
        output_bias=has_bias,
        attention_sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        swiglu_alpha=fields.real("swiglu_alpha"),
        swiglu_limit=fields.real("swiglu_limit"),
        experts=replace(
            read_experts(fields, "num_local_experts", "intermediate_size", renormalizes=True), has_biases=True
        ),
    )


GPT_OSS = Family(
    name="gpt_oss",
    title="gpt-oss 20b and 120b",
    architecture="GptOssForCausalLM",
    adapt=_adapt,
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": _ROPE,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    renames=((re.compile(r"\.mlp\.router\."), ".mlp.gate."),),
    has_stacked_experts=True,
    gguf="gpt-oss",
)
