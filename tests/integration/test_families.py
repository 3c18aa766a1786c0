"""Each model family against transformers' own class: logits, tokens, and any chunking, batch and cached prefix."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import CHECKPOINTS

from kvferry.engine import LLM, SamplingParams
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.model import Logits, Model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.config import ModelConfig
from kvferry.weights.features import features_in_use

TOLERANCE = 2e-4
"""Largest difference of a logit in float32; logits have a magnitude of several units."""
NEW_TOKENS = 64
ORIGINAL = 64
"""Original context length of the checkpoint with LongRoPE."""
PROMPTS = [[5], [7 * i % 250 for i in range(23)], [(11 * i + i * i) % 250 for i in range(210)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


Folders = Callable[[str], tuple[Path, Any]]


class Recorder:
    """Wraps a model and keeps the logits of its steps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.rows: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def compute(self, batch: StepBatch, kv: PagedKv) -> Logits:
        logits = self._model.compute(batch, kv)
        self.rows += [np.array(logits.values[row]) for row in range(len(logits.values))]
        return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A function from a checkpoint's name to its folder and its model in transformers."""

    @cache
    def made(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        return folder, CHECKPOINTS[name].write(folder)

    return made


def runner_for(folder: Path, kernels: str, served: int | None = None, pages: int = 256) -> Runner:
    source = open_model(str(folder))
    config = source.config.served(served)
    model = build_model(config, source.tensors, dtype="float32", kernels=kernels)
    recorded: Any = Recorder(model)
    return Runner(recorded, PagedKv.allocate(KvLayout.of(config, block_tokens=4, dtype="float32"), pages))


@torch.inference_mode()
def check(runner: Runner, theirs: Any, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS) -> None:
    """Check the logits of all sampled tokens of a batch, and the tokens."""
    ours = generate(runner, prompts, new_tokens)
    recorded: Any = runner.model
    rows = np.stack(recorded.rows).reshape(new_tokens, len(prompts), -1)
    for index, one in enumerate(ours):
        expected = theirs(torch.tensor([one.tokens[:-1]]), logits_to_keep=new_tokens).logits[0].numpy()
        assert expected.std() > 0.5, "logits must differ enough to make the comparison meaningful"
        assert np.abs(rows[:, index] - expected).max() < TOLERANCE
        assert expected.argmax(-1).tolist() == one.tokens[len(one.prompt) :]


KERNELS = ["torch", "compiled"]


CASES = [(name, kernels) for name in CHECKPOINTS for kernels in KERNELS if kernels == "torch" or "odd" not in name]


@pytest.mark.parametrize(("name", "kernels"), CASES)
def test_logits_and_tokens_are_those_of_transformers(name: str, kernels: str, folders: Folders) -> None:
    folder, theirs = folders(name)
    # With LongRoPE, transformers changes the frequencies when a sequence passes the original length.
    prompts = [p for p in PROMPTS if len(p) > ORIGINAL or not is_long(name)]
    check(runner_for(folder, kernels), theirs, prompts)


def is_long(name: str) -> bool:
    """Return whether the checkpoint has LongRoPE."""
    return "short_factor" in str(CHECKPOINTS[name].settings)


def test_a_short_context_takes_the_short_factors(folders: Folders) -> None:
    folder, theirs = folders("phi3")
    check(runner_for(folder, "torch", served=ORIGINAL), theirs, [PROMPTS[0], PROMPTS[1]], ORIGINAL - len(PROMPTS[1]))


@pytest.mark.parametrize(("name", "kernels"), CASES)
def test_chunks_cached_prefixes_and_batches_change_nothing(name: str, kernels: str, folders: Folders) -> None:
    folder, _ = folders(name)
    runner = runner_for(folder, kernels)
    alone = [generate(runner, [prompt], 8)[0].tokens for prompt in PROMPTS]
    sizes = itertools.cycle((5, 1, 17, 3))
    assert [g.tokens for g in generate(runner, PROMPTS, 8, chunk=lambda _: next(sizes))] == alone
    llm = LLM(str(folder), dtype="float32", kernels=kernels, kv_memory=4 << 20)
    cold = [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]
    assert [[*p, *tokens] for p, tokens in zip(PROMPTS, cold, strict=True)] == alone
    warm = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in warm] == cold
    assert warm[-1].num_cached_tokens >= 128


OTHER_TENSORS = {"norm_placement", "qk_norm_spans_heads", "experts", "attention_sinks", "output_bias", "latent"}
"""Features without which a checkpoint has other tensors."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_feature_that_is_ignored_changes_the_logits(name: str, folders: Folders) -> None:
    """A feature without effect in a checkpoint would make the tests above useless."""
    source = open_model(str(folders(name)[0]))
    defaults = {f.name: f.default for f in fields(ModelConfig)}
    used = features_in_use(source.config)

    def logits_of(config: ModelConfig) -> np.ndarray:
        recorded: Any = Recorder(build_model(config, source.tensors, dtype="float32", kernels="torch"))
        kv = PagedKv.allocate(KvLayout.of(config, block_tokens=4, dtype="float32"), 64)
        generate(Runner(recorded, kv), [PROMPTS[-1]], 1)
        return np.stack(recorded.rows)

    whole = logits_of(source.config)
    if (experts := source.config.experts) is not None:
        changes: list[dict[str, Any]] = [{"renormalizes": not experts.renormalizes}, {"active": experts.active - 1}]
        changes += [{"weight_scale": 1.0}] if experts.weight_scale != 1.0 else []
        changes += [{"active_groups": experts.groups}] if experts.groups > 1 else []
        for change in changes:
            assert np.abs(logits_of(replace(source.config, experts=replace(experts, **change))) - whole).max() > 0.01
    for feature in used:
        # A model with other tensors fails the check of shapes, and other frequency factors are refused when the file is
        # read.
        if feature in OTHER_TENSORS or (feature == "rotary_dim" and is_long(name)):
            continue
        without = replace(source.config, **{feature: defaults[feature]})
        assert np.abs(logits_of(without) - whole).max() > 10 * TOLERANCE, feature
