"""Phi-3, Phi-3.5 and Phi-4: fused projections, LongRoPE, partly rotated heads, and a sliding window in Phi-3 mini 4k.

Source: Abdin et al., Phi-3 Technical Report, 2024.
"""

from dataclasses import replace

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of_all


def _adapt(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(llama, windows=windows_of_all(fields, llama))


PHI3 = Family(
    name="phi3",
    title="Phi-3, Phi-3.5 (text), Phi-4, Phi-4-mini",
    architecture="Phi3ForCausalLM",
    adapt=_adapt,
    defaults={"rms_norm_eps": 1e-5},
    rotates_part=True,
    has_fused_tensors=True,
    gguf="phi3",
)
