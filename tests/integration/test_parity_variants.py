"""The tiny model in each variant against transformers' own class for it: biases, normalized heads, scaled
frequencies.
"""

from dataclasses import replace

import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.transformers_twin import twin_of

from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.model import Logits
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig
from kvferry.weights.rope import Llama3RopeScaling

SCALED = replace(
    tiny.config(),
    head_dim=16,
    rope_theta=500.0,
    rope_scaling=Llama3RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position=64),
)
VARIANTS = {
    "llama": tiny.config(),
    "tied": replace(tiny.config(), tie_word_embeddings=True),
    "llama3-rope": SCALED,
    "qwen2": tiny.config(qkv_bias=True),
    "qwen3": tiny.config(qk_norm=True),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@torch.inference_mode()
def test_a_variant_gives_the_references_logits(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.TinyTensors(config)
    reference = twin_of(config, source)
    model = build_model(config, source, dtype="float32")
    runner = Runner(model, PagedKv.allocate(KvLayout.of(config, block_tokens=4, dtype="float32"), 64))
    steps: list[torch.Tensor] = []
    original = model.compute

    def compute(batch: StepBatch, kv: PagedKv) -> Logits:
        logits = original(batch, kv)
        steps.append(torch.tensor(logits.values))
        return logits

    monkeypatch.setattr(model, "compute", compute)
    (ours,) = generate(
        runner, [list(b"A tiny model reads far more than sixty-four bytes, to see the slow frequencies.")], 40
    )
    expected = reference(torch.tensor([ours.tokens[:-1]]), logits_to_keep=40).logits[0]
    torch.testing.assert_close(torch.cat(steps), expected, rtol=1e-4, atol=1e-4)
