"""Tokens do not depend on chunks, batch mates, page placement or page size."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.fakes.stepping import Generation, everything, generate, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken, ModelFileError
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.step import StepPlan
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig


def runner_for(config: ModelConfig, *, block_tokens: int = 4, kernels: str = "auto", blocks: int = 128) -> Runner:
    model = build_model(config, tiny.TinyTensors(config), dtype="float32", kernels=kernels)
    return Runner(model, PagedKv.allocate(KvLayout.of(config, block_tokens=block_tokens, dtype="float32"), blocks))


PROMPTS = [[5], [1, 2, 3, 4], list(range(100, 117)), [257, *b"user\nhello", 258], list(b"a longer prompt " * 3)]
VARIANTS = [tiny.config(), tiny.config(qk_norm=True), tiny.config(qkv_bias=True)]
TINY = runner_for(VARIANTS[0])


def tokens_of(generations: list[Generation]) -> list[list[int]]:
    return [g.tokens[len(g.prompt) :] for g in generations]


ALONE = [tokens_of(generate(TINY, [prompt], 12))[0] for prompt in PROMPTS]


def test_the_tiny_model_does_not_repeat_one_token() -> None:
    assert all(len(set(tokens)) > 3 for tokens in ALONE)
    assert len({tuple(tokens) for tokens in ALONE}) == len(ALONE)


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: c.architecture)
def test_the_fast_family_generates_what_the_reference_generates(config: ModelConfig) -> None:
    fast, slow = runner_for(config), runner_for(config, kernels="reference")
    assert tokens_of(generate(fast, PROMPTS, 12)) == tokens_of(generate(slow, PROMPTS, 12))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 3, 4, 16]))
def test_any_chunks_in_any_pages_give_the_tokens_of_one_piece(sizes: list[int], block_tokens: int) -> None:
    runner = TINY if block_tokens == 4 else Runner(TINY.model, paged(block_tokens))
    turn = itertools.cycle(sizes)
    assert tokens_of(generate(runner, PROMPTS, 12, chunk=lambda _: next(turn))) == ALONE


def paged(block_tokens: int) -> PagedKv:
    shape = KvLayout.of(TINY.model.config, block_tokens=block_tokens, dtype="float32")
    return PagedKv.allocate(shape, 512 // block_tokens)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=6))
def test_batch_mates_change_nothing(chosen: list[int]) -> None:
    assert tokens_of(generate(TINY, [PROMPTS[i] for i in chosen], 12)) == [ALONE[i] for i in chosen]


def test_random_draws_do_not_depend_on_chunks_or_mates() -> None:
    params = [SamplingParams(temperature=1.3, seed=i, top_p=0.95) for i in range(len(PROMPTS))]
    together = tokens_of(generate(TINY, PROMPTS, 20, params=params, chunk=lambda _: 3))
    alone = [tokens_of(generate(TINY, [p], 20, params=q))[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert together != tokens_of(generate(TINY, PROMPTS, 20))


def test_generation_resumed_from_its_own_tokens_is_the_same() -> None:
    params = SamplingParams(temperature=1.0, seed=42)
    whole = generate(TINY, [PROMPTS[3]], 20, params=params)[0].tokens
    half = len(PROMPTS[3]) + 9
    assert generate(TINY, [whole[:half]], 11, params=params)[0].tokens == whole


def test_stale_pages_full_of_nan_change_nothing() -> None:
    runner = runner_for(VARIANTS[0])
    runner.kv.pages.fill_(torch.nan)
    assert tokens_of(generate(runner, PROMPTS, 12, chunk=lambda _: 5)) == ALONE


def test_a_prefix_already_in_pages_is_not_needed_again() -> None:
    first = generate(TINY, [PROMPTS[4]], 1)[0]
    prefix = len(PROMPTS[4]) // 4 * 4
    again = Generation(PROMPTS[4], 1, first.blocks)
    again.computed = prefix - 4
    step(TINY, [again], everything)
    assert again.tokens == first.tokens


def test_an_empty_plan_gives_nothing() -> None:
    assert TINY.run(StepPlan(())).outputs == {}


def test_pages_of_another_model_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="the pages have"):
        Runner(TINY.model, PagedKv.allocate(replace(TINY.kv.layout, num_layers=3), 1))


class Altered(tiny.TinyTensors):
    """The tiny model's weights with one tensor replaced."""

    def __init__(self, name: str, value: np.ndarray | None) -> None:
        super().__init__(tiny.config())
        self._name, self._value = name, value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = dict(super().shapes())
        if self._value is None:
            del shapes[self._name]
        else:
            shapes[self._name] = self._value.shape
        return shapes

    def read(self, name: str) -> np.ndarray:
        return self._value if name == self._name and self._value is not None else super().read(name)


NAN_NORM = np.full(48, np.nan, dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "1 tensors are missing .model.norm.weight."),
        ("model.norm.bias", np.ones(48, np.float32), "unknown for llama .model.norm.bias."),
        ("model.norm.weight", np.ones(47, np.float32), r"model.norm.weight is \[47\] instead of \[48\]"),
        ("model.norm.weight", NAN_NORM, "'model.norm.weight' holds values that are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_named(name: str, value: np.ndarray | None, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        build_model(tiny.config(), Altered(name, value), dtype="float32")
