"""The torch backend equals the reference for any shape, and never reads beyond a context."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.kernels import kernel_cases
from harness.kernels.kernel_cases import Cast, attend, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.kernels.batch import AttentionBatch, AttentionRules, LatentUp
from kvferry.kernels.ops import Ops, ops_for
from kvferry.kernels.torch_family.attention import Plan
from kvferry.kernels.torch_family.latent import expands

FAST = ops_for("cpu", "torch")
DTYPES = [torch.float32, torch.bfloat16]


def assert_as_good_as_reference(run: Callable[[Ops, Cast], torch.Tensor], dtype: torch.dtype) -> None:
    kernel_cases.assert_as_good_as_reference(run, dtype, FAST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 17])
class TestRowOps:
    def test_rms_norm(self, rows: int, dtype: torch.dtype) -> None:
        x, w = torch.randn(rows, 57), torch.randn(57)
        assert_as_good_as_reference(lambda ops, cast: ops.rms_norm(cast(x), cast(w), 1e-5), dtype)

    def test_add_rms_norm_returns_the_norm_and_updates_the_residual(self, rows: int, dtype: torch.dtype) -> None:
        x, residual, w = torch.randn(rows, 57), torch.randn(rows, 57), torch.randn(57)

        def run(ops: Ops, cast: Cast) -> torch.Tensor:
            total = cast(residual)
            normed = ops.add_rms_norm(cast(x), total, cast(w), 1e-5)
            return torch.cat((normed, total))

        assert_as_good_as_reference(run, dtype)

    def test_rotate(self, rows: int, dtype: torch.dtype) -> None:
        x, cos, sin = torch.randn(rows, 5, 14), torch.randn(rows, 14), torch.randn(rows, 14)

        def run(ops: Ops, cast: Cast) -> torch.Tensor:
            wider = torch.cat((cast(x), cast(x)), dim=1)
            ops.rotate(wider[:, :5], cos, sin)  # a view, as the model's code passes
            return wider

        assert_as_good_as_reference(run, dtype)

    def test_silu_mul(self, rows: int, dtype: torch.dtype) -> None:
        x = torch.randn(rows, 74)
        assert_as_good_as_reference(lambda ops, cast: ops.silu_mul(cast(x)), dtype)

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_linear(self, rows: int, dtype: torch.dtype, has_bias: bool) -> None:
        x, w, b = torch.randn(rows, 57), torch.randn(93, 57), torch.randn(93)

        def run(ops: Ops, cast: Cast) -> torch.Tensor:
            return ops.pack_linear(cast(w), cast(b) if has_bias else None)(cast(x))

        assert_as_good_as_reference(run, dtype)

    def test_embedding_and_gather(self, rows: int, dtype: torch.dtype) -> None:
        table, ids = torch.randn(31, 13), torch.randint(0, 31, (rows,))
        assert_as_good_as_reference(lambda ops, cast: ops.embedding(ids, cast(table)), dtype)
        assert_as_good_as_reference(lambda ops, cast: ops.gather_rows(cast(table), ids), dtype)


shapes_strategy = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.integers(0, 40)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=shapes_strategy,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 14, 16]),
    block_tokens=st.sampled_from([1, 4, 5, 16]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
)
def test_paged_attention(
    shapes: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(shapes, kv_heads=kv_heads, group=group, head_dim=head_dim, block_tokens=block_tokens, seed=seed)
    assert_as_good_as_reference(lambda ops, cast: attend(case, ops, cast), dtype)


@settings(max_examples=40, deadline=None)
@given(
    shapes=shapes_strategy, block_tokens=st.sampled_from([1, 4, 16]), backend=st.sampled_from(["reference", "torch"])
)
def test_unused_slots_full_of_nan_change_nothing(
    shapes: list[tuple[int, int]], block_tokens: int, backend: str
) -> None:
    case = make_case(shapes, kv_heads=2, group=2, head_dim=8, block_tokens=block_tokens, seed=1)
    ops = ops_for("cpu", backend)
    clean = attend(case, ops, torch.clone)
    poisoned = case.poisoned()
    assert torch.isnan(poisoned.pages).any()  # includes the spare pages
    assert torch.equal(attend(poisoned, ops, torch.clone), clean)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_write_kv_changes_only_its_slots_in_its_layer(backend: str) -> None:
    ops = ops_for("cpu", backend)
    pages = torch.zeros(4, 3, 2, 2, 5, 6)
    kv = torch.randn(3, 2, 2, 6)
    ops.write_kv(kv, pages, 1, torch.tensor([0, 19, 7]))
    for row, slot in enumerate([0, 19, 7]):
        assert torch.equal(pages[slot // 5, 1, :, :, slot % 5], kv[row])
    assert int((pages != 0).sum()) == kv.numel()


def test_attention_equals_dense_causal_attention_for_any_placement_of_pages() -> None:
    q, k, v = torch.randn(1, 2, 33, 16), torch.randn(1, 2, 33, 16), torch.randn(1, 2, 33, 16)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    for block_tokens in (1, 2, 7, 16, 33, 64):
        blocks = -(-33 // block_tokens)
        placement = torch.randperm(blocks + 2)[:blocks].numpy()
        pages = torch.zeros(blocks + 2, 1, 2, 2, block_tokens, 16)
        positions = np.arange(33)
        slots = torch.from_numpy(placement[positions // block_tokens] * block_tokens + positions % block_tokens)
        batch = AttentionBatch(np.array([33]), np.array([33]), placement[None], slots)
        FAST.write_kv(torch.stack((k[0], v[0])).permute(2, 0, 1, 3), pages, 0, slots)
        out = FAST.paged_attention(q[0].transpose(0, 1), pages, 0, FAST.plan_attention(batch, pages, 2), 0.25)
        torch.testing.assert_close(out, dense[0].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.sampled_from([0, 1, 7, 40, 300])),
        min_size=1,
        max_size=5,
    ),
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    heads=st.integers(1, 3),
    block_tokens=st.sampled_from([1, 4, 5, 16]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
)
def test_latent_attention_absorbed_and_expanded(
    shapes: list[tuple[int, int]],
    sizes: tuple[int, int, int, int],
    heads: int,
    block_tokens: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Decode rows and chunks of all lengths; unused slots contain NaN."""
    plain, turned, value, rank = sizes
    case = make_case(shapes, kv_heads=1, group=heads, head_dim=rank + turned, block_tokens=block_tokens, seed=seed)
    case = case.poisoned()
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(case.q), heads, plain + turned, generator=generator)
    keys, values = (torch.randn(heads, size, rank, generator=generator) for size in (plain, value))

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        assert ops.attend_latent is not None
        pages = cast(case.pages[:, :, :1].contiguous())
        batch = case.to(pages.device)
        ops.write_kv(cast(case.kv[:, :1]), pages, 1, batch.slots)
        plan = ops.plan_attention(batch, pages, heads)
        return ops.attend_latent(cast(q), LatentUp(cast(keys), cast(values)), pages, 1, plan, 0.37)

    assert_as_good_as_reference(run, dtype)


@given(st.integers(1, 4000), st.integers(0, 4000))
def test_a_whole_prompt_is_expanded_and_a_row_of_a_long_one_absorbed(queries: int, before: int) -> None:
    def chosen(queries: int, context: int) -> bool:
        return expands(queries, context, plain=128, turned=64, rank=512, value=128)

    assert chosen(queries, queries)
    assert not chosen(1, 2 + before)
    if chosen(queries, queries + before):
        assert chosen(queries + 1, queries + 1 + before)


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="unknown kernel backend 'cuda-magic'; expected one of reference"):
        ops_for("cpu", "cuda-magic")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_what_a_plan_needs_is_on_the_device_of_the_pages(window: int | None, soft_cap: float | None) -> None:
    """Operations between devices raise an error, also on the device `meta`, which computes only shapes."""
    case = make_case([(1, 20), (1, 33), (7, 0), (5, 12)], kv_heads=2, group=2, head_dim=16, block_tokens=4, seed=1)
    batch = replace(case.batch, slots=case.batch.slots.to("meta"))
    pages, q = case.pages.to("meta"), case.q.to("meta")
    plan = FAST.plan_attention(batch, pages, q.shape[1])
    assert isinstance(plan, Plan)
    lists = [one for group in plan.groups for one in (group.rows, group.page_rows, group.mask, group.beyond)]
    lists += [one for chunk in plan.chunks for one in (chunk.page_rows, chunk.mask)]
    assert {str(one.device) for one in lists if one is not None} == {"meta"}
    out = FAST.attend(q, pages, 0, plan, AttentionRules(0.3, window, soft_cap))
    assert (str(out.device), tuple(out.shape)) == ("meta", (14, 64))
