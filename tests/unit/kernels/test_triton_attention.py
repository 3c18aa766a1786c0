"""Triton attention equals the reference, for any batch over any pages, and never reads beyond a context."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.kernels import kernel_cases
from harness.kernels.kernel_cases import Case, Cast, assert_as_good_as_reference, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.batch import AttentionBatch, AttentionRules
from kvferry.kernels.gpu.attention.attend import attend
from kvferry.kernels.gpu.attention.plan import plan_attention
from kvferry.kernels.gpu.backend import OPS
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import forward as reference

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
DECODING = st.tuples(st.just(1), st.integers(0, 70))
PREFILLING = st.tuples(st.integers(1, 20), st.integers(0, 40))
SHAPES = st.lists(st.one_of(DECODING, PREFILLING), min_size=1, max_size=4)
OUT_OF_RANGE = 1 << 30
"""Number of a page that does not exist; reading it ends the process."""


@settings(max_examples=30, deadline=None)
@given(
    shapes=SHAPES,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 14, 16]),
    block_tokens=st.sampled_from([1, 4, 5, 16]),
    seed=st.integers(0, 1000),
    dtype=DTYPES,
)
def test_paged_attention(
    device: torch.device,
    shapes: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(shapes, kv_heads=kv_heads, group=group, head_dim=head_dim, block_tokens=block_tokens, seed=seed)
    assert_as_good_as_reference(lambda ops, cast: kernel_cases.attend(case, ops, cast), dtype, OPS, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (9, 3)], kv_heads=2, group=3, head_dim=head_dim, block_tokens=16, seed=3)
    assert_as_good_as_reference(lambda ops, cast: kernel_cases.attend(case, ops, cast), dtype, OPS, device=device)


@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES,
    group=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 50)),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
    dtype=DTYPES,
)
def test_windows_caps_and_sinks(
    device: torch.device,
    shapes: list[tuple[int, int]],
    group: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    seed: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(shapes, kv_heads=2, group=group, head_dim=16, block_tokens=4, seed=seed)
    sinks = torch.randn(2 * group) * 3 if has_sinks else None

    def run(table: object, cast: Cast) -> torch.Tensor:
        pages, q = cast(case.pages), cast(case.q)
        rules = AttentionRules(0.4, window, soft_cap, None if sinks is None else sinks.to(pages.device))
        if table is reference.DEVICE_OPS:
            return reference.attend(q, pages, 2, case.batch, rules)
        return attend(q, pages, 2, plan_attention(case.to(pages.device), pages, q.shape[1]), rules)

    assert_as_good_as_reference(run, dtype, None, definition=reference.DEVICE_OPS, device=device)


def run_on(case: Case, device: torch.device, ops: Ops = OPS) -> torch.Tensor:
    return kernel_cases.attend(case, ops, lambda t: t.to(device, copy=True))


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, block_tokens=st.sampled_from([1, 4, 16]), group=st.integers(1, 3))
def test_nothing_beyond_a_context_is_read(
    device: torch.device, shapes: list[tuple[int, int]], block_tokens: int, group: int
) -> None:
    """Every unused slot contains NaN, and unused entries of the tables refer to pages that do not exist."""

    def make(unused: int) -> Case:
        return make_case(
            shapes, kv_heads=2, group=group, head_dim=8, block_tokens=block_tokens, seed=1, unused=unused,
            spare_columns=3,
        )  # fmt: skip

    clean, poisoned = make(0), make(OUT_OF_RANGE).poisoned()
    assert torch.isnan(poisoned.pages).any()
    assert torch.equal(run_on(poisoned, device), run_on(clean, device))


@settings(max_examples=15, deadline=None)
@given(shapes=st.lists(st.one_of(DECODING, PREFILLING), min_size=2, max_size=5), group=st.integers(1, 3))
def test_a_row_does_not_depend_on_its_batch(device: torch.device, shapes: list[tuple[int, int]], group: int) -> None:
    case = make_case(shapes, kv_heads=1, group=group, head_dim=16, block_tokens=4, seed=2)
    together = run_on(case, device)
    first = 0
    for index, (queries, _) in enumerate(shapes):
        rows, b = slice(first, first + queries), case.batch
        one = slice(index, index + 1)
        alone = AttentionBatch(b.queries[one], b.contexts[one], b.block_tables[one], b.slots[rows])
        single = replace(case, q=case.q[rows], kv=case.kv[rows], batch=alone)
        assert torch.equal(run_on(single, device), together[rows])
        first += queries


def test_a_batch_without_sequences_launches_no_kernel(device: torch.device) -> None:
    nobody = AttentionBatch(
        np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.int64), torch.zeros(0, dtype=torch.int64)
    )
    pages = torch.zeros(2, 1, 2, 1, 4, 8, device=device)
    out = OPS.paged_attention(torch.zeros(0, 2, 8, device=device), pages, 0, OPS.plan_attention(nobody, pages, 2), 0.1)
    assert out.shape == (0, 16)


def test_tables_of_a_hundred_thousand_tokens(device: torch.device) -> None:
    case = make_case([(1, 30), (7, 20)], kv_heads=1, group=2, head_dim=16, block_tokens=4, seed=5)
    long = make_case(
        [(1, 30), (7, 20)], kv_heads=1, group=2, head_dim=16, block_tokens=4, seed=5, unused=OUT_OF_RANGE,
        spare_columns=25_000,
    )  # fmt: skip
    assert torch.equal(run_on(long, device), run_on(case, device))


def test_pages_beyond_31_bits_are_read(device: torch.device) -> None:
    case = make_case([(1, 6), (40, 2)], kv_heads=1, group=2, head_dim=8, block_tokens=64, seed=5)
    few = case.pages.half().to(device)
    assert (
        int(case.batch.block_tables.max()) >= 2
    )  # the product with the stride below exceeds 31 bits, and the factors do not
    wide = torch.empty_strided((len(few), *few.shape[1:]), (1 << 30, *few.stride()[1:]), dtype=few.dtype, device=device)
    wide.copy_(few)
    q, batch = case.q.half().to(device), case.to(device)
    got = [OPS.paged_attention(q, p, 1, OPS.plan_attention(batch, p, 2), 0.3) for p in (wide, few)]
    assert torch.equal(*got)
