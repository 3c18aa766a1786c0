"""The tiny model in each variant against transformers' own class for it: biases, normed heads, scaled frequencies."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvferry.engine.batch import StepBatch
from kvferry.engine.cache import PagedKv, PageShape
from kvferry.engine.models.build import build_model
from kvferry.engine.models.model import Logits
from kvferry.engine.runner import Runner
from kvferry.model import tiny
from kvferry.model.config import Llama3RopeScaling, ModelConfig
from kvferry.testing.stepping import generate

SCALED = replace(
    tiny.config(),
    head_dim=16,
    rope_theta=500.0,
    rope_scaling=Llama3RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position=64),
)
VARIANTS: list[tuple[ModelConfig, Callable[..., PretrainedConfig], Callable[[PretrainedConfig], PreTrainedModel]]] = [
    (tiny.config(), LlamaConfig, LlamaForCausalLM),
    (replace(tiny.config(), tie_word_embeddings=True), LlamaConfig, LlamaForCausalLM),
    (SCALED, LlamaConfig, LlamaForCausalLM),
    (tiny.config(qkv_bias=True), Qwen2Config, Qwen2ForCausalLM),
    (tiny.config(qk_norm=True), Qwen3Config, Qwen3ForCausalLM),
]


def rope_parameters(config: ModelConfig) -> dict[str, object]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


@pytest.mark.parametrize(
    ("config", "make_config", "make_model"), VARIANTS, ids=["llama", "tied", "llama3-rope", "qwen2", "qwen3"]
)
@torch.inference_mode()
def test_a_variant_gives_the_references_logits(
    config: ModelConfig,
    make_config: Callable[..., PretrainedConfig],
    make_model: Callable[[PretrainedConfig], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny.TinyTensors(config)
    theirs = make_config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_model_tokens,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    reference = make_model(theirs).eval()
    state = {name: torch.from_numpy(source.read(name)) for name in source.shapes()}
    _, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    reference.tie_weights()
    model = build_model(config, source, dtype=torch.float32)
    runner = Runner(model, PagedKv.allocate(PageShape.of(config, block_tokens=4, dtype=torch.float32), 64))
    steps: list[torch.Tensor] = []
    original = model.compute

    def compute(batch: StepBatch, pages: torch.Tensor) -> Logits:
        logits = original(batch, pages)
        steps.append(logits.values.clone())
        return logits

    monkeypatch.setattr(model, "compute", compute)
    (ours,) = generate(
        runner, [list(b"A tiny model reads far more than sixty-four bytes, to see the slow frequencies.")], 40
    )
    expected = reference(torch.tensor([ours.tokens[:-1]]), logits_to_keep=40).logits[0]
    torch.testing.assert_close(torch.cat(steps), expected, rtol=1e-4, atol=1e-4)
