"""Architectures of llama.cpp: the class in config.json that computes the same, and how names and values differ.

Sources: llama.cpp, conversion/*.py (how checkpoints become files) and src/models/*.cpp (values that files leave out).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvferry.weights.checkpoints.gguf.header_fields import HeaderFields

Fields = dict[str, object]
"""Fields of a config.json."""
Read = Callable[[HeaderFields], Fields]

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_BEFORE = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_AFTER = _ATTENTION | _MLP | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_BOTH = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files. The defaults are Llama's."""

    name: str
    """Value of `general.architecture`."""
    read: Read
    """Function that reads the keys of the architecture as fields of a config.json, with `architectures`."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_BEFORE))
    """Hugging Face names of the tensors of a layer; see `tensor_views.views_of`."""
    has_pairs: bool = False
    """Whether the rows of query and key projections are permuted so that rotary pairs are adjacent."""
    has_fused_mlp: bool = False
    """Whether `ffn_up` has the rows of gate and up."""
    read_yarn: Read = lambda fields: {}
    """Function that reads further fields of `rope_scaling`, if the scaling is YaRN."""
    adds_norm_offset: bool = False
    """Whether norm weights contain the offset that the family's checkpoints leave out."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, instead of those of the header, if the vocabulary has the first of them."""


def _of_class(name: str) -> Read:
    """Return the `Read` function of an architecture without architecture-specific keys; `name` is the model class."""
    return lambda fields: {"architectures": [name]}


def _llama(fields: HeaderFields) -> Fields:
    if not fields.value("expert_count"):
        return {"architectures": ["LlamaForCausalLM"]}
    return {"architectures": ["MixtralForCausalLM"], **_experts(fields, "num_local_experts"), "sliding_window": None}


def _experts(fields: HeaderFields, count: str) -> Fields:
    return {count: fields.whole("expert_count"), "num_experts_per_tok": fields.whole("expert_used_count")}


def _qwen_2_moe(fields: HeaderFields) -> Fields:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_experts(fields, "num_experts"),
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.whole("expert_shared_feed_forward_length"),
    }


def _qwen_3_moe(fields: HeaderFields) -> Fields:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_experts(fields, "num_experts"),
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(fields: HeaderFields, largest: int) -> Fields:
    """Read the keys that Gemma 2 and 3 share. Attention scores of the largest model have another scale, which files do
    not contain; that model is recognized by its number of layers.
    """
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    is_largest = fields.whole("block_count") == largest
    return {
        "query_pre_attn_scalar": hidden // heads if is_largest else fields.whole("attention.key_length"),
        "final_logit_softcapping": fields.optional_real("final_logit_softcapping"),
    }


def _gemma_2(fields: HeaderFields) -> Fields:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        **_gemma(fields, 46),
        "attn_logit_softcapping": fields.optional_real("attn_logit_softcapping"),
        "sliding_window": fields.whole("attention.sliding_window", 4096),
    }


def _gemma_3(fields: HeaderFields) -> Fields:
    fields.ignore("mm.tokens_per_image")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_gemma(fields, 62),
        "sliding_window": fields.optional_whole("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0),
    }


def _phi_3(fields: HeaderFields) -> Fields:
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": fields.optional_whole("attention.sliding_window")}


def _qwen_2_vl(fields: HeaderFields) -> Fields:
    fields.ignore("rope.dimension_sections")  # the positions of text are equal in all sections
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen_3_vl(fields: HeaderFields) -> Fields:
    fields.ignore("rope.dimension_sections", "n_deepstack_layers")  # for images only
    return {"architectures": ["Qwen3ForCausalLM"]}


def _granite(fields: HeaderFields) -> Fields:
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": fields.real("attention.scale", 1.0),
        "embedding_multiplier": fields.real("embedding_scale", 1.0),
        "residual_multiplier": fields.real("residual_scale", 1.0),
        "logits_scaling": fields.real("logit_scale", 1.0),
    }


def _gpt_oss(fields: HeaderFields) -> Fields:
    return {
        "architectures": ["GptOssForCausalLM"],
        **_experts(fields, "num_local_experts"),
        "intermediate_size": fields.whole("expert_feed_forward_length"),
        "sliding_window": fields.optional_whole("attention.sliding_window"),
        "attention_bias": True,
    }


def _gpt_oss_yarn(fields: HeaderFields) -> Fields:
    return {"truncate": False}


def _deepseek_yarn(fields: HeaderFields) -> Fields:
    """Return `mscale_all_dim`, a tenth of which is stored in files, and `mscale`, equal in published models."""
    tenth = fields.optional_real("rope.scaling.yarn_log_multiplier")
    return {} if tenth is None else dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))


_SIGMOID = 2
"""Value of `expert_gating_func` for scores by a sigmoid."""


def _deepseek(fields: HeaderFields) -> Fields:
    """Read the keys of DeepSeek V2 and V3, which have one architecture. Earlier files have the sizes of a head under
    the keys of other architectures, and no groups."""
    gating = fields.value("expert_gating_func")
    is_v3 = gating == _SIGMOID or any(name.endswith(".exp_probs_b.bias") for name in fields.tensors)
    if gating not in (None, 0, 1, _SIGMOID):
        fields.refuse("expert_gating_func", "known functions are 1 (softmax) and 2 (sigmoid)")
    rotated = fields.whole("rope.dimension_count")
    fields.ignore("attention.key_length", "attention.value_length", "attention.head_count_kv")
    key = fields.whole("attention.key_length_mla", fields.whole("attention.key_length"))
    if key <= rotated:
        fields.refuse("rope.dimension_count", f"a head of keys has {key} values")
    count = fields.whole("expert_count")
    groups = fields.whole("expert_group_count", 8 if is_v3 and count == 256 else 1)
    first = fields.value("leading_dense_block_count")
    found: Fields = {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        **_experts(fields, "n_routed_experts"),
        "kv_lora_rank": fields.whole("attention.kv_lora_rank"),
        "q_lora_rank": fields.optional_whole("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": fields.whole("attention.value_length_mla", fields.whole("attention.value_length")),
        "moe_intermediate_size": fields.whole("expert_feed_forward_length"),
        "n_shared_experts": fields.optional_whole("expert_shared_count"),
        "first_k_dense_replace": 0 if first is None else first,
        "routed_scaling_factor": fields.optional_real("expert_weights_scale") or 1.0,
        "n_group": groups,
        "topk_group": fields.whole("expert_group_used_count", 4 if groups == 8 and is_v3 else groups),
        "norm_topk_prob": fields.flag("expert_weights_norm"),
    }
    if not is_v3:
        found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return found


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            Architecture("llama", _llama, _BEFORE | _ROUTER, has_pairs=True),
            Architecture("mistral3", _of_class("LlamaForCausalLM"), has_pairs=True),
            Architecture("qwen2", _of_class("Qwen2ForCausalLM")),
            Architecture("qwen3", _of_class("Qwen3ForCausalLM")),
            Architecture("qwen2vl", _qwen_2_vl),
            Architecture("qwen3vl", _qwen_3_vl),
            Architecture("qwen2moe", _qwen_2_moe, _BEFORE | _ROUTER | _SHARED),
            Architecture("qwen3moe", _qwen_3_moe, _BEFORE | _ROUTER),
            Architecture("gemma2", _gemma_2, _BOTH, adds_norm_offset=True),
            Architecture("gemma3", _gemma_3, _BOTH, adds_norm_offset=True),
            Architecture("phi3", _phi_3, has_fused_mlp=True),
            Architecture("olmo2", _of_class("Olmo2ForCausalLM"), _AFTER),
            Architecture("granite", _granite, has_pairs=True),
            Architecture("smollm3", _of_class("SmolLM3ForCausalLM"), has_pairs=True),
            Architecture(
                "gpt-oss",
                _gpt_oss,
                _ATTENTION | _ROUTER | {"post_attention_norm": "post_attention_layernorm"},
                read_yarn=_gpt_oss_yarn,
                end_tokens=("<|return|>", "<|call|>", "<|endoftext|>"),
            ),
            Architecture("deepseek2", _deepseek, _BEFORE | _LATENT | _ROUTER | _SHARED, read_yarn=_deepseek_yarn),
        )
    }
)
"""The architectures by name."""
