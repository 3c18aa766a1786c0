"""LoRA adapters against transformers with the same adapter merged by peft: logits and tokens, alone and in mixed
batches."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import CHECKPOINTS
from harness.kernels.lora import train
from integration.test_families import KERNELS, TOLERANCE, Recorder

from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.adapters.adapter_folder import read_adapter

NEW_TOKENS = 16
PROMPTS = [[5], [7 * i % 250 for i in range(23)], [(11 * i + i * i) % 250 for i in range(110)]]
FAMILIES = ["llama", "qwen2", "phi3", "gemma3"]
"""Families with different projections; test_family_table has all, with adapters of one rank."""
Made = Callable[[str], tuple[Path, list[Path], Any, list[Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function from a family to a checkpoint, two adapters of it, its model in transformers, and both merged
    models.
    """

    @cache
    def make(name: str) -> tuple[Path, list[Path], Any, list[Any]]:
        folder = tmp_path_factory.mktemp(name)
        theirs = CHECKPOINTS[name].write(folder)
        paths = [tmp_path_factory.mktemp(f"{name}-adapter") for _ in range(2)]
        settings: list[dict[str, Any]] = [
            {"use_rslora": True},
            {"r": 6, "lora_alpha": 3, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"layers.1.mlp.down_proj": 9}},
        ]
        merged = [
            train(deepcopy(theirs), path, seed=seed, **own).merge_and_unload()
            for seed, (path, own) in enumerate(zip(paths, settings, strict=True))
        ]
        return folder, paths, theirs, merged

    return make


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_tokens_are_those_of_merged_weights(name: str, kernels: str, made: Made) -> None:
    check(name, kernels, *made(name))


@torch.inference_mode()
def check(name: str, kernels: str, folder: Path, paths: list[Path], theirs: Any, merged: list[Any]) -> None:
    """Check the logits of three sequences in one batch: with an adapter, without, and with another adapter."""
    source = open_model(str(folder))
    model = build_model(source.config, source.tensors, dtype="float32", kernels=kernels)
    recorded: Any = Recorder(model)
    runner = Runner(recorded, PagedKv.allocate(KvLayout.of(source.config, block_tokens=4, dtype="float32"), 256))
    for slot, path in enumerate(paths):
        runner.activate(slot, model.pack_adapter(read_adapter(path, source.config, max_rank=8)))
    # With LongRoPE, transformers changes the frequencies when a sequence passes the original length.
    prompts = PROMPTS[2:] * 3 if name == "phi3" else PROMPTS
    slots = [0, -1, 1]
    ours = generate(runner, prompts, NEW_TOKENS, slots=slots)
    rows = np.stack(recorded.rows).reshape(NEW_TOKENS, len(prompts), -1)
    for index, (one, slot) in enumerate(zip(ours, slots, strict=True)):
        reference = theirs if slot < 0 else merged[slot]
        expected = reference(torch.tensor([one.tokens[:-1]]), logits_to_keep=NEW_TOKENS).logits[0].numpy()
        plain = theirs(torch.tensor([one.tokens[:-1]]), logits_to_keep=NEW_TOKENS).logits[0].numpy()
        assert slot < 0 or np.abs(expected - plain).max() > 100 * TOLERANCE, "the adapter changes the logits"
        assert np.abs(rows[:, index] - expected).max() < TOLERANCE
        assert expected.argmax(-1).tolist() == one.tokens[len(one.prompt) :]
