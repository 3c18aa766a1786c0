"""Quantized checkpoints against transformers with the dequantized weights: logits, tokens, and how weights are kept."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import CHECKPOINTS, LLAMA3, Checkpoint
from harness.kernels.quantized_checkpoints import FORMS, quantize_folder, write_quantized
from integration.test_families import Recorder

from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel

SMALL = {"intermediate_size": 96, "num_hidden_layers": 2}
LLAMA = Checkpoint("Llama", {"rope_parameters": LLAMA3} | SMALL)
PHI = Checkpoint("Phi3", CHECKPOINTS["phi3"].settings | SMALL)
PROMPTS = [[5], [(11 * i + i * i) % 250 for i in range(90)]]
NEW_TOKENS = 8
EXACT, ROUNDED = 2e-4, 0.2
"""Largest difference of a logit in float32, with float32 activations, and with weights rounded to 16 bits."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a form and a checkpoint to its folder and its model in transformers."""

    @cache
    def made(form: str, checkpoint: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(form)
        return folder, write_quantized(FORMS[form], PHI if checkpoint == "phi3" else LLAMA, folder)

    return made


@torch.inference_mode()
def largest_difference(folder: Path, theirs: Any, kernels: str, weights: str) -> float:
    source = open_model(str(folder))
    model = build_model(source.config, source.tensors, dtype="float32", kernels=kernels, weights=weights)
    recorded: Any = Recorder(model)
    runner = Runner(recorded, PagedKv.allocate(KvLayout.of(source.config, block_tokens=4, dtype="float32"), 256))
    worst = 0.0
    prompts = PROMPTS[-1:] if source.config.architecture == "phi3" else PROMPTS
    ours = generate(runner, prompts, NEW_TOKENS)
    rows = np.stack(recorded.rows).reshape(NEW_TOKENS, len(prompts), -1)
    for index, one in enumerate(ours):
        expected = theirs(torch.tensor([one.tokens[:-1]]), logits_to_keep=NEW_TOKENS).logits[0].numpy()
        assert expected.std() > 0.5, "logits must differ enough to make the comparison meaningful"
        worst = max(worst, float(np.abs(rows[:, index] - expected).max()))
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_dequantized_weights(form: str, folders: Any) -> None:
    folder, theirs = folders(form, "llama")
    assert largest_difference(folder, theirs, "torch", "shipped") < EXACT


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.is_exact])
def test_weights_that_are_rounded_are_exact_if_float32_is_asked_for(form: str, folders: Any) -> None:
    folder, theirs = folders(form, "llama")
    assert largest_difference(folder, theirs, "compiled", "float32") < EXACT


@pytest.mark.parametrize("form", FORMS)
def test_kept_weights_compute_the_same(form: str, folders: Any) -> None:
    folder, theirs = folders(form, "llama")
    bound = 2 * EXACT if FORMS[form].is_exact else ROUNDED
    assert largest_difference(folder, theirs, "compiled", "shipped") < bound


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("form", ["awq", "gptq-desc-act", "packed", "fp8"])
def test_fused_projections_are_split_and_partly_rotated_heads_reordered(form: str, kernels: str, folders: Any) -> None:
    folder, theirs = folders(form, "phi3")
    weights = "float32" if kernels == "compiled" else "shipped"
    assert largest_difference(folder, theirs, kernels, weights) < EXACT


@pytest.mark.parametrize("form", ["awq", "packed"])
def test_experts_are_kept_like_other_matrices(form: str, tmp_path: Path) -> None:
    shape = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    Checkpoint("Qwen3Moe", SMALL | shape | {"norm_topk_prob": True}).write(tmp_path)
    quantize_folder(FORMS[form], tmp_path)
    source = open_model(str(tmp_path))
    assert sum(".experts." in name for name in SafetensorsModel(tmp_path).choices()) == 2 * 6 * 3
    rows = []
    for kernels in ("torch", "compiled"):
        recorded: Any = Recorder(build_model(source.config, source.tensors, dtype="float32", kernels=kernels))
        kv = PagedKv.allocate(KvLayout.of(source.config, block_tokens=4, dtype="float32"), 256)
        generate(Runner(recorded, kv), PROMPTS, NEW_TOKENS)
        rows.append(np.stack(recorded.rows))
    assert rows[0].std() > 0.5
    np.testing.assert_allclose(rows[1], rows[0], rtol=0, atol=3 * EXACT)


def test_a_module_that_is_excluded_keeps_16_bits_and_the_others_do_not(folders: Any) -> None:
    model = SafetensorsModel(folders("awq", "llama")[0])
    assert "model.layers.1.mlp.down_proj.weight" not in model.choices()
    assert "model.layers.0.mlp.down_proj.weight" in model.choices()
    assert len(model.choices()) == 7 * 2 - 1
