"""Steps over pages of groups of layers: the bits of the whole pages, for any content of pages behind a window."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from harness.kernels.family_checkpoints import FEATURED
from unit.kernels.test_compiled_step import BLOCK, DTYPES, LEVELS, Piece, World, model_of, random_steps

from kvferry.engine.execute.models.compiled import CompiledTransformer
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kv.pages.layer_groups import LayerGroups, first_block_read
from kvferry.kv.pages.layout import KvLayout
from kvferry.model import tiny
from kvferry.weights.config import ModelConfig

NEVER_READ = -1


def windowed(windows: tuple[int | None, ...], like: str = "") -> ModelConfig:
    config = FEATURED[like] if like else tiny.config()
    return replace(config, num_layers=len(windows), windows=windows)


CONFIGS = [
    windowed((20, None)),
    windowed((20, None), "sinks, biases, clamped gates"),
    windowed((1, 300, None, 300), "window, caps, norms around"),
    windowed((40, 40, None, 40, 40, None)),
    windowed((30, 30, 30, None)),
    windowed((270, 270)),
]
"""Models with two groups, with sinks, with three windows, with one window in two and in three groups, and with one
window only."""


class GroupedWorld(World):
    """Sequences with pages in every group of layers."""

    def __init__(self, config: ModelConfig, lengths: list[int], dtype: str, seed: int = 0) -> None:
        super().__init__(config, lengths, dtype, seed)
        self.groups = LayerGroups.of([config.window_of(layer) for layer in range(config.num_layers)])
        self.shape = KvLayout.of(config, block_tokens=BLOCK, dtype=dtype, releases_windows=True)
        count = len(self.groups.windows)
        order = np.random.default_rng(seed).permutation(self.num_blocks * count)
        self.num_blocks *= count
        starts = np.cumsum([0, *(len(table) for _ in range(count) for table in self.tables)])
        parts = [order[a:b] for a, b in itertools.pairwise(starts)]
        size = len(self.tables)
        self.of_groups = [parts[group * size : (group + 1) * size] for group in range(count)]

    def batch(self, pieces: list[Piece]) -> StepBatch:
        """One step; entries behind a window are `NEVER_READ`, or 0 in further groups."""
        made, slots, tables = [], [], []
        for window, of_group in zip(self.groups.windows, self.of_groups, strict=True):
            self.tables = of_group
            made.append(super().batch(pieces))
            slots.append(made[-1].slots)
            tables.append(made[-1].block_tables)
            for row, (_, first, _) in enumerate(pieces):
                tables[-1][row, : first_block_read(first, window, BLOCK)] = NEVER_READ
        if len(made) == 1:
            return made[0]
        return replace(made[0], further_slots=np.stack(slots[1:]), further_tables=np.stack(tables[1:]))

    def spoil_passed(self, kv: PagedKv, sequence: int, computed: int) -> None:
        """Overwrite the pages of a sequence that no row from `computed` on reads with NaN."""
        memory = self.memory[kv.address].reshape(self.num_blocks, -1)
        for window, of_group in zip(self.groups.windows, self.of_groups, strict=True):
            memory[of_group[sequence][: first_block_read(computed, window, BLOCK)]] = 0xFF


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_released_pages_change_no_bit(level: str, dtype: str) -> None:
    for number, config in enumerate(CONFIGS * 2):
        rng = np.random.default_rng(number)
        lengths = [int(n) for n in rng.choice([4, 33, 257, 290, 530, 600], rng.integers(1, 5))]
        model = model_of(config, level, dtype, threads=int(rng.integers(1, 4)))
        expected = World(config, lengths, dtype, seed=number).alone(model)
        world = GroupedWorld(config, lengths, dtype, seed=number)
        pages = world.pages()
        for pieces in random_steps(lengths, rng):
            got = model.compute(world.batch(pieces), pages).values.copy()
            at = 0
            for s, first, n in pieces:
                assert np.array_equal(got[at : at + n], expected[s][first : first + n]), (number, s, first, n)
                at += n
                world.spoil_passed(pages, s, first + n)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"further_slots": np.full((1, 40), 10**6)}, "a slot is beyond the pages"),
        ({"further_slots": np.zeros((1, 39), np.int64)}, "further layer groups have the wrong size"),
        ({"further_tables": np.zeros((1, 1, 2), np.int64)}, "further layer groups have the wrong size"),
        ({"further_tables": np.array([[[0, NEVER_READ, 0]]])}, "a page does not exist"),
        ({"further_tables": np.array([[[0, 10**6, 0]]])}, "a page does not exist"),
    ],
)
def test_wrong_slots_and_pages_of_a_group_are_refused(changes: dict[str, np.ndarray], says: str) -> None:
    world = GroupedWorld(CONFIGS[0], [41], "float32")
    model, pages = model_of(CONFIGS[0], "portable"), world.pages(0)
    with pytest.raises(ValueError, match=says):
        model.compute(replace(world.batch([(0, 1, 40)]), **changes), pages)


@pytest.mark.parametrize(
    ("places", "page_layers", "says"),
    [
        ([[0, 0]], 1, "places must have an entry for each layer"),
        ([[0, 0], [1, 1]], 1, "the position of a layer is beyond the page"),
        ([[0, 0], [2, 0]], 1, "the group of a layer does not exist"),
        ([[1, 0], [1, 1]], 2, "a layer group has no layers"),
    ],
)
def test_wrong_places_of_layers_are_refused(places: list[list[int]], page_layers: int, says: str) -> None:
    world = GroupedWorld(CONFIGS[0], [41], "float32")
    pages = world.pages(0)
    pages.places, pages.page_layers = np.array(places, np.int64), page_layers
    with pytest.raises(ValueError, match=says):
        model_of(CONFIGS[0], "portable").compute(world.batch([(0, 1, 40)]), pages)


def test_a_page_behind_the_window_of_all_layers_need_not_exist() -> None:
    config = windowed((20, 20))
    world = GroupedWorld(config, [300], "float32")
    model: Model = model_of(config, "portable")
    assert isinstance(model, CompiledTransformer)
    pages = world.pages(0)
    model.compute(world.batch([(0, 0, 299)]), pages)
    batch = world.batch([(0, 299, 1)])
    assert (batch.block_tables[0, :17] == NEVER_READ).all()
    model.compute(batch, pages)
    whole = windowed((20, None))
    with pytest.raises(ValueError, match="a page does not exist"):
        model_of(whole, "portable").compute(batch, World(whole, [300], "float32").pages(0))
