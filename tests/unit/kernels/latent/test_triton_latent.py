"""Latent attention of the Triton backend equals the reference for any batch, and reads nothing beyond a context."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.kernels.kernel_cases import Case, Cast, assert_as_good_as_reference, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.kernels.test_triton_rows_of_one import described

from kvferry.kernels import latent_limits
from kvferry.kernels.batch import AttentionBatch, AttentionRules, LatentUp
from kvferry.kernels.gpu.attention.attend import attend
from kvferry.kernels.gpu.attention.plan import Plan, plan_attention, plan_rows
from kvferry.kernels.gpu.backend import DEVICE_OPS, OPS
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.gpu.device import device_class
from kvferry.kernels.gpu.latent import attend as latent_attend
from kvferry.kernels.gpu.latent.attend import attend_latent, attend_vectors
from kvferry.kernels.gpu.launch import choose, trial
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import forward as reference

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
PARTITION = 16
"""Vectors of a partition in the interpreter."""
DECODING = st.tuples(st.just(1), st.integers(0, 70))
FEW = st.tuples(st.integers(2, 4), st.integers(0, 40))
PREFILLING = st.tuples(st.integers(1, 20), st.integers(0, 40))
SHAPES = st.lists(st.one_of(DECODING, FEW, PREFILLING), min_size=1, max_size=4)
OUT_OF_RANGE = 1 << 30
"""Number of a page that does not exist; reading it ends the process."""
PLAIN, ROTATED, VALUE, RANK = 6, 4, 7, 12


@pytest.fixture(scope="module", name="device")
def device_with_small_partitions(device: torch.device) -> Iterator[torch.device]:
    """The device; on a GPU, partitions have as few vectors as in the interpreter, so that tests have several."""
    rows = []
    if device.type == "cuda":
        keys = [("latent_small", device_class(device), f"h{h}-{w}bit") for h in (16, 32, 64, 128) for w in (16, 32)]
        chosen = [(choose(op, device, shape), name, shape) for op, name, shape in keys]
        rows = [replace(c, device=n, shape=s, sizes={**c.sizes, "partition": PARTITION}) for c, n, s in chosen]
    with trial(rows):
        yield device


def latent_case(
    shapes: list[tuple[int, int]], width: int, *, block_tokens: int = 4, seed: int = 1, **more: int
) -> Case:
    """Return a case whose pages have one plane of vectors."""
    case = make_case(
        shapes, kv_heads=1, group=1, head_dim=width, block_tokens=block_tokens, seed=seed, **more
    ).poisoned()
    return replace(case, pages=case.pages[:, :, :1].contiguous(), kv=case.kv[:, :1].contiguous())


def drawn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def up_of(heads: int, sizes: tuple[int, int, int, int], cast: Cast) -> LatentUp:
    plain, _, value, rank = sizes
    return LatentUp(cast(drawn(heads, plain, rank)), cast(drawn(heads, value, rank, seed=4)))


def attended(
    case: Case, heads: int, sizes: tuple[int, int, int, int], ops: Ops, cast: Cast, factor: float = 1.0
) -> torch.Tensor:
    """Write the case's vectors, then attend with random projections and queries, which are multiplied by `factor`."""
    assert ops.attend_latent is not None
    pages = cast(case.pages)
    batch = case.to(pages.device)
    ops.write_kv(cast(case.kv), pages, 1, batch.slots)
    plan = ops.plan_attention(batch, pages, heads)
    q = cast(drawn(len(case.q), heads, sizes[0] + sizes[1], seed=5) * factor)
    return ops.attend_latent(q, up_of(heads, sizes, cast), pages, 1, plan, 0.37)


@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES,
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 12, 16, 33])),
    heads=st.sampled_from([1, 2, 3, 8, 10]),
    block_tokens=st.sampled_from([1, 4, 5, 16]),
    seed=st.integers(0, 1000),
    dtype=DTYPES,
)
def test_results_are_those_of_the_definition(
    device: torch.device,
    shapes: list[tuple[int, int]],
    sizes: tuple[int, int, int, int],
    heads: int,
    block_tokens: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    plain, rotated, value, rank = sizes
    rotated += (rank + rotated) % 2
    sizes = plain, rotated, value, rank
    case = latent_case(shapes, rank + rotated, block_tokens=block_tokens, seed=seed)
    assert_as_good_as_reference(lambda ops, cast: attended(case, heads, sizes, ops, cast), dtype, OPS, device=device)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (16, torch.float16),
        (40, torch.bfloat16),
        *(
            pytest.param(heads, dtype, marks=pytest.mark.long)
            for heads in (16, 128)
            for dtype in (torch.float32, torch.bfloat16)
        ),
        pytest.param(128, torch.float16, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_sizes_of_published_models(device: torch.device, heads: int, dtype: torch.dtype) -> None:
    """512 + 64 values per vector; decode rows with one and several partitions, and a chunk after cached tokens."""
    sizes = (128, 64, 128, 512)
    case = latent_case([(1, 9), (1, 50), (3, 20)], 576, block_tokens=16)
    # With larger scores a softmax has one weight, and sums over several vectors are not tested.
    assert_as_good_as_reference(
        lambda ops, cast: attended(case, heads, sizes, ops, cast, factor=0.01), dtype, OPS, device=device
    )


def run_on(case: Case, device: torch.device, heads: int) -> torch.Tensor:
    return attended(case, heads, (PLAIN, ROTATED, VALUE, RANK), OPS, lambda t: t.to(device, copy=True))


@settings(max_examples=8, deadline=None)
@given(shapes=SHAPES, block_tokens=st.sampled_from([1, 4, 16]), heads=st.sampled_from([1, 3, 10]))
def test_nothing_beyond_a_context_is_read(
    device: torch.device, shapes: list[tuple[int, int]], block_tokens: int, heads: int
) -> None:
    """Every unused slot contains NaN, and unused entries of the tables refer to pages that do not exist."""
    poisoned = latent_case(shapes, RANK + ROTATED, block_tokens=block_tokens, unused=OUT_OF_RANGE, spare_columns=3)
    assert torch.isnan(poisoned.pages).any()
    clean = replace(poisoned, pages=poisoned.pages.nan_to_num(0.0))
    assert torch.equal(run_on(poisoned, device, heads), run_on(clean, device, heads))


def vectors_attended(case: Case, device: torch.device, heads: int, first: int = 0) -> torch.Tensor:
    """Attend with absorbed queries, whose values depend on the row's index plus `first`."""
    pages = case.pages.nan_to_num(0.0).to(device)
    plan = plan_attention(case.to(device), pages, heads)
    assert isinstance(plan, Plan)
    q = drawn(200, heads, RANK + ROTATED).to(device)[first : first + len(case.q)]
    return attend_vectors(q[..., :RANK].contiguous(), q[..., RANK:], pages.select(1, 1), plan, 0.3)


@settings(max_examples=8, deadline=None)
@given(shapes=st.lists(st.one_of(DECODING, FEW, PREFILLING), min_size=2, max_size=5), heads=st.sampled_from([1, 3, 10]))
def test_a_row_does_not_depend_on_its_batch(device: torch.device, shapes: list[tuple[int, int]], heads: int) -> None:
    case = latent_case(shapes, RANK + ROTATED)
    together = vectors_attended(case, device, heads)
    first = 0
    for index, (queries, _) in enumerate(shapes):
        rows, b = slice(first, first + queries), case.batch
        one = slice(index, index + 1)
        alone = AttentionBatch(b.queries[one], b.contexts[one], b.block_tables[one], b.slots[rows])
        single = replace(case, q=case.q[rows], batch=alone)
        assert torch.equal(vectors_attended(single, device, heads, first), together[rows])
        first += queries


@pytest.mark.parametrize("context", [PARTITION - 1, PARTITION, PARTITION + 1, 3 * PARTITION])
@pytest.mark.parametrize("queries", [1, 2, 3])
def test_rows_around_the_end_of_a_partition(device: torch.device, context: int, queries: int) -> None:
    """Rows of one tile, of which some have one partition and some two, beside a longer sequence."""
    case = latent_case([(queries, context - queries), (1, 50)], RANK + ROTATED)
    sizes = (PLAIN, ROTATED, VALUE, RANK)
    assert_as_good_as_reference(
        lambda ops, cast: attended(case, 2, sizes, ops, cast), torch.float32, OPS, device=device
    )


def test_partitions_need_not_be_whole_tiles_of_keys(device: torch.device) -> None:
    case = latent_case([(1, 40), (1, 11), (3, 30)], RANK + ROTATED)
    sizes = (PLAIN, ROTATED, VALUE, RANK)
    row = choose("latent_small", device, "h16-32bit")
    odd = replace(row, device=device_class(device), shape="h16-32bit", sizes={**row.sizes, "partition": 12})
    assert 12 % row.sizes["keys"]
    with trial([odd]):
        assert_as_good_as_reference(
            lambda ops, cast: attended(case, 2, sizes, ops, cast), torch.float32, OPS, device=device
        )


def test_heads_in_parts_give_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = latent_case([(1, 40), (1, 3), (9, 3)], RANK + ROTATED)
    together = run_on(case, device, 40)
    monkeypatch.setattr(latent_limits, "_SCRATCH_BYTES", 1)
    counts: list[int] = []
    run = attend_vectors

    def counted(absorbed: torch.Tensor, *rest: object) -> torch.Tensor:
        counts.append(absorbed.shape[1])
        return run(absorbed, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_attend, "attend_vectors", counted)
    torch.testing.assert_close(run_on(case, device, 40), together, rtol=1e-5, atol=1e-5)
    assert counts == [32, 8]


@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_scratch_memory_is_bounded_where_32_heads_fit(rows: int) -> None:
    heads = latent_limits.heads_at_once(rows, 128, rank=512, value_bytes=2)
    needed = latent_limits.scratch_bytes(rows, 128, rank=512, value_bytes=2)
    assert needed == 2 * rows * heads * 512 * 2
    assert heads == {1: 128, 64: 128, 8192: 32}[rows]
    assert latent_limits.heads_at_once(rows, 20, rank=512, value_bytes=2) == 20


@settings(max_examples=10, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    heads=st.sampled_from([1, 3, 10]),
    programs=st.sampled_from([1, 4, 4096]),
    data=st.data(),
)
def test_lengths_on_the_device_give_the_results_of_the_host_s_plan(
    device: torch.device, contexts: list[int], padding: int, heads: int, programs: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(contexts))))
    case = latent_case([(1, c - 1) for c in contexts], RANK + ROTATED, unused=OUT_OF_RANGE, spare_columns=2)
    case.pages[:, 1].nan_to_num_(0.0)  # the rows' own vectors are not written
    pages, q = case.pages.to(device), drawn(len(contexts) + padding, heads, RANK + ROTATED).to(device)
    absorbed, rotated = q[..., :RANK].contiguous(), q[..., RANK:]
    plan, open_plan = (
        plan_attention(case.to(device), pages, heads),
        plan_rows(described(case, list(order), padding, device), pages, heads),
    )
    assert isinstance(plan, Plan)
    assert isinstance(open_plan, Plan)
    count = len(contexts)
    expected = attend_vectors(absorbed[:count], rotated[:count], pages.select(1, 1), plan, 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attend, "_OPEN_PROGRAMS", programs)
        got = attend_vectors(absorbed, rotated, pages.select(1, 1), open_plan, 0.3)
    assert torch.equal(got[:count], expected)
    assert not got[count:].any()


def test_the_definition_takes_lengths_on_the_device(device: torch.device) -> None:
    case = latent_case([(1, 40), (1, 3), (1, 0)], RANK + ROTATED)
    case.pages.nan_to_num_(0.0)

    def run(ops: tuple[Ops, Callable[..., object]], cast: Cast) -> torch.Tensor:
        table, plan_of = ops
        assert table.attend_latent is not None
        pages = cast(case.pages)
        plan = plan_of(described(case, [2, 0, 1], 2, pages.device), pages, 3)
        q = cast(drawn(5, 3, PLAIN + ROTATED))
        return table.attend_latent(q, up_of(3, (PLAIN, ROTATED, VALUE, RANK), cast), pages, 1, plan, 0.3)

    definition = reference.OPS, reference.DEVICE_OPS.plan_rows
    ours = OPS, DEVICE_OPS.plan_rows
    assert_as_good_as_reference(run, torch.float32, ours, definition=definition, device=device)


def test_pages_beyond_31_bits_are_read(device: torch.device) -> None:
    case = latent_case([(1, 6), (40, 2)], 8, block_tokens=64)
    few = case.pages.nan_to_num(0.0).half().to(device)
    assert int(case.batch.block_tables.max()) >= 2  # the product with the stride exceeds 31 bits
    wide = torch.empty_strided((len(few), *few.shape[1:]), (1 << 30, *few.stride()[1:]), dtype=few.dtype, device=device)
    wide.copy_(few)
    q, batch = drawn(41, 2, 7).half().to(device), case.to(device)
    up = LatentUp(*(drawn(2, size, 4).half().to(device) for size in (3, 5)))
    got = [attend_latent(q, up, p, 1, plan_attention(batch, p, 2), 0.3) for p in (wide, few)]
    assert torch.equal(*got)


def test_a_batch_without_sequences_launches_no_kernel(device: torch.device) -> None:
    empty = AttentionBatch(
        np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.int64), torch.zeros(0, dtype=torch.int64)
    )
    pages = torch.zeros(2, 1, 1, 1, 4, 8, device=device)
    up = LatentUp(torch.zeros(2, 3, 4, device=device), torch.zeros(2, 5, 4, device=device))
    out = attend_latent(torch.zeros(0, 2, 7, device=device), up, pages, 0, plan_attention(empty, pages, 2), 0.1)
    assert out.shape == (0, 10)


PAGES = torch.zeros(4, 2, 1, 1, 4, 8)
ONE = AttentionBatch(np.array([1, 1]), np.array([5, 5]), np.zeros((2, 2), np.int64), torch.zeros(2, dtype=torch.int64))
Q = torch.zeros(2, 3, 7)
UP = LatentUp(torch.zeros(3, 3, 4), torch.zeros(3, 5, 4))


def call(q: torch.Tensor = Q, up: LatentUp = UP, pages: torch.Tensor = PAGES) -> torch.Tensor:
    return attend_latent(q, up, pages, 0, plan_attention(ONE, PAGES, 3), 0.1)


WIDE = torch.zeros(4, 2, 1, 1, 4, 516)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "other heads": (lambda: call(Q[:, :2]), r"q: the shape must be \(2, 3, 7\), not \(2, 2, 7\)"),
    "another type": (lambda: call(Q.half()), "q: torch.float16 does not match torch.float32"),
    "projections of another type": (
        lambda: call(up=replace(UP, values=UP.values.half())),
        "values: torch.float16 does not match",
    ),
    "projections of other heads": (
        lambda: call(up=replace(UP, keys=UP.keys[:2])),
        r"keys: the shape must be \(3, 3, 4\)",
    ),
    "flat projections": (lambda: call(up=replace(UP, keys=UP.keys[0])), r"keys: the shape must be \[H, values, rank\]"),
    "values of another rank": (lambda: call(up=replace(UP, values=UP.values[..., :3])), "values: the shape must be"),
    "pages of another plan": (lambda: call(pages=PAGES[:, :1]), "pages: the pages have shape"),
    "pages of keys and values": (
        lambda: call(pages=torch.zeros(4, 2, 2, 1, 4, 8)),
        r"pages: .* is not \[pages, layers, 1, 1, B, D\]",
    ),
    "no rotated values": (
        lambda: call(torch.zeros(2, 3, 3), LatentUp(torch.zeros(3, 3, 8), torch.zeros(3, 5, 8))),
        "pages: vectors have 8 and 0 rotated values; 1 to 512 and 1 to 128 are supported",
    ),
    "vectors of 514 values": (
        lambda: attend_latent(
            torch.zeros(2, 3, 5),
            LatentUp(torch.zeros(3, 3, 514), torch.zeros(3, 5, 514)),
            WIDE,
            0,
            plan_attention(ONE, WIDE, 3),
            0.1,
        ),
        "pages: vectors have 514 and 2 rotated values",
    ),
    "odd vectors": (
        lambda: plan_attention(ONE, PAGES[..., :7], 3),
        "pages: latent vectors have 7 values; even numbers",
    ),
    "several heads of vectors": (
        lambda: plan_attention(ONE, torch.zeros(4, 2, 1, 2, 4, 8), 3),
        r"is not \[pages, layers, 1, 1, B, D\] or \[pages, layers, 2, K, B, D\]",
    ),
    "no heads": (lambda: plan_attention(ONE, PAGES, 0), "q: 0 query heads; at least 1"),
    "plain attention": (
        lambda: attend(torch.zeros(2, 3, 8), PAGES, 0, plan_attention(ONE, PAGES, 3), AttentionRules(0.1)),
        r"pages: .* is not \[pages, layers, 2, K, B, D\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, message = BAD[name]
    with pytest.raises(BadKernelInput, match=message):
        run()
