"""Gemma 2 and 3, text: windows in most layers, norms on inputs and outputs, GeGLU, scaled embeddings.

Gemma 2 caps attention scores and logits (Gemma Team, Gemma 2, 2024, section 2). Gemma 3 normalizes heads instead, and
its layers with a window have their own rotary base (Gemma Team, Gemma 3, 2025, section 2).
"""

import math
from dataclasses import replace

from kvferry.weights.config import Activation, ModelConfig, NormPlacement
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of

_GELU = "gelu_pytorch_tanh"
_LOCAL_THETA = 10000.0


def _gemma(fields: ConfigFields, llama: ModelConfig, period: int) -> ModelConfig:
    """Read the fields that both generations have.

    Args:
        fields: fields of the model.
        llama: the configuration so far.
        period: if `layer_types` is absent, each layer whose number is a multiple of this has full attention.
    """
    if fields.value("hidden_activation") != _GELU:
        fields.refuse("hidden_activation", f"only {_GELU} is")
    window = fields.optional_whole("sliding_window")
    return replace(
        llama,
        windows=windows_of(fields, llama, window, lambda index: (index + 1) % period != 0),
        attention_scale=1.0 / math.sqrt(fields.real("query_pre_attn_scalar")),
        embedding_scale=math.sqrt(llama.hidden_size),
        norm_placement=NormPlacement.BOTH,
        norm_offset=1.0,
        activation=Activation.GELU_TANH,
    )


def _adapt_2(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(
        _gemma(fields, llama, 2),
        attention_soft_cap=fields.optional_real("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_real("final_logit_softcapping"),
    )


def _adapt_3(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    config = _gemma(fields, llama, fields.whole("sliding_window_pattern", 6))
    local = fields.real("rope_local_base_freq", _LOCAL_THETA)
    parameters = fields.inner("rope_parameters")
    sliding = parameters.inner("sliding_attention") if parameters is not None else None
    if sliding is not None:
        if sliding.value("rope_type") not in (None, "default"):
            sliding.refuse("rope_type", "layers with a sliding window must not have a scaled rotary embedding")
        local = sliding.real("rope_theta", local)
    cap = fields.optional_real("final_logit_softcapping")
    return replace(config, qk_norm=True, local_rope_theta=local, logit_soft_cap=cap)


_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_activation": _GELU,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}
GEMMA2 = Family(
    name="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    adapt=_adapt_2,
    defaults=_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ignores=("hidden_act",),
    gguf="gemma2",
)
GEMMA3 = Family(
    name="gemma3_text",
    title="Gemma 3 (text: 270m, 1b)",
    architecture="Gemma3ForCausalLM",
    adapt=_adapt_3,
    defaults=_DEFAULTS | {"rope_theta": 1000000.0},
    has_local_rope=True,
    ignores=("hidden_act",),
    gguf="gemma3",
)
