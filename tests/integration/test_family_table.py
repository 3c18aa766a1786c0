"""Every cell of the table in docs/models.md: kernels, P/D, adapters and quantized weights of each family.

The kernels of the CPU are compared with transformers in test_families, and GGUF files in test_gguf_families.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.fakes.stepping import generate
from harness.idle import assert_workers_idle
from harness.kernels.family_checkpoints import CHECKPOINTS, Checkpoint
from harness.kernels.lora import train
from harness.kernels.mxfp4_checkpoints import write_mxfp4
from harness.kernels.quantized_checkpoints import FORMS, quantize_folder
from integration.test_adapters import check as check_adapters
from integration.test_families import Recorder
from integration.test_layouts import Fetched, a_pair

from kvferry.core.errors import KvferryError
from kvferry.engine import LLM, SamplingParams
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text("utf-8")
TITLES = [cell.strip() for cell in re.findall(r"^\| family \|.*$", PAGE, re.MULTILINE)[0].strip("|").split("|")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)]
CELLS = {row[0].strip("`"): dict(zip(TITLES, row, strict=True)) for row in ROWS}
PROMPTS = [[7 * i % 250 for i in range(23)], [(11 * i + i * i) % 250 for i in range(110)]]
BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Folders = Callable[[str], tuple[Path, Any]]


def checkpoint_of(family: str) -> Checkpoint:
    return CHECKPOINTS["gemma3" if family == "gemma3_text" else "gemma3-images" if family == "gemma3" else family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A function from a family to the folder of a checkpoint, and its model in transformers."""

    @cache
    def made(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family)
        return folder, checkpoint_of(family).write(folder)

    return made


def cells(title: str) -> list[tuple[str, str]]:
    return [(family, row[title]) for family, row in CELLS.items()]


def logits_of(folder: Path, kernels: str, prompts: list[list[int]], new_tokens: int) -> tuple[np.ndarray, list[Any]]:
    """Return the logits of the sampled tokens, and the sequences."""
    source = open_model(str(folder))
    recorded: Any = Recorder(build_model(source.config, source.tensors, dtype="float32", kernels=kernels))
    layout = KvLayout.of(source.config, block_tokens=BLOCK, dtype="float32")
    found = generate(Runner(recorded, PagedKv.allocate(layout, 256)), prompts, new_tokens)
    return np.stack(recorded.rows), [one.tokens for one in found]


@pytest.mark.long
@pytest.mark.parametrize(("family", "cell"), cells("Triton"))
def test_triton(family: str, cell: str, folders: Folders) -> None:
    assert cell == "works"
    prompts = [PROMPTS[0], [5]]
    theirs, tokens = logits_of(folders(family)[0], "torch", prompts, 4)
    ours, found = logits_of(folders(family)[0], "triton", prompts, 4)
    assert found == tokens
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize(("family", "cell"), cells("P/D"))
def test_prefill_and_decode(family: str, cell: str, folders: Folders) -> None:
    assert cell == "works"
    folder = str(folders(family)[0])
    llm = LLM(folder, dtype="float32", block_tokens=BLOCK, kv_memory=4 << 20)
    expected = [list(out.token_ids) for out in llm.generate(PROMPTS, GREEDY)]
    flags = ["--dtype", "float32", "--block-tokens", str(BLOCK)]
    with a_pair("shm", flags, flags, models=(folder, folder)) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            found, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert found[: len(tokens)] == tokens[: len(found)]
        assert_workers_idle(pair.admin)


@pytest.mark.parametrize(("family", "cell"), cells("LoRA"))
def test_adapters(family: str, cell: str, folders: Folders, tmp_path: Path) -> None:
    folder, theirs = folders(family)
    paths = [tmp_path / "one", tmp_path / "two"]
    is_mixture = open_model(str(folder)).config.experts is not None
    assert cell == ("refused" if "deepseek" in family else "attention" if is_mixture else "works")
    linears = ["o_proj"] if cell == "refused" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    if cell == "works":
        linears += ["gate_proj", "up_proj", "down_proj"]
    targets: Any = linears
    if checkpoint_of(family).outer is not None:  # without the layers for images
        targets = rf".*language_model.*\.({'|'.join(linears)})"
    elif family == "phi3":
        targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    merged = [
        train(deepcopy(theirs), path, seed=seed, target_modules=targets).merge_and_unload()
        for seed, path in enumerate(paths)
    ]
    for kernels in ("torch", "compiled"):
        if cell == "refused":
            with pytest.raises(KvferryError, match="not supported for models with latent attention"):
                LLM(str(folder), kernels=kernels, kv_memory=1 << 20, adapters={"one": str(paths[0])})
        else:
            check_adapters(family, kernels, folder, paths, theirs, merged)


SIZES = {"intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "q_lora_rank": 64}
"""Numbers of inputs that groups of 32 divide."""


@pytest.mark.parametrize(("family", "cell"), cells("4-bit"))
def test_quantized_weights(family: str, cell: str, tmp_path: Path) -> None:
    assert cell == "works"
    made = checkpoint_of(family)
    if family == "gpt_oss":
        write_mxfp4(made, tmp_path)
    else:
        sizes = {key: size for key, size in SIZES.items() if key in made.settings or key == "intermediate_size"}
        Checkpoint(made.prefix, made.settings | sizes, made.config_class, made.seed, made.outer).write(tmp_path)
        quantize_folder(FORMS["packed"], tmp_path)
    theirs, tokens = logits_of(tmp_path, "torch", PROMPTS[1:], 6)
    ours, found = logits_of(tmp_path, "compiled", PROMPTS[1:], 6)
    assert theirs.std() > 0.5
    assert found == tokens
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-3)
