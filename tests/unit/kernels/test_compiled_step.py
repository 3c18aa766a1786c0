"""A whole step in one call: equal to the reference, and the same bits in any batch, chunking and placement."""

import itertools
import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from harness.kernels.family_checkpoints import FEATURED

from kvferry.core import dtypes
from kvferry.core.errors import ModelFileError, UsageError
from kvferry.core.settings.processes import ENGINE
from kvferry.engine.execute.models.build import WEIGHTS, build_model
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.tensors.batch import StepBatch
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels import compiled
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import plan
from kvferry.model import tiny
from kvferry.weights.config import Experts, Latent, ModelConfig, Scoring
from kvferry.weights.tensors import HEAD, Stored

LEVELS = compiled.levels()
DTYPES = ["float32", "bfloat16", "int8", "fp8"]
ROUNDING = LEVELS[2:]
"""Levels that round inputs of products to bfloat16."""
CLAMPED = "sinks, biases, clamped gates"
LATENT = replace(tiny.config(), num_heads=5, num_kv_heads=1, head_dim=96, latent=Latent(96, 32, 64, 16, 48))
GROUPED = Experts(
    8, 3, 40, renormalizes=True, shared_size=24, has_shared_gate=False, scoring=Scoring.SIGMOID, groups=4,
    active_groups=2, weight_scale=1.7,
)  # fmt: skip
VARIANTS = [
    tiny.config(),
    tiny.config(qk_norm=True),
    tiny.config(qkv_bias=True),
    replace(tiny.config(), num_heads=6, num_kv_heads=1, head_dim=48, hidden_size=80, intermediate_size=49),
    replace(tiny.config(), num_heads=9, num_kv_heads=3, head_dim=32, hidden_size=33, tie_word_embeddings=True),
    *FEATURED.values(),
    replace(tiny.config(), experts=Experts(6, 2, 48, renormalizes=True)),
    replace(FEATURED[CLAMPED], experts=Experts(7, 2, 40, renormalizes=True, has_biases=True)),
    replace(tiny.config(), experts=Experts(9, 3, 33, renormalizes=False, shared_size=20, dense_layers=(0,))),
    replace(LATENT, latent=Latent(64, 16, 32, 48, None), head_dim=48),
    replace(LATENT, experts=GROUPED),
    replace(LATENT, experts=replace(GROUPED, scoring=Scoring.SOFTMAX, renormalizes=False, dense_layers=(0,))),
]
OF_HEADS = [config for config in VARIANTS if config.latent is None]
"""Configurations with keys and values, which can be codes."""
BLOCK = 16
Piece = tuple[int, int, int]
"""Sequence, first position, rows."""


class Coded(tiny.TinyTensors):
    """Weights in 4- and 8-bit codes where the inputs of a matrix fill whole blocks."""

    def stored(self, name: str) -> Stored:
        values = self.read(name)
        if values.shape[-1] % 32:
            return super().stored(name)
        kind = GGMLQuantizationType.Q8_0 if name == HEAD else GGMLQuantizationType.Q4_1
        return Stored.plain(int(kind), quantize(values, kind).reshape(-1), len(values))


CODED = [
    replace(tiny.config(), hidden_size=64, intermediate_size=112),
    replace(tiny.config(qk_norm=True), hidden_size=96, intermediate_size=224),
]


def variants_of(dtype: str) -> list[ModelConfig]:
    return OF_HEADS if dtype in dtypes.CODED else VARIANTS


def model_of(config: ModelConfig, level: str, dtype: str = "float32", threads: int = 3) -> Model:
    tensors = tiny.TinyTensors(config)
    return build_model(config, tensors, dtype=dtype, kernels=f"compiled-{level}", threads=threads)


class World:
    """Sequences of random tokens, each with its own scattered pages."""

    def __init__(self, config: ModelConfig, lengths: list[int], dtype: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = [rng.integers(0, config.vocab_size, n) for n in lengths]
        blocks = [-(-n // BLOCK) for n in lengths]
        order = rng.permutation(sum(blocks) + 5)
        starts = np.concatenate(([0], np.cumsum(blocks)))
        self.tables = [order[a:b] for a, b in itertools.pairwise(starts)]
        self.shape = KvLayout.of(config, block_tokens=BLOCK, dtype=dtype)
        self.num_blocks = len(order)
        self.memory: dict[int, npt.NDArray[np.uint8]] = {}
        """Arrays over the memory of pages, by address."""

    def pages(self, byte: int = 0xFF) -> PagedKv:
        """Return pages filled with a byte; 0xFF is NaN in float types and in the scales of int8."""
        memory = np.full(self.num_blocks * self.shape.block_bytes, byte, np.uint8)
        kv = PagedKv.over(self.shape, memory)
        self.memory[kv.address] = memory
        return kv

    def begin_alike(self, first: int, others: Iterable[int], blocks: int) -> None:
        """Give `others` the first tokens and pages of `first`, as a prefix cache does."""
        for other in others:
            self.tokens[other][: blocks * BLOCK] = self.tokens[first][: blocks * BLOCK]
            self.tables[other][:blocks] = self.tables[first][:blocks]

    def copy(self, kv: PagedKv) -> PagedKv:
        """Return a copy of the pages in other memory."""
        copied = self.pages()
        self.memory[copied.address][:] = self.memory[kv.address]
        return copied

    def batch(self, pieces: list[Piece]) -> StepBatch:
        """Return the batch of one step over these pieces, with the logits of all rows."""
        queries = np.array([n for _, _, n in pieces])
        contexts = np.array([first + n for _, first, n in pieces])
        width = max(-(-int(c) // BLOCK) for c in contexts)
        table = np.zeros((len(pieces), width), np.int64)
        positions, slots, tokens = [], [], []
        for row, (s, first, n) in enumerate(pieces):
            mine = self.tables[s][: -(-(first + n) // BLOCK)]
            table[row, : len(mine)] = mine
            at = np.arange(first, first + n)
            positions.append(at)
            slots.append(self.tables[s][at // BLOCK] * BLOCK + at % BLOCK)
            tokens.append(self.tokens[s][at])
        ids, at, to = (np.concatenate(part).astype(np.int64) for part in (tokens, positions, slots))
        return StepBatch(ids, at, to, queries, contexts, table, np.arange(len(ids)))

    def alone(self, model: Model) -> list[npt.NDArray[np.float32]]:
        """Return the logits of every position, with each sequence computed alone in one piece."""
        pages = self.pages()
        return [model.compute(self.batch([(s, 0, len(t))]), pages).values.copy() for s, t in enumerate(self.tokens)]


LENGTHS = [1, 5, 16, 17, 40, 300]


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in ROUNDING])
@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_float_levels_equal_the_definition_in_float64(config: ModelConfig, level: str) -> None:
    exact = build_model(config, tiny.TinyTensors(config), dtype="float64", kernels="reference")
    expected = World(config, LENGTHS, "float64").alone(exact)
    got = World(config, LENGTHS, "float32").alone(model_of(config, level))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("config", VARIANTS, ids=range(len(VARIANTS)))
def test_bfloat16_errs_no_more_than_the_definition_in_bfloat16(config: ModelConfig, level: str) -> None:
    """Compiled kernels have wider weights and sums than the reference, so twice the reference's error is a generous
    bound.
    """
    tensors = tiny.TinyTensors(config)
    exact = build_model(config, tensors, dtype="float64", kernels="reference")
    rough = build_model(config, tensors, dtype="bfloat16", kernels="reference")
    expected = np.concatenate(World(config, LENGTHS, "float64").alone(exact))
    fair = np.abs(np.concatenate(World(config, LENGTHS, "bfloat16").alone(rough)) - expected).mean()
    got = np.concatenate(World(config, LENGTHS, "bfloat16").alone(model_of(config, level, "bfloat16")))
    assert np.abs(got - expected).mean() <= 2 * fair


def layout_of(world: World) -> KvLayout:
    shape = world.shape
    return KvLayout("tiny", shape.dtype, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_tokens)


def converted(world: World, pages: PagedKv, to: World) -> PagedKv:
    """Return the pages of one world converted to another's type, in the same places."""
    made, blocks = to.pages(), range(world.num_blocks)
    memory = to.memory[made.address].reshape(world.num_blocks, -1)
    tokens = world.num_blocks * BLOCK
    given = memoryview(world.memory[pages.address])
    plan(layout_of(world), layout_of(to)).convert(given, blocks, memory, list(blocks), 0, tokens)
    return made


@pytest.mark.parametrize("dtype", dtypes.CODED)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("config", OF_HEADS, ids=range(len(OF_HEADS)))
def test_codes_equal_those_of_a_conversion_and_have_the_same_effect(
    config: ModelConfig, level: str, dtype: str
) -> None:
    wide, coded = (World(config, [300], one) for one in ("float32", dtype))
    exact, rough = (model_of(config, level, one) for one in ("float32", dtype))
    batches = [wide.batch([(0, 0, 299)]), wide.batch([(0, 299, 1)])]
    pages, codes = wide.pages(0), coded.pages(0)
    exact.compute(batches[0], pages)
    rough.compute(batches[0], codes)
    # Keys and values of the first layer are computed without codes, so their bytes are equal.
    first = coded.shape.block_bytes // config.num_layers
    both = [coded.memory[kv.address] for kv in (codes, converted(wide, pages, coded))]
    ours, theirs = (memory.reshape(coded.num_blocks, -1)[:, :first] for memory in both)
    assert np.array_equal(ours, theirs)
    # The next token attends to quantized KV or to the dequantized values; only its own key and value differ.
    expected = exact.compute(batches[1], converted(coded, codes, wide)).values.copy()
    unrounded = exact.compute(batches[1], pages).values.copy()
    error = np.abs(rough.compute(batches[1], codes).values - expected).mean()
    # AMX also rounds queries and weights (shares of 0.17 to 0.57 were seen), and in a short window the token's own key
    # and value count more.
    share = 0.75 if level in ROUNDING else 0.5 if config.window_of(0) else 0.2
    assert error < share * np.abs(unrounded - expected).mean()


class Attentive(tiny.TinyTensors):
    """Queries equal the keys of their token, and the output of attention dominates everything else."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        if name.endswith("q_proj.weight"):
            keys = super().read(name.replace("q_proj", "k_proj"))
            config = self._model
            heads = keys.reshape(config.num_kv_heads, config.head_dim, -1)
            return heads.repeat(config.num_heads // config.num_kv_heads, axis=0).reshape(-1, keys.shape[-1])
        values = super().read(name.replace("q_norm", "k_norm"))
        return values * np.float32(1e7) if name.endswith("o_proj.weight") else values


@pytest.mark.parametrize("dtype", dtypes.CODED)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_with_nearly_all_attention_leaves_the_others_precise(level: str, dtype: str) -> None:
    """The first token of a text often gets nearly all attention; the small remainder comes from the other tokens."""
    config = replace(tiny.config(qk_norm=True), num_layers=1)
    both = ("float32", dtype)
    exact, rough = (build_model(config, Attentive(config), dtype=t, kernels=f"compiled-{level}") for t in both)
    wide, coded = (World(config, [300], t) for t in both)
    pages = wide.pages(0)
    exact.compute(wide.batch([(0, 0, 300)]), pages)
    values = wide.memory[pages.address].view(np.float32).reshape(wide.num_blocks, *wide.shape.dims)
    table = wide.tables[0]
    values[table[0], :, 0, :, 0] = 3 * values[table[18], :, 0, :, 11]  # three times the key (and query) of position 299
    values[table[0], :, 1, :, 0] = 0.0
    codes, step = converted(wide, pages, coded), wide.batch([(0, 299, 1)])
    expected = exact.compute(step, converted(coded, codes, wide)).values.copy()
    error = np.abs(rough.compute(step, codes).values - expected).mean()
    assert error < 0.02 * np.abs(expected).mean()


@pytest.mark.parametrize("level", LEVELS)
def test_the_picked_token_is_the_first_of_the_highest(level: str) -> None:
    world = World(VARIANTS[0], LENGTHS, "float32")
    logits = model_of(VARIANTS[0], level).compute(world.batch([(3, 0, 17), (2, 0, 16)]), world.pages())
    assert logits.greedy == logits.values.argmax(axis=-1).tolist()
    assert logits.finite == [True] * 33


def random_steps(lengths: list[int], rng: np.random.Generator) -> list[list[Piece]]:
    """Return steps in which random sequences get some of their rows, until all rows are computed."""
    done = [0] * len(lengths)
    steps = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        most = int(rng.choice([1, 3, 20, 200, 1000]))
        chosen = [s for s, n in enumerate(lengths) if done[s] < n and rng.random() < 0.8]
        pieces = []
        for s in rng.permutation(chosen):
            n = min(lengths[s] - done[s], int(rng.integers(1, most + 1)))
            pieces.append((int(s), done[s], n))
            done[s] += n
        if pieces:
            steps.append(pieces)
    return steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_logits_are_the_same_bits_in_any_batch_and_chunking(level: str, dtype: str) -> None:
    """Each instruction level and type runs 90 random chunkings; all together are more than 500."""
    for number in range(90):
        rng = np.random.default_rng(number)
        config = variants_of(dtype)[number % len(variants_of(dtype))]
        lengths = [int(n) for n in rng.choice([1, 4, 31, 33, 257, 290, 530], rng.integers(1, 5))]
        model = model_of(config, level, dtype, threads=int(rng.integers(1, 4)))
        world = World(config, lengths, dtype, seed=number)
        expected, pages = world.alone(model), world.pages()
        for pieces in random_steps(lengths, rng):
            if rng.random() < 0.2:  # the pages are moved to another engine, as from prefill to decode
                pages, model = world.copy(pages), model_of(config, level, dtype, threads=2)
            got = model.compute(world.batch(pieces), pages).values.copy()
            at = 0
            for s, first, n in pieces:
                assert np.array_equal(got[at : at + n], expected[s][first : first + n]), (number, s, first, n)
                at += n


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        pytest.param(level, dtype, marks=[pytest.mark.long] if level == "portable" and dtype != "bfloat16" else [])
        for level in LEVELS
        for dtype in DTYPES
    ],
)
def test_sequences_with_a_common_prefix_get_the_bits_of_separate_ones(level: str, dtype: str) -> None:
    """Decoding rows over the same pages are computed together. 67 rows share two partitions of 256 tokens, three more
    share the first one, and two share none; the batch also has a long prompt, and one too short to be cut.
    """
    configs = OF_HEADS if level == "portable" else variants_of(dtype)  # the portable level is slow
    for number, config in enumerate(configs):
        lengths = [*(530 + n % 40 for n in range(70)), 600, 600, 300, 20]
        model, world = model_of(config, level, dtype), World(config, lengths, dtype, seed=number)
        world.begin_alike(0, range(1, 67), 33)
        world.begin_alike(0, range(67, 70), 20)
        world.begin_alike(70, [71], 15)
        expected, pages = world.alone(model), world.pages()
        prompt = 72
        for s, n in enumerate(lengths):
            if s != prompt:
                model.compute(world.batch([(s, 0, n - 1)]), pages)
        last = [(s, n - 1, 1) for s, n in enumerate(lengths) if s != prompt]
        got = model.compute(world.batch([*last[:40], (prompt, 0, 300), *last[40:]]), pages).values
        rows = [*got[:40], *got[340:]]
        assert np.array_equal(got[40:340], expected[prompt])
        for (s, at, _), row in zip(last, rows, strict=True):
            assert np.array_equal(row, expected[s][at]), (number, s)


@pytest.mark.parametrize("level", LEVELS)
def test_with_rounded_inputs_logits_are_the_same_bits_too(level: str) -> None:
    for number in range(30):
        rng = np.random.default_rng(number)
        config = CODED[number % len(CODED)]
        lengths = [int(n) for n in rng.choice([1, 4, 31, 33, 257, 290], rng.integers(1, 5))]
        model = build_model(
            config,
            Coded(config),
            dtype="bfloat16",
            numerics="fast",
            kernels=f"compiled-{level}",
            threads=int(rng.integers(1, 4)),
        )
        world = World(config, lengths, "bfloat16", seed=number)
        expected, pages = world.alone(model), world.pages()
        for pieces in random_steps(lengths, rng):
            got = model.compute(world.batch(pieces), pages).values.copy()
            at = 0
            for s, first, n in pieces:
                assert np.array_equal(got[at : at + n], expected[s][first : first + n]), (number, s, first, n)
                at += n
        exact = build_model(config, Coded(config), dtype="bfloat16", kernels=f"compiled-{level}")
        near = np.concatenate(World(config, lengths, "bfloat16", seed=number).alone(exact))
        error = np.abs(np.concatenate(expected) - near)
        assert 0 < error.mean() < 0.05 * near.std()


def test_engines_in_one_process_may_share_a_model() -> None:
    model, world = model_of(VARIANTS[0], "portable"), World(VARIANTS[0], [40, 300], "float32")
    expected, different = world.alone(model), []

    def compute(s: int) -> None:
        pages = world.pages()
        for _ in range(30):
            got = model.compute(world.batch([(s, 0, len(world.tokens[s]))]), pages).values.copy()
            if not np.array_equal(got, expected[s]):
                different.append(s)

    threads = [threading.Thread(target=compute, args=(s,)) for s in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not different


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_poisoned_key_is_noticed(level: str, dtype: str) -> None:
    """NaN within the context must be reported as not finite, and give no token."""
    model, world = model_of(VARIANTS[0], level, dtype), World(VARIANTS[0], [20], dtype)
    pages = world.pages()
    logits = model.compute(world.batch([(0, 3, 2)]), pages)  # positions 0 to 2 have no KV
    assert logits.finite == [False, False]


def test_inputs_out_of_range_are_refused_before_memory_is_written() -> None:
    model, world = model_of(VARIANTS[0], "portable"), World(VARIANTS[0], [20], "float32")
    pages = world.pages()
    good = world.batch([(0, 0, 20)])
    bad_token = good.token_ids.copy()
    bad_token[3] = VARIANTS[0].vocab_size
    bad_position = good.positions.copy()
    bad_position[0] = VARIANTS[0].max_model_tokens
    bad_slot = good.slots.copy()
    bad_slot[19] = world.num_blocks * BLOCK
    bad_table = good.block_tables.copy()
    bad_table[0, 1] = world.num_blocks
    cases = [
        (replace(good, token_ids=bad_token), "a token is not in the vocabulary"),
        (replace(good, positions=bad_position), "a position is beyond"),
        (replace(good, slots=bad_slot), "a slot is beyond"),
        (replace(good, block_tables=bad_table), "a page does not exist"),
        (replace(good, queries=np.array([19])), "do not add up"),
        (replace(good, sample_rows=np.array([20])), "a sampled row does not exist"),
        (replace(good, sample_rows=np.zeros(21, np.int64)), "more rows are sampled than exist"),
    ]
    for batch, message in cases:
        with pytest.raises(ValueError, match=message):
            model.compute(batch, pages)
    assert (world.memory[pages.address] == 0xFF).all()


def test_unsupported_types_and_shapes_are_refused_with_the_reason() -> None:
    config = tiny.config()
    with pytest.raises(UsageError, match="float32, bfloat16, int8 or fp8, not float16"):
        build_model(config, tiny.TinyTensors(config), dtype="float16", kernels="compiled")
    with pytest.raises(UsageError, match="int8 KV needs the compiled kernels, but other kernels were requested"):
        build_model(config, tiny.TinyTensors(config), dtype="int8", kernels="torch")
    odd = replace(config, head_dim=12)
    with pytest.raises(UsageError, match="head_dim 12 is not a multiple of 16"):
        build_model(odd, tiny.TinyTensors(odd), dtype="float32", kernels="compiled")


def test_fast_numerics_are_refused_where_they_are_not_supported() -> None:
    coded, plain = CODED[0], tiny.config()
    cases = [
        (plain, tiny.TinyTensors(plain), "bfloat16", "compiled", "needs quantized weights"),
        (coded, Coded(coded), "float32", "compiled", "which dtype=float32 does not allow"),
        (coded, Coded(coded), "bfloat16", "torch", "needs the compiled kernels"),
    ]
    for config, tensors, dtype, kernels, message in cases:
        with pytest.raises(UsageError, match=message):
            build_model(config, tensors, dtype=dtype, numerics="fast", kernels=kernels)


def test_torch_converts_no_weights() -> None:
    config = tiny.config()
    with pytest.raises(UsageError, match="weights in float32 need the compiled kernels"):
        build_model(config, tiny.TinyTensors(config), dtype="float32", kernels="torch", weights="float32")


def test_every_format_that_a_setting_names_is_one_of_the_kernels() -> None:
    choices = {setting.name: setting.choices for setting in ENGINE}
    assert choices["weights"] == tuple(WEIGHTS)


def test_without_the_compiled_module_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "extension", lambda: None)
    model = build_model(VARIANTS[0], tiny.TinyTensors(VARIANTS[0]), dtype="float32")
    world = World(VARIANTS[0], [9], "float32")
    assert model.compute(world.batch([(0, 0, 9)]), world.pages(0)).finite == [True] * 9
    for dtype, kernels in (("float32", "compiled-avx2"), ("int8", "auto")):
        with pytest.raises(UsageError, match="they were not built"):
            build_model(VARIANTS[0], tiny.TinyTensors(VARIANTS[0]), dtype=dtype, kernels=kernels)


class Scaled(tiny.TinyTensors):
    """Gates so large that their exponentials overflow float32."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        return super().read(name) * np.float32(100 if name.endswith("gate_proj.weight") else 1)


@pytest.mark.parametrize("level", LEVELS)
def test_gates_of_any_size(level: str) -> None:
    config, world = tiny.config(), World(tiny.config(), [40], "float32")
    exact = build_model(config, Scaled(config), dtype="float64", kernels="reference")
    (expected,) = World(config, [40], "float64").alone(exact)
    (got,) = world.alone(build_model(config, Scaled(config), dtype="float32", kernels=f"compiled-{level}"))
    tolerance = 0.5 if level in ROUNDING else 3e-3  # this level rounds to bfloat16
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_values_of_an_earlier_batch_do_not_change_results(level: str, dtype: str) -> None:
    """The 112 inputs of the last product fill no whole group; the rest of the group must not contain values of an
    earlier batch.
    """
    config = tiny.config()
    for weights in ("shipped", "bfloat16"):
        tensors = tiny.TinyTensors(config)
        model = build_model(config, tensors, dtype=dtype, weights=weights, kernels=f"compiled-{level}")
        world = World(config, [40, 300], dtype)
        small, large = world.batch([(0, 0, 40)]), world.batch([(1, 0, 300)])
        pages = world.pages()
        first = [model.compute(batch, pages).values.copy() for batch in (small, large)]
        poisoned = model.compute(world.batch([(0, 3, 2)]), world.pages())
        assert poisoned.finite == [False, False]
        for _ in range(2):
            for batch, expected in ((large, first[1]), (small, first[0])):
                again = model.compute(batch, pages)
                assert all(again.finite)
                assert np.array_equal(again.values, expected)


class Broken(tiny.TinyTensors):
    """A model with one NaN in one matrix."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        values = super().read(name)
        if name == "model.layers.1.mlp.up_proj.weight":
            values[3, 4] = np.nan
        return values


def test_a_weight_that_is_no_number_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"layers.1.mlp.gate_proj.weight., or a tensor fused with it, holds"):
        build_model(tiny.config(), Broken(tiny.config()), dtype="float32", kernels="compiled")
