"""SmolLM 3: every fourth layer has no rotary embedding (NoPE; Yang et al., Rope to Nope and Back Again, 2025)."""

from dataclasses import replace

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of


def _adapt(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    fields.ignore("sliding_window")
    listed = fields.value("no_rope_layers")
    if listed is None:
        interval = fields.whole("no_rope_layer_interval", 4)
        rotated = [(index + 1) % interval != 0 for index in range(llama.num_layers)]
    elif isinstance(listed, list) and len(listed) >= llama.num_layers and all(x in (0, 1) for x in listed):
        rotated = [bool(x) for x in listed[: llama.num_layers]]
    else:
        fields.refuse(
            "no_rope_layers", "it must be a list with 0 or 1 for each layer, where 1 means that the layer is rotated"
        )
    plain = tuple(index for index, is_rotated in enumerate(rotated) if not is_rotated)
    window = fields.optional_whole("sliding_window") if fields.flag("use_sliding_window") else None
    return replace(
        llama, unrotated_layers=plain, windows=windows_of(fields, llama, window, lambda index: not rotated[index])
    )


SMOLLM3 = Family(
    name="smollm3",
    title="SmolLM 3",
    architecture="SmolLM3ForCausalLM",
    adapt=_adapt,
    defaults={"tie_word_embeddings": True, "rope_theta": 2000000.0, "num_key_value_heads": 4},
    gguf="smollm3",
)
