"""Engines with latent pages and the Triton backend give the tokens of the torch backend; captured steps as well."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.kernels.kernel_cases import fair_error
from unit.kernels.test_captured_steps import GREEDY, Quiet, generated, plain_runner, runner_on
from unit.kernels.test_triton_engine import tokens

from kvferry.core.errors import UsageError
from kvferry.engine.execute.gpu.memory import activation_bytes
from kvferry.engine.execute.models.build import resolve_kernels
from kvferry.engine.schedule.step import graph_sizes
from kvferry.kernels.batch import AttentionBatch, LatentUp
from kvferry.kernels.gpu.backend import OPS
from kvferry.kernels.reference import forward as reference
from kvferry.model import tiny
from kvferry.weights.config import Experts, Latent, ModelConfig, Scoring

LATENT = replace(
    tiny.config(),
    architecture="deepseek_v3",
    num_kv_heads=1,
    head_dim=24,
    attention_scale=0.3,
    latent=Latent(rank=20, rotated=8, plain=16, value=12, query_rank=10),
)
CONFIGS = {
    "latent": LATENT,
    "experts": replace(
        LATENT,
        latent=replace(LATENT.latent, query_rank=None),  # type: ignore[type-var]
        experts=Experts(
            8, 2, 24, renormalizes=True, shared_size=16, has_shared_gate=False, dense_layers=(0,),
            scoring=Scoring.SIGMOID, groups=4, active_groups=2, weight_scale=1.5,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["latent", pytest.param("experts", marks=pytest.mark.long)])
def test_tokens_are_the_torch_family_s(device: torch.device, name: str) -> None:
    config = CONFIGS[name]
    assert tokens(config, "triton", device, [1, 5, 3, 7, 2]) == tokens(config, "torch", "cpu", ())


@pytest.mark.parametrize("name", ["latent", pytest.param("experts", marks=pytest.mark.long)])
def test_captured_steps_give_the_torch_family_s_tokens(device: torch.device, name: str) -> None:
    """Decode steps are replayed whole, and prompts of up to 16 rows in pieces."""
    config = CONFIGS[name]
    runner = runner_on(device, config, piece_rows=(16,))
    runner.capture_all()
    assert generated(runner, GREEDY) == generated(plain_runner(config), GREEDY)
    assert isinstance(runner, Quiet)
    assert runner.num_quiet > 4
    assert runner._pieces is not None
    assert runner._pieces.ready == (16,)


@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.long)])
def test_contexts_of_several_partitions(device: torch.device, heads: int) -> None:
    """With the partitions of the shipped table: in the interpreter 16 vectors, on a GPU up to 4096."""
    context, rank, rotated, size = 9000 if device.type == "cuda" else 70, 512, 64, 128
    generator = torch.Generator().manual_seed(2)
    pages = torch.randn(-(-context // 16), 1, 1, 1, 16, rank + rotated, generator=generator)
    q = torch.randn(2, heads, size + rotated, generator=generator) * 0.01
    keys, values = (torch.randn(heads, size, rank, generator=generator) for _ in range(2))
    tables = np.random.default_rng(2).permutation(len(pages))[None].repeat(2, axis=0)
    slots = torch.zeros(2, dtype=torch.int64)
    batch = AttentionBatch(np.array([1, 1]), np.array([context, context - 17]), tables, slots)

    def run(ops: object, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        there, *rest = (x.to(torch.bfloat16).to(where, dtype) for x in (pages, q, keys, values))
        assert ops in (OPS, reference.OPS)
        assert OPS.attend_latent is not None
        assert reference.OPS.attend_latent is not None
        table = OPS if ops is OPS else reference.OPS
        plan = table.plan_attention(batch, there, heads)
        return table.attend_latent(rest[0], LatentUp(rest[1], rest[2]), there, 0, plan, 1.0)  # type: ignore[misc]

    cpu = torch.device("cpu")
    exact, low = run(reference.OPS, torch.float64, cpu), run(reference.OPS, torch.bfloat16, cpu)
    got = run(OPS, torch.bfloat16, device)
    assert float((got.cpu().double() - exact).abs().max()) <= fair_error(exact, low)


def test_the_family_is_chosen_on_gpus_for_vectors_that_fit() -> None:
    assert resolve_kernels("auto", LATENT, "bfloat16", "cuda") == "triton"
    assert resolve_kernels("auto", LATENT, "float16", "cuda:1") == "triton"
    assert resolve_kernels("triton", LATENT, "float32") == "triton"
    with pytest.raises(
        UsageError, match="on a GPU needs the Triton kernels, not 'torch'; use --kernels auto"
    ) as caught:
        resolve_kernels("torch", LATENT, "bfloat16", "cuda")
    assert caught.value.field == "kernels"


@pytest.mark.parametrize("change", [{"rank": 514}, {"rotated": 130}, {"rank": 21}], ids=str)
@pytest.mark.parametrize(("kernels", "device"), [("auto", "cuda"), ("triton", "cpu")])
def test_larger_vectors_are_refused_with_their_fields(kernels: str, device: str, change: dict[str, int]) -> None:
    assert LATENT.latent is not None
    config: ModelConfig = replace(LATENT, latent=replace(LATENT.latent, **change))
    with pytest.raises(UsageError, match=r"\(kv_lora_rank\) and .* \(qk_rope_head_dim\); use --device cpu"):
        resolve_kernels(kernels, config, "bfloat16", device)


def test_the_memory_of_steps_contains_absorbed_queries_and_results() -> None:
    """Sizes of DeepSeek V2-Lite and V3: 16 and 128 heads."""
    for heads, rows, scratch in ((16, 2048, 2 * 2048 * 16 * 512 * 4), (128, 512, 256 << 20)):
        config = replace(
            LATENT,
            num_heads=heads,
            head_dim=192,
            latent=Latent(rank=512, rotated=64, plain=128, value=128, query_rank=None),
        )
        needed = activation_bytes(config, rows=rows, max_sequences=1)
        assert scratch < needed < scratch + 4 * rows * (4 * 48 + 2 * heads * 192 + 8192)
        tokens = graph_sizes.max_tokens(64, 1 << 20, 1 << 20)
        bound = graph_sizes.memory(config, graph_sizes.sizes(64), value_bytes=2, tokens=tokens, width=64)
        assert bound.scratch_bytes > 64 * heads * 513 * -(-tokens // 1024) * 4 + 64 * 2 * heads * 512 * 2
