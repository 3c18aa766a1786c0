"""Granite 3: multipliers of embeddings, residual branches, attention scores and logits.

Source: Granite Team, Granite 3.0 Language Models, 2024, section 2; the multipliers come from muP (Yang et al.,
2022).
"""

from dataclasses import replace

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family


def _adapt(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(
        llama,
        embedding_scale=fields.real("embedding_multiplier", 1.0),
        residual_scale=fields.real("residual_multiplier", 1.0),
        attention_scale=fields.real("attention_multiplier", 1.0),
        logit_scale=1.0 / fields.real("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite", title="Granite 3 (dense)", architecture="GraniteForCausalLM", adapt=_adapt, gguf="granite"
)
