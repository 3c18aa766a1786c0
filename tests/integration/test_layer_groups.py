"""Models with sliding windows whose passed pages are released: the same tokens, with less memory.

Reference are the same kernels with pages of all layers, kept for the whole context.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import grpc
import pytest
from harness.fakes.stepping import generate
from harness.idle import assert_workers_idle
from harness.kernels.family_checkpoints import CHECKPOINTS, WINDOW
from harness.servers.processes import running
from integration.test_families import runner_for
from integration.test_layouts import Fetched, a_pair

from kvferry.client import Client
from kvferry.core.errors import UsageError
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine import LLM, SamplingParams
from kvferry.v1 import prefill_pb2

NAMES = ["mistral", "gemma2", "gemma3", "gpt_oss", "qwen2-window"]
BLOCK, CHUNK = 4, 16
LENGTHS = (90, 61, 200, 37)
SHARED = [(3 * i + i * i) % 250 for i in range(40)]
PROMPTS = [[*SHARED, *((11 * i + i * i + length) % 250 for i in range(length))] for length in LENGTHS]
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
LIMITS = SchedulerLimits(max_chunk_tokens=CHUNK, max_mixed_tokens=CHUNK, max_num_seqs=4)

KERNELS = ["compiled", "torch"]
Folders = Callable[[str], Path]
Expected = Callable[..., list[list[int]]]


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
def expected(folders: Folders) -> Expected:
    """Function from a checkpoint's name and kernels to the tokens after each prompt, with pages of all layers."""

    @cache
    def made(name: str, kernels: str = "compiled") -> list[list[int]]:
        runner = runner_for(folders(name), kernels, pages=400)
        found = [generate(runner, [prompt], NEW_TOKENS)[0].tokens for prompt in PROMPTS]
        return [tokens[len(prompt) :] for prompt, tokens in zip(PROMPTS, found, strict=True)]

    return made


def an_llm(folder: Path, num_blocks: int, **settings: str) -> LLM:
    """Create an LLM with `num_blocks` pages of one group, of any size."""
    options = {"dtype": "float32", "kernels": "compiled", "block_tokens": BLOCK, "limits": LIMITS, **settings}
    size = LLM(str(folder), kv_memory=1 << 20, **options).block_bytes
    return LLM(str(folder), kv_memory=num_blocks * size, **options)


def answers(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    found = [list(out.token_ids) for out in llm.generate(prompts, sampling)]
    llm.engine.check_integrity()
    assert llm.engine.is_idle
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_with_whole_pages(name: str, kernels: str, folders: Folders, expected: Expected) -> None:
    llm = an_llm(folders(name), 400, kernels=kernels)
    assert WINDOW in llm.engine.allocator.windows
    assert answers(llm, PROMPTS) == expected(name, kernels)
    first = llm.generate(PROMPTS, GREEDY)
    assert [list(out.token_ids) for out in first] == expected(name, kernels)
    assert all(out.num_cached_tokens >= len(p) - 2 * BLOCK for out, p in zip(first, PROMPTS, strict=True))


@pytest.mark.parametrize(("name", "kernels"), [*((name, "compiled") for name in NAMES), ("gemma3", "torch")])
def test_tokens_are_the_same_after_preemption_and_eviction(name: str, kernels: str, folders: Folders) -> None:
    longer, prompts = replace(GREEDY, max_tokens=100), [prompt[-50:] for prompt in PROMPTS]
    whole = answers(an_llm(folders(name), 400, kernels=kernels, window_pages="keep"), prompts, longer)
    needed = an_llm(folders(name), 400, kernels=kernels).engine.allocator.needs.pages_for(150)
    llm = an_llm(folders(name), needed + 10, kernels=kernels)
    for _ in range(2):
        assert answers(llm, prompts, longer) == whole
    assert answers(llm, prompts[::-1], longer) == whole[::-1]
    # With one window for all layers, admission counts all pages that a sequence can ever hold.
    assert name == "mistral" or llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("speculation", ["ngram?k=5", "suffix"])
def test_draft_tokens_change_nothing(name: str, speculation: str, folders: Folders, expected: Expected) -> None:
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


FLAGS = ["--dtype", "float32", "--block-tokens", str(BLOCK), "--max-chunk-tokens", str(CHUNK), "--window-pages"]


@pytest.mark.parametrize(
    ("connector", "name"), [("shm", "gpt_oss"), ("shm", "mistral"), ("tcp", "gemma3"), ("nixl", "gemma3")]
)
def test_kv_is_handed_over_with_the_windows(connector: str, name: str, folders: Folders, expected: Expected) -> None:
    flags = [*FLAGS, "release"]
    with a_pair(connector, flags, flags, models=(str(folders(name)),) * 2) as pair:
        for prompt, tokens in zip(PROMPTS, expected(name), strict=True):
            found, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert found == tokens
            blocks = -(-len(prompt) // BLOCK)
            assert handoff.num_blocks < 2 * blocks, "a part of the pages of windows"
        again, handoff = pair.hand_over([*PROMPTS[0], 9, 9, 9])
        assert handoff.outcome == Fetched, handoff.reason
        assert handoff.num_cached_tokens >= (0 if name == "mistral" else len(PROMPTS[0]) - BLOCK)
        assert len(again) == NEW_TOKENS
        assert_workers_idle(pair.admin)


def test_workers_that_keep_and_that_release_pages_refuse_each_others(folders: Folders) -> None:
    models = (str(folders("gemma3")),) * 2
    with a_pair("shm", [*FLAGS, "keep"], [*FLAGS, "release"], models=models) as pair:
        answer = pair.compute(PROMPTS[0])
        with pytest.raises(grpc.RpcError, match="KV layout"):
            pair.generate(PROMPTS[0], answer.first_token.id, answer.ticket)
        pair.prefill.Release(prefill_pb2.ReleaseRequest(ticket_id=answer.ticket_id), timeout=60)
        assert_workers_idle(pair.admin)


def test_latent_vectors_are_kept(folders: Folders) -> None:
    path = str(folders("deepseek_v2"))
    with pytest.raises(UsageError, match="need all pages of a sequence") as caught:
        LLM(path, window_pages="release")
    assert caught.value.field == "window_pages"
    with pytest.raises(UsageError, match="must be one of auto, keep, release"):
        LLM("tiny", window_pages="drop")


def test_evicted_blocks_are_loaded_from_a_tier_with_the_pages_of_all_groups(
    folders: Folders, expected: Expected
) -> None:
    address = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
    small = ("--kv-memory", "160KiB", "--max-model-len", "300", "--load-policy", "always", "--threads", "1")
    flags = ("--model", str(folders("gemma3")), *FLAGS, "release", *small, "--tier", "dram://?size=64MiB")
    from_dram = 0
    with running("up", *flags, *address) as process:
        ready = dict(process.wait_for("ready"))
        with Client(str(ready["grpc"]), timeout=60.0) as client:
            for prompt, tokens in [*zip(PROMPTS, expected("gemma3"), strict=True)] * 2:
                (whole,) = client.complete(prompt, GREEDY)
                assert list(whole.token_ids) == tokens
                assert whole.timing is not None
                from_dram += sum(r.blocks_loaded for r in whole.timing.kv if r.source == "dram")
        assert isinstance(ready["workers"], dict)
        assert_workers_idle(ready["workers"].values())
        assert process.stop() == 0
    assert from_dram > 0


def test_pages_are_kept_if_that_is_set_or_takes_less_memory(folders: Folders) -> None:
    path = str(folders("gemma2"))
    options = {"dtype": "float32", "kernels": "compiled", "block_tokens": BLOCK}
    assert LLM(path, limits=LIMITS, window_pages="keep", **options).engine.allocator.windows == (None,)
    assert LLM(path, **options).engine.allocator.windows == (None,), "a chunk is as long as the context"
    assert LLM(path, limits=LIMITS, window_pages="release", **options).engine.allocator.windows == (None, WINDOW)
