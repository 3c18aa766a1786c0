"""Declaration of a model family: its class in config.json, and how it differs from Llama."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.text_part import TextConfigForm

Adapt = Callable[[ConfigFields, ModelConfig], ModelConfig]
"""Function that reads a family's own fields: (fields, configuration with Llama's values) -> configuration."""


def as_llama(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    """Return the configuration unchanged."""
    return llama


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. The defaults are Llama's."""

    name: str
    title: str
    """Names of its models, for the documentation."""
    architecture: str
    """Name of the class in the field `architectures` of config.json."""
    adapt: Adapt = as_llama
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of absent fields, where the class in transformers and Llama have different defaults."""
    ignores: tuple[str, ...] = ()
    """Fields that have no effect in the family's class but have one in others."""
    rotates_part: bool = False
    """Whether the class applies `partial_rotary_factor`; in transformers the other classes do not."""
    has_local_rope: bool = False
    """Whether `rope_parameters` has an object for each layer type (Gemma 3)."""
    has_fused_tensors: bool = False
    """Whether the files have `qkv_proj` and `gate_up_proj` instead of separate projections."""
    ignores_further_layers: bool = False
    """Whether the files have layers beyond `num_hidden_layers`, which predict further tokens and are left out."""
    has_stacked_experts: bool = False
    """Whether the files store all experts of a layer in one tensor, with alternating gate and up outputs."""
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Regular expressions for tensor names in the files, with their replacements; the first match applies."""
    gguf: str = ""
    """Architecture of the family's GGUF files, a key of `checkpoints.gguf.architectures.ARCHITECTURES`."""
    text: TextConfigForm | None = None
    """The text part of a class for text and images, the only part that is served; `None` for a text-only class."""

    def renamed(self, name: str) -> str:
        """Return this project's name for a tensor of the family's files."""
        for pattern, replacement in self.renames:
            found, count = pattern.subn(replacement, name, count=1)
            if count:
                return found
        return name


def windows_of_all(fields: ConfigFields, llama: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each layer of a class that applies `sliding_window` to all layers.

    Raises:
        ModelFileError: `layer_types` has a layer without it, which transformers ignores.
    """
    window = fields.optional_whole("sliding_window")
    found = windows_of(fields, llama, window, lambda _: True)
    if window is not None and found != (window,) * llama.num_layers:
        fields.refuse("layer_types", "this class applies sliding_window to all layers; set it to null if none has it")
    return found


def windows_of(
    fields: ConfigFields, llama: ModelConfig, window: int | None, by_default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Return the window of each layer.

    Args:
        fields: fields of the model; `layer_types` is read if present.
        llama: the configuration so far.
        window: sliding window in tokens; `None` if the model has none.
        by_default: function that returns whether a layer has a window if `layer_types` is absent.

    Raises:
        ModelFileError: `layer_types` is not valid, or has windows while the model has none.
    """
    slides = fields.slides(llama.num_layers) or tuple(by_default(index) for index in range(llama.num_layers))
    if window is None:
        if any(slides) and fields.value("layer_types") is not None:
            fields.refuse(
                "layer_types", "it has layers with a sliding window, but sliding_window is missing; set its length"
            )
        return ()
    return tuple(window if slide else None for slide in slides) if any(slides) else ()
