"""gpt-oss against transformers: long prompts, MXFP4 and bfloat16 checkpoints, sinks, hand-off with windows passed."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import GPT_OSS, WINDOW, Checkpoint
from harness.kernels.mxfp4_checkpoints import write_mxfp4
from integration.test_families import NEW_TOKENS, PROMPTS, Recorder, check, runner_for
from integration.test_layouts import GREEDY, Fetched, a_pair, assert_workers_idle
from safetensors.torch import load_file, save_file

from kvferry.engine import LLM
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.checkpoints.safetensors_dir import SafetensorsModel
from kvferry.weights.quantized.representation import Kept

MADE = Checkpoint("GptOss", GPT_OSS | {"max_position_embeddings": 1024})
LONG = [[(13 * i + i * i + length) % 250 for i in range(length)] for length in (600, 257, 40)]
FORMS = ("float32", "bfloat16", "mxfp4")
KERNELS = ("torch", "compiled")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A function from a form of the experts to a folder and its model in transformers."""

    @cache
    def made(form: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(form)
        if form == "mxfp4":
            return folder, write_mxfp4(MADE, folder)
        model = MADE.write(folder)
        if form == "bfloat16":
            path = folder / "model.safetensors"
            save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
            model.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
        return folder, model

    return made


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", FORMS[1:])
def test_forms_of_experts_have_the_logits_of_transformers(form: str, kernels: str, folders: Any) -> None:
    folder, theirs = folders(form)
    check(runner_for(folder, kernels), theirs, PROMPTS[1:], 8)


@pytest.mark.long
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_long_prompts_have_the_logits_of_transformers(form: str, kernels: str, folders: Any) -> None:
    folder, theirs = folders(form)
    check(runner_for(folder, kernels, pages=400), theirs, LONG, NEW_TOKENS)


def test_mxfp4_is_kept_in_4_bits_exactly(folders: Any) -> None:
    model = SafetensorsModel(folders("mxfp4")[0])
    choices = model.choices()
    assert len(choices) == 4 * 8 * 3
    assert {choice.kept for choice in choices.values()} == {Kept.E2M1}
    line = model.weights()[0]
    assert line.endswith(
        "MXFP4, kept as 4-bit e2m1 values with a float16 scale per 32 inputs; not 4-bit values with a float16 scale per"
        " 32 inputs: e2m1 values are not evenly spaced"
    )


@torch.inference_mode()
def test_sinks_and_biases_change_the_logits(folders: Any) -> None:
    """Sinks and biases have an effect in this checkpoint, so a model that ignored them would fail the other tests."""
    _, theirs = folders("float32")
    prompt = torch.tensor([PROMPTS[1]])
    whole = theirs(prompt).logits
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    for part in ("sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias", "o_proj.bias", "q_proj.bias"):
        changed = {name: value * 0 - 30 * (part == "sinks") for name, value in state.items() if name.endswith(part)}
        theirs.load_state_dict(state | changed)
        assert (theirs(prompt).logits - whole).abs().max() > 0.01, part
    theirs.load_state_dict(state)


def test_limit_and_factor_of_the_activation_change_the_logits(folders: Any) -> None:
    source = open_model(str(folders("float32")[0]))
    rows = []
    for change in ({}, {"swiglu_limit": 7.0}, {"swiglu_alpha": 1.0}):
        model: Any = Recorder(
            build_model(replace(source.config, **change), source.tensors, dtype="float32", kernels="torch")
        )
        kv = PagedKv.allocate(KvLayout.of(source.config, block_tokens=4, dtype="float32"), 64)
        generate(Runner(model, kv), [PROMPTS[1]], 1)
        rows.append(np.stack(model.rows))
    assert all(np.abs(other - rows[0]).max() > 0.01 for other in rows[1:])


def test_kv_is_handed_over_and_prefixes_are_used_again(folders: Any) -> None:
    """Prompts are several times longer than the window, so layers with a window no longer need most of their KV."""
    folder, _ = folders("mxfp4")
    one = LLM(str(folder), dtype="float32", kv_memory=8 << 20)
    prompts = [[(7 * i + length) % 200 for i in range(length)] for length in (5 * WINDOW, 290)]
    with a_pair("shm", *(["--dtype", "float32"],) * 2, models=(str(folder),) * 2) as pair:
        for prompt in prompts:
            tokens, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert tokens == list(one.generate([prompt], GREEDY)[0].token_ids)
        assert_workers_idle(pair.admin)
    again = one.generate(prompts[-1:], GREEDY)[0]
    assert again.num_cached_tokens >= 256
