"""DeepSeek V2 and V3 against transformers with long prompts; latent pages through hand-off, block sizes and a tier."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness.kernels.family_checkpoints import DEEPSEEK_V2, DEEPSEEK_V3, Checkpoint
from harness.servers.processes import running
from integration.test_families import NEW_TOKENS, check, runner_for
from integration.test_layouts import GREEDY, Fetched, a_pair, assert_workers_idle

from kvferry.client import Client
from kvferry.core.errors import UsageError
from kvferry.engine import LLM
from kvferry.engine.execute.models.build import resolve_kernels
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import open_model
from kvferry.weights.config import ModelConfig

MADE = {
    "v2": Checkpoint("DeepseekV2", DEEPSEEK_V2 | {"max_position_embeddings": 1024}),
    "v3": Checkpoint("DeepseekV3", DEEPSEEK_V3 | {"max_position_embeddings": 1024}),
    "v3-pairs-apart": Checkpoint("DeepseekV3", DEEPSEEK_V3 | {"rope_interleave": False}),
}
LONG = [[(13 * i + i * i + length) % 250 for i in range(length)] for length in (600, 257, 40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A function from a checkpoint's name to its folder and its model in transformers."""

    @cache
    def made(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        return folder, MADE[name].write(folder)

    return made


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_long_prompts_have_the_logits_of_transformers(name: str, kernels: str, folders: Any) -> None:
    folder, theirs = folders(name)
    check(runner_for(folder, kernels, pages=400), theirs, LONG, NEW_TOKENS)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_rotary_pairs_that_are_not_adjacent_stay_apart(kernels: str, folders: Any) -> None:
    folder, theirs = folders("v3-pairs-apart")
    check(runner_for(folder, kernels), theirs, [LONG[-1]], 4)


def test_latent_pages_are_handed_over_between_block_sizes(folders: Any) -> None:
    folder, _ = folders("v3")
    config = open_model(str(folder)).config
    assert KvLayout.of(config, block_tokens=16, dtype="float32").token_bytes == 4 * (32 + 16) * 4
    one = LLM(str(folder), dtype="float32", kv_memory=8 << 20)
    prompts = [[(7 * i + length) % 200 for i in range(length)] for length in (33, 290)]
    sizes = ["--dtype", "float32", "--block-tokens"]
    with a_pair("shm", [*sizes, "16"], [*sizes, "32"], (str(folder),) * 2) as pair:
        for prompt in prompts:
            tokens, handoff = pair.hand_over(prompt)
            assert handoff.outcome == Fetched, handoff.reason
            assert tokens == list(one.generate([prompt], GREEDY)[0].token_ids)
        tokens, handoff = pair.hand_over([*prompts[-1][:270], 9, 9, 9])
        assert (handoff.outcome, handoff.num_cached_tokens) == (Fetched, 256)
        assert tokens == list(one.generate([[*prompts[-1][:270], 9, 9, 9]], GREEDY)[0].token_ids)
        assert_workers_idle(pair.admin)


@pytest.mark.long
def test_latent_pages_are_loaded_from_a_tier(folders: Any) -> None:
    folder, _ = folders("v3")
    one = LLM(str(folder), dtype="float32", kv_memory=8 << 20)
    prompts = [[(number * 31 + 7 * i) % 199 for i in range(320)] for number in range(4)]
    flags = ("--dtype", "float32", "--threads", "1", "--kv-memory", "384KiB", "--max-model-len", "512")
    where = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json", "--load-policy", "always")
    with running("up", "--model", str(folder), *flags, *where, "--tier", "dram://?size=64MiB") as process:
        ready = dict(process.wait_for("ready"))
        from_dram = 0
        with Client(str(ready["grpc"]), timeout=120) as client:
            for number in (0, 1, 2, 3, 0, 1, 2, 3):
                (whole,) = client.complete(prompts[number], GREEDY)
                assert whole.token_ids == list(one.generate([prompts[number]], GREEDY)[0].token_ids)
                assert whole.timing is not None
                from_dram += sum(r.blocks_loaded for r in whole.timing.kv if r.source == "dram")
        assert from_dram >= 16


@pytest.mark.parametrize(
    ("kernels", "dtype", "device", "message"),
    [
        (
            "torch",
            "float32",
            "cuda",
            "latent attention of the model family deepseek_v3 on a GPU needs the Triton kernels",
        ),
        (
            "auto",
            "int8",
            "cuda",
            "latent vectors of the model family deepseek_v3 are kept in .*, not int8; use --dtype",
        ),
        ("auto", "fp8", "cpu", "latent vectors of the model family deepseek_v3 are kept in .*, not fp8; use --dtype"),
    ],
)
def test_kernels_without_latent_attention_are_refused(
    kernels: str, dtype: str, device: str, message: str, folders: Any
) -> None:
    config = open_model(str(folders("v3")[0])).config
    with pytest.raises(UsageError, match=message):
        resolve_kernels(kernels, config, dtype, device)
    assert config.latent is not None
    for change, reason in (
        ({"rank": 48}, "latent vectors of 48 and queries of 32 values are not multiples of 32"),
        ({"rank": 544}, "vectors have more than 512 values"),
        ({"value": 12}, "heads of 32 and 16 rotated values, and values of 12, are not multiples of 16"),
    ):
        other: ModelConfig = replace(config, latent=replace(config.latent, **change))
        assert resolve_kernels("auto", other, "float32") == "torch"
        with pytest.raises(UsageError, match=reason):
            resolve_kernels("compiled", other, "float32")
