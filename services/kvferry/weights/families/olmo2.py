"""OLMo 2: norms on the outputs of attention and MLP, and on whole projections of queries and keys.

Source: OLMo Team, 2 OLMo 2 Furious, 2024, section 3.2.
"""

from dataclasses import replace

from kvferry.weights.config import ModelConfig, NormPlacement
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family


def _adapt(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(llama, norm_placement=NormPlacement.AFTER, qk_norm=True, qk_norm_spans_heads=True)


OLMO2 = Family(
    name="olmo2",
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    adapt=_adapt,
    defaults={"rms_norm_eps": 1e-5},
    gguf="olmo2",
)
