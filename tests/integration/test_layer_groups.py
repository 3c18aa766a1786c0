"""Models with sliding windows whose passed pages are released: the same tokens, with less memory.

Reference are the same kernels with pages of all layers, kept for the whole context.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from harness.fakes.stepping import generate
from harness.kernels.family_checkpoints import CHECKPOINTS, WINDOW
from integration.test_families import runner_for

from kvferry.engine import LLM, SamplingParams
from kvferry.engine.plan.step_budget import SchedulerLimits

NAMES = ["mistral", "gemma2", "gemma3", "gpt_oss", "qwen2-window"]
BLOCK, CHUNK = 4, 16
LENGTHS = (90, 61, 200, 37)
SHARED = [(3 * i + i * i) % 250 for i in range(40)]
PROMPTS = [[*SHARED, *((11 * i + i * i + length) % 250 for i in range(length))] for length in LENGTHS]
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LIMITS = SchedulerLimits(max_chunk_tokens=CHUNK, max_mixed_tokens=CHUNK, max_sequences=4)

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Function from a checkpoint's name to its folder."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        CHECKPOINTS[name].write(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def expected(folders: Folders) -> Callable[[str], list[list[int]]]:
    """Function from a checkpoint's name to the tokens after each prompt, with pages of all layers."""

    @cache
    def made(name: str) -> list[list[int]]:
        runner = runner_for(folders(name), "compiled", pages=400)
        found = [generate(runner, [prompt], NEW_TOKENS)[0].tokens for prompt in PROMPTS]
        return [tokens[len(prompt) :] for prompt, tokens in zip(PROMPTS, found, strict=True)]

    return made


def an_llm(folder: Path, num_blocks: int, **settings: str) -> LLM:
    """Create an LLM with `num_blocks` pages of one group, whatever their size."""
    options = {"dtype": "float32", "kernels": "compiled", "block_tokens": BLOCK, "limits": LIMITS, **settings}
    size = LLM(str(folder), kv_bytes=1 << 20, **options).block_bytes
    return LLM(str(folder), kv_bytes=num_blocks * size, **options)


def answers(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    found = [out.token_ids for out in llm.generate(prompts, sampling)]
    llm.engine.check_integrity()
    assert llm.engine.is_idle
    return found


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_with_whole_pages(name: str, folders: Folders, expected: Callable[[str], object]) -> None:
    llm = an_llm(folders(name), 400)
    assert WINDOW in llm.engine.allocator.windows
    assert answers(llm, PROMPTS) == expected(name)
    first = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in first] == expected(name)
    assert all(out.num_cached_tokens >= len(p) - 2 * BLOCK for out, p in zip(first, PROMPTS, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_same_after_preemption_and_eviction(
    name: str, folders: Folders, expected: Callable[[str], list[list[int]]]
) -> None:
    llm = an_llm(folders(name), 110)
    for _ in range(2):
        assert answers(llm, PROMPTS) == expected(name)
    assert answers(llm, PROMPTS[::-1]) == expected(name)[::-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speculation", ["ngram?k=5", "suffix"])
def test_draft_tokens_change_nothing(
    name: str, speculation: str, folders: Folders, expected: Callable[[str], object]
) -> None:
    llm = an_llm(folders(name), 200, speculation=speculation)
    assert answers(llm, PROMPTS) == expected(name)
    repeated = [[1, 2, 3, 4, 5, 6] * 12] * 2
    assert answers(llm, repeated) == answers(an_llm(folders(name), 200), repeated)


def test_samples_of_a_seed_are_those_of_the_model_with_whole_pages(folders: Folders) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
    runner = runner_for(folders("gemma3"), "compiled", pages=400)
    alone = generate(runner, [PROMPTS[0]], NEW_TOKENS, params=sampling)[0].tokens[len(PROMPTS[0]) :]
    llm = an_llm(folders("gemma3"), 400)
    assert answers(llm, [PROMPTS[0]] * 3, sampling) == [alone] * 3
    other = replace(sampling, seed=8)
    assert answers(llm, [PROMPTS[0]], other) != [alone]


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_other_kernels_keep_whole_pages(kernels: str, folders: Folders) -> None:
    llm = LLM(str(folders("gemma3")), dtype="float32", kernels=kernels, block_tokens=BLOCK, limits=LIMITS)
    assert llm.engine.allocator.windows == (None,)
