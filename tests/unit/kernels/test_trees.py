"""Rows of a tree of draft tokens: each row has the result of a sequence that consists of its path, on all kernels, and
so has the next step after the accepted path was moved.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.kernels.family_checkpoints import FEATURED
from harness.kernels.kernel_cases import LAYERS, fair_error, make_case

from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.run.tree_moves import tree_moves
from kvferry.engine.execute.tensors.batch import StepBatch, build_batch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan
from kvferry.kernels import compiled
from kvferry.kernels.batch import AttentionRules, Trees
from kvferry.kernels.gpu.backend import OPS as TRITON
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import forward as reference
from kvferry.kernels.torch_family.backend import OPS as TORCH
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.config import Latent, ModelConfig

LATENT = replace(tiny.config(), num_heads=5, num_kv_heads=1, head_dim=96, latent=Latent(96, 32, 64, 16, 48))
CONFIGS = {"plain": replace(tiny.config(), num_heads=6, num_kv_heads=2, head_dim=48), "latent": LATENT, **FEATURED}
BLOCK = 16
SHAPES = [(37, 7), (16, 4), (249, 16), (509, 3), (620, 24)]
"""Tokens before the root and draft tokens. Partitions of attention have 256 tokens; trees of few rows are split."""


def random_parents(count: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.integers(max(0, row - 5), row + 1)) for row in range(count))


def scheduled(
    name: int, tokens: list[int], first: int, pages: list[int], parents: tuple[int, ...] = (), sampled: int = 1
) -> ScheduledSequence:
    return ScheduledSequence(
        RequestId(str(name)), tokens, len(tokens), first, len(tokens) - first, [BlockId(p) for p in pages], sampled,
        SamplingParams(temperature=0.0), 0, parents=parents,
    )  # fmt: skip


class World:
    """Sequences with a tree each, and one without; pages of further sequences hold the paths."""

    def __init__(self, model: Model, dtype: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.model, config = model, model.config
        self.layout = KvLayout.of(config, block_tokens=BLOCK, dtype=dtype)
        self.trees = []
        order = iter(rng.permutation(400).tolist())
        for before, count in SHAPES:
            tokens = rng.integers(0, config.vocab_size, before + 1 + count).tolist()
            pages = [next(order) for _ in range(-(-len(tokens) // BLOCK))]
            self.trees.append((tokens, before, random_parents(count, rng), pages))
        self.spare = [next(order) for _ in range(64)]
        self.kv = PagedKv.over(self.layout, np.full(400 * self.layout.block_bytes, 0xFF, np.uint8))

    def run(self, *items: ScheduledSequence) -> tuple[np.ndarray, StepBatch]:
        batch = build_batch(StepPlan(items), block_tokens=BLOCK)
        return self.model.compute(batch, self.kv).values.copy(), batch

    def expected(self, tokens: list[int], computed: int) -> np.ndarray:
        """Return the logits of the last token of a sequence without a tree; the spare pages have its first tokens."""
        return self.run(scheduled(9, tokens, computed, self.spare))[0][0]


def path_of(parents: tuple[int, ...], row: int) -> list[int]:
    found: list[int] = []
    while row:
        found.insert(0, row)
        row = parents[row - 1]
    return found


def check(world: World, *, is_exact: bool, rows_checked: int = 99) -> None:
    plain = world.trees[0][0]
    items = []
    for index, (tokens, before, parents, pages) in enumerate(world.trees):
        world.run(scheduled(index, tokens[:before], 0, pages))
        items.append(scheduled(index, tokens, before, pages, parents, 1 + len(parents)))
    other = world.spare[50:]
    world.run(scheduled(7, plain[:9], 0, other))
    logits, batch = world.run(items[0], scheduled(7, plain[:11], 9, other), *items[1:])
    assert batch.positions.max() < 650
    drawn: list[SampledToken | None] = []
    first, paths = 0, []
    for index, (tokens, before, parents, _) in enumerate(world.trees):
        world.run(scheduled(9, tokens[:before], 0, world.spare))
        for row in [*range(1 + len(parents))][-rows_checked:]:
            path = [*tokens[: before + 1], *(tokens[before + i] for i in path_of(parents, row))]
            assert_alike(logits[first + row], world.expected(path, before), is_exact=is_exact)
        path = path_of(parents, len(parents))  # the path of the last row is accepted
        paths.append(path)
        of_tree: list[SampledToken | None] = [None] * (1 + len(parents))
        for row, child in zip([0, *path], [*path, None], strict=True):
            of_tree[row] = SampledToken(-1 if child is None else tokens[before + child])
        drawn += of_tree
        first += 1 + len(parents)
        if index == 0:  # the sequence without a tree samples its last row
            drawn.append(SampledToken(1))
            first += 1
    world.kv.move_tokens(tree_moves([items[0], scheduled(7, plain[:11], 9, other), *items[1:]], drawn, batch))
    for path, (tokens, before, _, pages) in zip(paths, world.trees, strict=True):
        accepted = [*tokens[: before + 1], *(tokens[before + i] for i in path), 3]
        world.run(scheduled(9, tokens[:before], 0, world.spare))
        got, _ = world.run(scheduled(8, accepted, len(accepted) - 1, pages))
        assert_alike(got[0], world.expected(accepted, before), is_exact=is_exact)


def assert_alike(got: np.ndarray, expected: np.ndarray, *, is_exact: bool) -> None:
    if is_exact:
        assert np.array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4)


def of_kernels(config: ModelConfig, dtype: str, kernels: str) -> Model:
    return build_model(config, tiny.TinyTensors(config), dtype=dtype, kernels=kernels, threads=3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*(("plain", dtype) for dtype in ("float32", "int8", "fp8")), *((name, "bfloat16") for name in CONFIGS)],
)
@pytest.mark.parametrize("level", compiled.levels())
def test_compiled_rows_have_the_bits_of_their_paths(name: str, level: str, dtype: str) -> None:
    check(World(of_kernels(CONFIGS[name], dtype, f"compiled-{level}"), dtype), is_exact=True, rows_checked=3)


@pytest.mark.parametrize("level", compiled.levels())
def test_a_window_that_begins_in_an_earlier_partition_moves_with_the_depth_of_a_row(level: str) -> None:
    """Rows of a tree hide different tokens of a partition that ends before the tree."""
    config = replace(tiny.config(), windows=(300, 270))
    check(World(of_kernels(config, "float32", f"compiled-{level}"), "float32"), is_exact=True, rows_checked=40)


@pytest.mark.parametrize(
    ("name", "kernels"), [("plain", "reference"), ("latent", "reference"), *((name, "torch") for name in CONFIGS)]
)
def test_torch_rows_equal_their_paths(name: str, kernels: str) -> None:
    check(World(of_kernels(CONFIGS[name], "float32", kernels), "float32"), is_exact=False, rows_checked=2)


def random_trees(seed: int, shapes: list[tuple[int, int]]) -> Trees:
    """Trees of sequences with (rows, earlier tokens), some of which begin before the rows, as those of a head do."""
    rng = np.random.default_rng(seed)
    sizes, paths = [], []
    for queries, earlier in shapes:
        size = 0 if rng.random() < 0.3 else queries + int(rng.integers(0, min(earlier, 10)))
        bits = [1]
        for parent in random_parents(size - 1, rng):
            bits.append(bits[parent] | 1 << len(bits))
        sizes.append(size)
        paths += bits[-queries:] if size else [0] * queries
    return Trees(np.array(sizes), np.array(paths))


def check_attention(ops: Ops, device: torch.device | str, seed: int, rules: AttentionRules) -> None:
    shapes = [(1 + seed * 7 % 5, 40), (9, 23), (1, 12), (2 + seed, 70), (30, 33)]
    case = make_case(shapes, kv_heads=2, group=3, head_dim=16, block_tokens=4, seed=seed)
    case = replace(case, batch=replace(case.batch, trees=random_trees(seed, shapes)))

    def run(table: object, dtype: torch.dtype) -> torch.Tensor:
        there = device if table is None else "cpu"
        pages, q, batch = case.pages.to(there, dtype), case.q.to(there, dtype), case.to(there)
        if table is None:
            return ops.attend(q, pages, LAYERS - 1, ops.plan_attention(batch, pages, q.shape[1]), rules).cpu()
        return reference.attend(q, pages, LAYERS - 1, batch, rules)

    exact, low, got = run(reference, torch.float64), run(reference, torch.float32), run(None, torch.float32)
    assert float((got.double() - exact).abs().max()) <= fair_error(exact, low)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("seed", range(4))
def test_torch_attention_equals_the_reference_for_random_trees(seed: int, window: int | None) -> None:
    check_attention(TORCH, "cpu", seed, AttentionRules(0.4, window))


@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_triton_attention_equals_the_reference_for_random_trees(
    device: torch.device, seed: int, soft_cap: float | None
) -> None:
    check_attention(TRITON, device, seed, AttentionRules(0.4, None, soft_cap))


def test_triton_refuses_trees_that_it_does_not_support_by_name(device: torch.device) -> None:
    with pytest.raises(BadKernelInput, match="do not support trees of draft tokens with a window"):
        check_attention(TRITON, device, 0, AttentionRules(0.4, 9))
    case = make_case([(3, 4)], kv_heads=1, group=2, head_dim=16, block_tokens=4, seed=1)
    latent = case.pages[:, :, :1].contiguous().to(device)
    batch = replace(case.to(device), trees=Trees(np.array([3]), np.array([1, 3, 5])))
    with pytest.raises(BadKernelInput, match="do not support trees of draft tokens in latent vectors"):
        TRITON.plan_attention(batch, latent, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trees": np.array([3])}, "the size of a tree is not valid"),
        ({"trees": np.array([65])}, "the size of a tree is not valid"),
        ({"trees": np.array([5, 5])}, "trees have the wrong size"),
        ({"paths": np.array([1, 3, 5, 9])}, "trees have the wrong size"),
        ({"paths": np.array([1, 3, 5, 9, 2])}, "the path of a row is not valid"),
        ({"paths": np.array([1, 3, 5, 9, 49])}, "the path of a row is not valid"),
        ({"paths": np.array([1, 3, 5, 9, 19])}, "a position differs from the row's path"),
    ],
)
def test_bad_trees_are_refused_before_any_memory_is_read(change: dict[str, np.ndarray], message: str) -> None:
    model = of_kernels(CONFIGS["plain"], "float32", "compiled")
    layout = KvLayout.of(model.config, block_tokens=BLOCK, dtype="float32")
    batch = build_batch(StepPlan((scheduled(1, [1, 2, 3, 4, 5, 6], 1, [0], (0, 0, 0, 0), 5),)), block_tokens=BLOCK)
    assert batch.paths.tolist() == [1, 3, 5, 9, 17]
    kv = PagedKv.allocate(layout, 1)
    model.compute(batch, kv)
    with pytest.raises(ValueError, match=message):
        model.compute(replace(batch, **change), kv)
