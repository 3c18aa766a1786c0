"""A model whose ranks compute shares of each layer: equal to the whole model, over pages that all ranks share."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from harness.kernels.family_checkpoints import FEATURED
from unit.kernels.test_compiled_step import (
    GROUPED,
    LATENT,
    LENGTHS,
    LEVELS,
    OF_HEADS,
    ROUNDING,
    VARIANTS,
    World,
    model_of,
)

from kvferry.core import dtypes
from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.compiled import CompiledTransformer, LogitRoom, RankPlace
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels import compiled
from kvferry.model import tiny
from kvferry.weights.config import Experts, Latent, ModelConfig
from kvferry.weights.shares import Share, check_divides

ROWS = 1024
SECONDS = 20.0
WIDE = replace(tiny.config(qkv_bias=True), num_heads=8, num_kv_heads=2, head_dim=32, vocab_size=267)
GATHERED = replace(WIDE, experts=Experts(6, 2, 48, renormalizes=True, shared_size=24))


class Ranks:
    """The ranks of a model on threads, instead of processes."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        level: str,
        dtype: str = "float32",
        *,
        seconds: float = SECONDS,
        threads: int = 1,
    ) -> None:
        memory = np.zeros(compiled.ranks_bytes(size, config.hidden_size, ROWS) + 64, np.uint8)
        self.memory = memory[-memory.ctypes.data % 64 :]
        self.places = [
            RankPlace(
                Share(rank, size), compiled.make_ranks(self.memory, rank, size, config.hidden_size, ROWS, seconds)
            )
            for rank in range(size)
        ]
        self.models = [
            CompiledTransformer(
                config, tiny.TinyTensors(config), dtype=dtype, form="shipped", level=level, threads=threads, place=place
            )
            for place in self.places
        ]
        self.logits = np.full((ROWS, config.vocab_size), np.nan, np.float32)
        self.threads = ThreadPoolExecutor(size)

    def compute(self, batch: StepBatch, kv: PagedKv) -> LogitRoom:
        """Compute a step on all ranks; return the room of the first one, which picks tokens."""
        rooms = [LogitRoom.of(self.logits, len(batch.sample_rows)) for _ in self.models]
        steps = [
            self.threads.submit(model.compute_into, batch, kv, room)
            for model, room in zip(self.models, rooms, strict=True)
        ]
        for step in steps:
            step.result(SECONDS + 10)
        return rooms[0]


@contextmanager
def ranks_of(config: ModelConfig, size: int, level: str, dtype: str = "float32", threads: int = 1) -> Iterator[Ranks]:
    ranks = Ranks(config, size, level, dtype, threads=threads)
    with ranks.threads:
        yield ranks


def divides(config: ModelConfig, size: int) -> bool:
    try:
        check_divides(config, size)
    except UsageError:
        return False
    return True


LATENTS = [
    replace(LATENT, num_heads=4),
    replace(LATENT, num_heads=6, experts=GROUPED, latent=Latent(64, 16, 32, 48, None), head_dim=48),
]
TIED = replace(FEATURED["window, caps, norms around"], tie_word_embeddings=True)
SHARED = [
    (config, size)
    for config in (*VARIANTS, WIDE, TIED, GATHERED, *LATENTS)
    for size in (2, 3, 4, 5)
    if divides(config, size)
]


def in_pieces(world: World, compute: "Ranks | CompiledTransformer", kv: PagedKv) -> list[npt.NDArray[np.float32]]:
    """Compute all sequences together, prompts in two pieces and the last three tokens one by one; return all logits."""
    starts = [len(t) // 2 for t in world.tokens]
    ends = [max(n, len(t) - 3) for n, t in zip(starts, world.tokens, strict=True)]
    steps = [
        [(s, 0, n) for s, n in enumerate(starts) if n],
        [(s, n, end - n) for s, (n, end) in enumerate(zip(starts, ends, strict=True)) if end > n],
        *([(s, end + i, 1) for s, end in enumerate(ends) if end + i < len(world.tokens[s])] for i in range(3)),
    ]
    return [compute.compute(world.batch(step), kv).values.copy() for step in steps]


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in ROUNDING])
@pytest.mark.parametrize(("config", "size"), SHARED, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_ranks_compute_what_the_whole_model_computes(config: ModelConfig, size: int, level: str) -> None:
    world = World(config, LENGTHS, "float32")
    pages, shared = world.pages(0), world.pages(0)
    expected = in_pieces(world, model_of(config, level), pages)
    with ranks_of(config, size, level) as ranks:
        got = in_pieces(world, ranks, shared)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-4)
    ours, theirs = (world.memory[kv.address].view(np.float32) for kv in (shared, pages))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-4)


def test_every_family_of_layers_is_divided_somewhere() -> None:
    configs = [config for config, _ in SHARED]
    assert any(c.latent for c in configs)
    assert any(c.experts for c in configs)
    assert any(c.windows for c in configs)
    assert any(c.attention_sinks for c in configs)
    assert any(c.tie_word_embeddings for c in configs)
    assert any(c.num_kv_heads < size for c, size in SHARED)


@pytest.mark.parametrize("dtype", ["bfloat16", *dtypes.CODED])
@pytest.mark.parametrize("level", LEVELS[-1:])
def test_ranks_write_the_types_of_pages(level: str, dtype: str) -> None:
    """The first layer's keys and values depend on no sum over ranks, so their bytes are the whole model's."""
    config = next(c for c, size in SHARED if size == 2 and c in OF_HEADS)
    world = World(config, LENGTHS, dtype)
    pages, shared = world.pages(0), world.pages(0)
    in_pieces(world, model_of(config, level, dtype), pages)
    with ranks_of(config, 2, level, dtype) as ranks:
        in_pieces(world, ranks, shared)
    first = world.shape.block_bytes // config.num_layers
    ours, theirs = (world.memory[kv.address].reshape(world.num_blocks, -1)[:, :first] for kv in (shared, pages))
    assert np.array_equal(ours, theirs)


def test_a_step_has_the_same_bits_with_any_number_of_threads() -> None:
    world, results = World(WIDE, LENGTHS, "bfloat16"), []
    for threads in (1, 3, 1):
        with ranks_of(WIDE, 2, LEVELS[-1], "bfloat16", threads) as ranks:
            results.append(in_pieces(world, ranks, world.pages(0)))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_leader_picks_from_the_whole_vocabulary() -> None:
    world = World(WIDE, LENGTHS, "float32")
    with ranks_of(WIDE, 4, LEVELS[0]) as ranks:
        room = ranks.compute(world.batch([(3, 0, 17), (2, 0, 16)]), world.pages())
    assert room.greedy.tolist() == room.values.argmax(axis=-1).tolist()
    assert {token // 80 for token in room.greedy.tolist()} != {0}, "all tokens are in the leader's part"
    assert room.finite.tolist() == [1] * 33


def test_hidden_states_are_those_of_the_whole_model() -> None:
    world = World(LATENT, LENGTHS, "float32")
    config = replace(LATENT, num_heads=4)
    batch = replace(world.batch([(4, 0, 40)]), hidden_rows=np.array([39, 3]), sample_rows=np.array([39]))
    expected = model_of(config, LEVELS[0]).compute(batch, world.pages(0)).hidden
    with ranks_of(config, 2, LEVELS[0]) as ranks:
        kv, room = world.pages(0), LogitRoom.of(ranks.logits, 1)
        steps = [ranks.threads.submit(model.compute_into, batch, kv, room) for model in ranks.models]
        got = [step.result(SECONDS).hidden for step in steps]
    assert expected is not None
    for hidden in got:
        assert hidden is not None
        np.testing.assert_allclose(hidden, expected, rtol=0, atol=3e-4)


def test_a_rank_that_does_not_come_fails_the_step_and_all_later_ones() -> None:
    world = World(WIDE, LENGTHS, "float32")
    ranks = Ranks(WIDE, 2, LEVELS[0], seconds=0.2)
    batch, kv = world.batch([(1, 0, 5)]), world.pages(0)
    room = LogitRoom.of(ranks.logits, 5)
    with ranks.threads:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 1"):
                ranks.models[0].compute_into(batch, kv, room)
    assert ranks.places[1].ranks.missing == 1


def test_a_rank_that_has_ended_ends_the_wait_at_once() -> None:
    world = World(WIDE, LENGTHS, "float32")
    ranks = Ranks(WIDE, 3, LEVELS[0], seconds=1e6)
    batch, kv = world.batch([(1, 0, 5)]), world.pages(0)
    room = LogitRoom.of(ranks.logits, 5)
    with ranks.threads:
        step = ranks.threads.submit(ranks.models[0].compute_into, batch, kv, room)
        threading.Timer(0.05, ranks.places[0].ranks.fail, (2,)).start()
        with pytest.raises(RuntimeError, match="rank 2"):
            step.result(SECONDS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_heads": 9}, "num_attention_heads 9 is not a multiple"),
        ({"num_kv_heads": 3, "num_heads": 6}, "num_key_value_heads 3 is neither"),
        ({"intermediate_size": 33}, "intermediate_size 33"),
        ({"vocab_size": 10}, "a vocabulary of 10 tokens"),
        ({"qk_norm": True, "qk_norm_spans_heads": True}, "normalized over all heads"),
        ({"experts": Experts(4, 2, 33, renormalizes=True)}, "moe_intermediate_size 33"),
        ({"experts": Experts(4, 2, 32, renormalizes=True, shared_size=9)}, "shared_expert_intermediate_size 9"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(change: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text) as refused:
        check_divides(replace(WIDE, **change), 2)  # type: ignore[arg-type]
    assert refused.value.field == "tensor_parallel"
