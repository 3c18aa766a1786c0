"""Gemma 3, Mistral Small 3.x, Qwen 2-VL, 2.5-VL and 3-VL: text families in classes for text and images.

Sources: Gemma Team, Gemma 3, 2025, section 2; Wang et al., Qwen2-VL, 2024, section 2.1; Bai et al., Qwen2.5-VL
Technical Report, 2025, section 2. Defaults come from the text configuration in transformers.
"""

from dataclasses import replace

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.gemma import GEMMA3
from kvferry.weights.families.llama import MISTRAL
from kvferry.weights.families.qwen import QWEN2, QWEN3
from kvferry.weights.families.text_part import RENAMES, TextConfigForm


def _adapt_gemma(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    config = GEMMA3.adapt(fields, llama)
    if config.logit_soft_cap is not None:
        fields.refuse("final_logit_softcapping", "this class does not cap logits; remove the field")
    return config


GEMMA3_IMAGES = replace(
    GEMMA3,
    name="gemma3",
    title="Gemma 3 (4b, 12b, 27b; text)",
    architecture="Gemma3ForConditionalGeneration",
    adapt=_adapt_gemma,
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    renames=RENAMES,
    text=TextConfigForm(kinds=("gemma3_text",)),
)
MISTRAL3 = replace(
    MISTRAL,
    name="mistral3",
    title="Mistral Small 3.1, 3.2 (text)",
    architecture="Mistral3ForConditionalGeneration",
    defaults={
        **MISTRAL.defaults,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    renames=RENAMES,
    gguf="mistral3",
    text=TextConfigForm(kinds=("mistral",)),
)
_QWEN_2 = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
QWEN2_VL = replace(
    QWEN2,
    name="qwen2_vl",
    title="Qwen 2-VL (text)",
    architecture="Qwen2VLForConditionalGeneration",
    defaults={**QWEN2.defaults, **_QWEN_2},
    renames=RENAMES,
    gguf="qwen2vl",
    text=TextConfigForm(kinds=("qwen2_vl_text", "qwen2_vl"), may_be_flat=True, has_sections=True),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    title="Qwen 2.5-VL (text)",
    architecture="Qwen2_5_VLForConditionalGeneration",
    text=TextConfigForm(kinds=("qwen2_5_vl_text", "qwen2_5_vl"), may_be_flat=True, has_sections=True),
)
QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    title="Qwen 3-VL (dense, text)",
    architecture="Qwen3VLForConditionalGeneration",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    },
    renames=RENAMES,
    gguf="qwen3vl",
    text=TextConfigForm(kinds=("qwen3_vl_text",), has_sections=True),
)
