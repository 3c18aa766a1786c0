"""Small random checkpoints of each model family, written by transformers with the family's own features switched on."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kvferry.model import tiny
from kvferry.weights.config import Activation, NormPlacement

CONTEXT = 512
WINDOW = 8
_SIZES: dict[str, object] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


@dataclass(frozen=True)
class Checkpoint:
    """Description of a checkpoint to generate."""

    prefix: str
    """Prefix of the class names in transformers."""
    settings: dict[str, object] = field(default_factory=dict)
    config_class: str = ""
    seed: int = 0
    outer: dict[str, object] | None = None
    """Fields of a class for text and images, of which `settings` are those of the text part."""

    def model(self) -> Any:
        """Create the model in float32, with eager attention. Weights are large enough that attention, caps and norms
        matter: scores and logits of several units."""
        settings = _SIZES | self.settings
        if self.outer is not None:
            settings = {"text_config": settings, **self.outer}
        made = getattr(transformers, self.config_class or f"{self.prefix}Config")(**settings)
        made._attn_implementation = "eager"
        torch.manual_seed(self.seed)
        kind = "ForCausalLM" if self.outer is None else "ForConditionalGeneration"
        model = getattr(transformers, f"{self.prefix}{kind}")(made).train(False)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "norm" in name:
                    value.add_(torch.randn_like(value) * 0.2)
                elif name.endswith("sinks"):
                    value.copy_(torch.randn_like(value) * 2)
                elif value.ndim == 2:
                    gain = 1.0 if "embed_tokens" in name else 1.5
                    value.copy_(torch.randn_like(value) * gain / value.shape[1] ** (0.5 if gain > 1 else 0.25))
                elif value.ndim == 3:  # all experts
                    inputs = value.shape[1 if self.prefix == "GptOss" else 2]
                    value.copy_(torch.randn_like(value) * 1.5 / inputs**0.5)
                else:
                    value.copy_(torch.randn_like(value) * 0.3)
            for name, value in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    value.copy_(torch.randn_like(value) * 0.3)
        return model

    def write(self, folder: Path) -> Any:
        """Write the checkpoint with a tokenizer, and return the model."""
        model = self.model()
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tiny.tokenizer(tiny.config())._make().to_str())
        return model


def long_factors(count: int, seed: int) -> list[float]:
    """Return `count` divisors of rotary frequencies from 1 to 5."""
    generator = torch.Generator().manual_seed(seed)
    return (1 + 4 * torch.rand(count, generator=generator)).tolist()


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}
PARTIAL = 0.75
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": PARTIAL,
    "short_factor": long_factors(6, 1),
    "long_factor": long_factors(6, 2),
}
_GEMMA = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_EXPERTS: dict[str, object] = {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
GPT_OSS = {
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "swiglu_limit": 1.5,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False},
}
DEEPSEEK: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
_SCALED = YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}
DEEPSEEK_V2 = DEEPSEEK | {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": _SCALED,
}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_PERIODS = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    },
}
DEEPSEEK_V3 = DEEPSEEK | {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "rope_parameters": _SCALED}
CHECKPOINTS = {
    "llama": Checkpoint("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": Checkpoint("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "mistral": Checkpoint("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-full": Checkpoint("Mistral", {"sliding_window": None}),
    "qwen2": Checkpoint("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": Checkpoint(
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "head_dim": 16}
    ),
    "qwen3": Checkpoint(
        "Qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 16}
    ),
    "phi3": Checkpoint(
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "pad_token_id": 0},
    ),
    "phi3-window": Checkpoint("Phi3", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "olmo2": Checkpoint("Olmo2"),
    "granite": Checkpoint(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": Checkpoint("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "gemma2": Checkpoint("Gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": Checkpoint(
        "Gemma3",
        _GEMMA | _PERIODS,
        config_class="Gemma3TextConfig",
    ),
    "gemma3-images": Checkpoint(
        "Gemma3", _GEMMA | _PERIODS, outer={"vision_config": _VISION | {"model_type": "siglip_vision_model"}}
    ),
    "mistral3": Checkpoint(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16, "rope_parameters": YARN},
        outer={
            "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_vl": Checkpoint(
        "Qwen2VL",
        {"rope_parameters": _SECTIONS, "tie_word_embeddings": True},
        outer={"vision_config": {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 1}},
    ),
    "qwen2_5_vl": Checkpoint(
        "Qwen2_5_VL", {"rope_parameters": YARN | {"mrope_section": [2, 3, 3]}}, outer={"vision_config": _QWEN_VISION}
    ),
    "qwen3_vl": Checkpoint(
        "Qwen3VL",
        {"rope_parameters": _SECTIONS | {"mrope_interleaved": True}, "head_dim": 16},
        outer={"vision_config": _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
    ),
    "mixtral": Checkpoint(
        "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW, "head_dim": 16}
    ),
    "qwen2_moe": Checkpoint(
        "Qwen2Moe",
        _EXPERTS
        | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False, "mlp_only_layers": [1], "qkv_bias": True},
    ),
    "gpt_oss": Checkpoint("GptOss", GPT_OSS),
    "deepseek_v2": Checkpoint("DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2-plain": Checkpoint("DeepseekV2", DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3-odd": Checkpoint(
        "DeepseekV3",
        DEEPSEEK_V3 | {"q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    ),
    "deepseek_v3": Checkpoint("DeepseekV3", DEEPSEEK_V3),
    "qwen3_moe": Checkpoint("Qwen3Moe", _EXPERTS | {"norm_topk_prob": True, "head_dim": 16, "decoder_sparse_step": 2}),
}
"""Checkpoints by name: the family's name, up to a dash."""


def edit_config(folder: Path, **values: object) -> None:
    """Change fields of a checkpoint's config.json; `None` is written as null."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


FEATURED = {
    "window, caps, norms around": replace(
        tiny.config(qk_norm=True),
        windows=(WINDOW, None),
        local_rope_theta=100.0,
        attention_scale=0.3,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        embedding_scale=7.0,
        norm_placement=NormPlacement.BOTH,
        norm_offset=0.5,
        activation=Activation.GELU_TANH,
    ),
    "norms after, whole projections": replace(
        tiny.config(qk_norm=True), norm_placement=NormPlacement.AFTER, qk_norm_spans_heads=True
    ),
    "multipliers, part rotated, part not": replace(
        tiny.config(qkv_bias=True),
        residual_scale=0.4,
        logit_scale=0.5,
        embedding_scale=3.0,
        rotary_dim=12,
        unrotated_layers=(1,),
        windows=(None, 40),
    ),
    "sinks, biases, clamped gates": replace(
        tiny.config(qkv_bias=True),
        windows=(None, 20),
        attention_sinks=True,
        output_bias=True,
        activation=Activation.CLAMPED_SWIGLU,
        swiglu_limit=0.5,
    ),
}
"""Configurations of the tiny model which together have all features."""
