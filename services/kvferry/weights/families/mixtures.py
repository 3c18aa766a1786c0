"""Mixtures of experts: Mixtral; Qwen 2-MoE with a shared expert; Qwen 3-MoE.

Sources: Jiang et al., Mixtral of Experts, 2024, section 2.1; Qwen Team, Qwen2 Technical Report, 2024, section 2.2.2;
Qwen3 Technical Report, 2025, section 2.
"""

import re
from dataclasses import replace

from kvferry.weights.config import Experts, ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of_all
from kvferry.weights.families.qwen import qwen_windows

MAX_EXPERTS = 1024
_MIXTRAL = (
    (re.compile(r"\.block_sparse_moe\.gate\."), ".mlp.gate."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w1\."), r".mlp.experts.\1.gate_proj."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w3\."), r".mlp.experts.\1.up_proj."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w2\."), r".mlp.experts.\1.down_proj."),
)
"""Names of Mixtral's tensors in published checkpoints."""


def read_experts(fields: ConfigFields, count: str, size: str, *, renormalizes: bool) -> Experts:
    """Read the fields that all mixtures have.

    Args:
        fields: fields of the config.json.
        count: name of the field with the number of experts.
        size: name of the field with the intermediate size of an expert.
        renormalizes: whether the weights of the chosen experts are scaled to a sum of 1.

    Raises:
        ModelFileError: a number is out of range.
    """
    experts = Experts(
        fields.whole(count), fields.whole("num_experts_per_tok"), fields.whole(size), renormalizes=renormalizes
    )
    if experts.count > MAX_EXPERTS:
        fields.refuse(count, f"at most {MAX_EXPERTS} experts are")
    if experts.active > experts.count:
        fields.refuse("num_experts_per_tok", f"the model has {experts.count} experts")
    return experts


def _adapt_mixtral(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(
        llama,
        windows=windows_of_all(fields, llama),
        experts=read_experts(fields, "num_local_experts", "intermediate_size", renormalizes=True),
    )


def _adapt_qwen(fields: ConfigFields, llama: ModelConfig, count: str) -> ModelConfig:
    experts = read_experts(fields, count, "moe_intermediate_size", renormalizes=fields.flag("norm_topk_prob"))
    step = fields.whole("decoder_sparse_step", 1)
    listed = fields.value("mlp_only_layers")
    if listed is not None and not (isinstance(listed, list) and all(type(layer) is int for layer in listed)):
        fields.refuse("mlp_only_layers", "it must be a list of layer indices")
    plain = set(listed or ())
    dense = tuple(i for i in range(llama.num_layers) if i in plain or (i + 1) % step)
    return replace(
        llama,
        experts=replace(experts, dense_layers=dense) if len(dense) < llama.num_layers else None,
        windows=qwen_windows(fields, llama),
    )


def _adapt_qwen_2(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    config = _adapt_qwen(fields, llama, "num_experts")
    if config.experts is None:
        return replace(config, qkv_bias=fields.flag("qkv_bias", default=True))
    shared = replace(config.experts, shared_size=fields.whole("shared_expert_intermediate_size"))
    return replace(config, qkv_bias=fields.flag("qkv_bias", default=True), experts=shared)


def _adapt_qwen_3(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    # transformers 5 writes num_local_experts, published checkpoints num_experts.
    count = "num_experts" if fields.value("num_experts") is not None else "num_local_experts"
    return replace(_adapt_qwen(fields, llama, count), qk_norm=True)


MIXTRAL = Family(
    name="mixtral",
    title="Mixtral 8x7B and 8x22B",
    architecture="MixtralForCausalLM",
    adapt=_adapt_mixtral,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    renames=_MIXTRAL,
    gguf="llama",
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    title="Qwen 1.5-MoE, Qwen 2-MoE",
    architecture="Qwen2MoeForCausalLM",
    adapt=_adapt_qwen_2,
    defaults={
        "sliding_window": 4096,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    ignores=("attention_bias",),
    gguf="qwen2moe",
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    title="Qwen 3-MoE",
    architecture="Qwen3MoeForCausalLM",
    adapt=_adapt_qwen_3,
    defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    gguf="qwen3moe",
)
