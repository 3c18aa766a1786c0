"""Quantized checkpoints with the Triton backend: weights stay codes, and logits and tokens are those of the dequantized
weights.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import Checkpoint
from harness.kernels.quantized_checkpoints import FORMS, write_quantized
from integration.test_families import Recorder

from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.coded_linears import on_device
from kvferry.engine.execute.models.transformer import Transformer
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels.coded_weights import dequantized
from kvferry.kernels.gpu.weights.products import CodedLinear
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.quantized.grouped import gguf_codes

LLAMA = Checkpoint("Llama", {"intermediate_size": 96, "num_hidden_layers": 2})
PROMPTS = [[5], [(11 * i + i * i) % 250 for i in range(23)]]
NEW_TOKENS = 4
LARGEST_DIFFERENCE = 2e-4
"""Of a logit in float32. Logits differ by several units."""
QUICK = ("awq", "fp8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a form to the folder of its checkpoint."""

    @cache
    def made(form: str) -> Path:
        folder = tmp_path_factory.mktemp(form)
        write_quantized(FORMS[form], LLAMA, folder)
        return folder

    return made


@torch.inference_mode()
def computed(folder: Path, kernels: str, device: torch.device | str) -> tuple[Any, list[list[int]], np.ndarray]:
    """Return the model, its greedy tokens and their logits."""
    source = open_model(str(folder))
    model = build_model(source.config, source.tensors, dtype="float32", kernels=kernels, device=str(device))
    recorded: Any = Recorder(model)
    pages = PagedKv.allocate(KvLayout.of(source.config, block_tokens=4, dtype="float32"), 64, device)
    made = generate(Runner(recorded, pages), PROMPTS, NEW_TOKENS)
    return model, [one.tokens for one in made], np.stack(recorded.rows)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form in QUICK else [pytest.mark.long]) for form in FORMS]
)
def test_tokens_and_logits_are_those_of_the_dequantized_weights(
    device: torch.device, form: str, folders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model, tokens, logits = computed(folders(form), "triton", device)
    assert isinstance(model, Transformer)
    assert isinstance(model.weights.layers[0].mlp.down, CodedLinear)
    assert not isinstance(model.weights.layers[1].mlp.down, CodedLinear) or "gptq" in form
    assert not isinstance(model.weights.head, CodedLinear)
    plain, expected_tokens, expected = computed(folders(form), "torch", "cpu")
    assert expected.std() > 0.5
    assert float(np.abs(logits - expected).max()) < LARGEST_DIFFERENCE
    assert tokens == expected_tokens
    assert model.weight_bytes < plain.weight_bytes
    assert "kernel, a scale per" in caplog.text


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_codes_of_gguf_types_are_those_of_the_library(name: str) -> None:
    kind = GGMLQuantizationType[name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (5, 2 * 256 // size * num_bytes), dtype=np.uint8)
    blocks = rows.reshape(-1, num_bytes)
    blocks[:, 1] &= 0x3F  # finite scales and minima
    if name in ("Q4_1", "Q4_K"):
        blocks[:, 3] &= 0x3F
    found = gguf_codes(name, rows.reshape(-1), 5)
    assert found is not None
    values = dequantized(on_device(found, torch.device("cpu"))).numpy()
    expected = gguf.quants.dequantize(rows, kind)
    assert np.allclose(values, expected, rtol=1e-6, atol=1e-6 * float(np.abs(expected).max()))


def test_other_types_have_no_codes() -> None:
    assert gguf_codes("Q6_K", np.zeros(210, np.uint8), 1) is None
