"""Llama 2 and 3.x, SmolLM 1 and 2, to which all families are compared; Mistral, which has a sliding window in every
layer unless `sliding_window` is null (Jiang et al., Mistral 7B, 2023)."""

from dataclasses import replace

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of_all


def _adapt_mistral(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(llama, windows=windows_of_all(fields, llama))


LLAMA = Family(name="llama", title="Llama 2 and 3.x, SmolLM, SmolLM 2", architecture="LlamaForCausalLM", gguf="llama")
MISTRAL = Family(
    name="mistral",
    title="Mistral, Mistral Nemo and Small (text)",
    architecture="MistralForCausalLM",
    adapt=_adapt_mistral,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    gguf="llama",
)
