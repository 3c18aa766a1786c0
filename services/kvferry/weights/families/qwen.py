"""Qwen 2 and 2.5: projections with bias; Qwen 3: normalized heads. Upper layers may have a sliding window.

Sources: Qwen Team, Qwen2 Technical Report, 2024; Qwen3 Technical Report, 2025.
"""

from dataclasses import replace

from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.families.family import Family, windows_of

_FIRST_WINDOW = 28
"""Value of `max_window_layers` where it is absent: the first layer with a window."""


def qwen_windows(fields: ConfigFields, llama: ModelConfig) -> tuple[int | None, ...]:
    """Return the window of each layer; only upper layers have one, and only if `use_sliding_window` is set."""
    fields.ignore("sliding_window")
    window = fields.optional_whole("sliding_window") if fields.flag("use_sliding_window") else None
    first = fields.value("max_window_layers")
    first = first if isinstance(first, int) and not isinstance(first, bool) else _FIRST_WINDOW
    return windows_of(fields, llama, window, lambda index: index >= first)


def _adapt_2(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(llama, qkv_bias=True, windows=qwen_windows(fields, llama))


def _adapt_3(fields: ConfigFields, llama: ModelConfig) -> ModelConfig:
    return replace(llama, qk_norm=True, windows=qwen_windows(fields, llama))


QWEN2 = Family(
    name="qwen2",
    title="Qwen 2, Qwen 2.5",
    architecture="Qwen2ForCausalLM",
    adapt=_adapt_2,
    defaults={"sliding_window": 4096},
    ignores=("attention_bias",),
    gguf="qwen2",
)
QWEN3 = Family(
    name="qwen3",
    title="Qwen 3 (dense)",
    architecture="Qwen3ForCausalLM",
    adapt=_adapt_3,
    defaults={"sliding_window": 4096, "head_dim": 128},
    gguf="qwen3",
)
