"""The Triton backend's row operations equal the reference, for any shape and strided views."""

import pytest
import torch
from harness.kernels.kernel_cases import Cast, assert_as_good_as_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.batch import HeadNorms, LowRankGroup, LowRankWeights
from kvferry.kernels.gpu.backend import OPS
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import forward as reference

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ROWS = st.sampled_from([0, 1, 2, 5])
FEW = settings(max_examples=20, deadline=None)


@FEW
@given(rows=ROWS, columns=st.sampled_from([1, 3, 32, 57, 100]), dtype=DTYPES)
def test_embedding_and_gathered_rows(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> None:
    table, ids = torch.randn(31, columns), torch.randint(0, 31, (rows,))

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        held = cast(table)
        wide = torch.cat((held, held), dim=1)  # rows of a wider tensor
        numbers = ids.to(held.device)
        return torch.cat((ops.embedding(numbers, held), ops.gather_rows(wide[:, columns:], numbers)))

    assert_as_good_as_reference(run, dtype, OPS, device=device)


def test_an_id_beyond_the_table_reads_no_row(device: torch.device) -> None:
    table = torch.ones(3, 5, device=device)
    rows = OPS.gather_rows(table, torch.tensor([-1, 2, 3, 1 << 40], device=device))
    assert rows.tolist() == [[0.0] * 5, [1.0] * 5, [0.0] * 5, [0.0] * 5]


@FEW
@given(rows=ROWS, columns=st.sampled_from([1, 16, 57, 100]), dtype=DTYPES, scale=st.sampled_from([1.0, 90.0]))
def test_silu_mul(device: torch.device, rows: int, columns: int, dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(rows, 2 * columns) * scale
    assert_as_good_as_reference(lambda ops, cast: ops.silu_mul(cast(x)), dtype, OPS, device=device)


@FEW
@given(
    rows=st.sampled_from([1, 2, 5, 40]),
    columns=st.sampled_from([8, 57, 100]),
    rank=st.sampled_from([1, 3, 8]),
    outputs=st.sampled_from([1, 33, 70]),
    dtype=DTYPES,
)
def test_updates_of_adapters(
    device: torch.device, rows: int, columns: int, rank: int, outputs: int, dtype: torch.dtype
) -> None:
    x, y = torch.randn(rows, columns), torch.randn(rows, outputs + 4)
    a, b = torch.randn(rank, columns) / columns**0.5, torch.randn(outputs, rank)
    order = torch.randperm(rows)

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        out, first = cast(y), LowRankWeights(cast(a), cast(b), 3)
        parts = (order[: rows // 3], order[rows // 3 :])
        assert ops.add_low_rank is not None
        ops.add_low_rank(out, cast(x), [LowRankGroup(part.to(out.device), first) for part in parts if len(part)])
        return out

    assert_as_good_as_reference(run, dtype, OPS, device=device)


@FEW
@given(rows=ROWS, columns=st.sampled_from([1, 8, 57, 64]), dtype=DTYPES)
def test_norms(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, residual, w = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        total, weight = cast(residual), cast(w)
        alone = ops.rms_norm(cast(x), weight, 1e-5)
        return torch.cat((alone, ops.add_rms_norm(cast(x), total, weight, 1e-5), total))

    assert_as_good_as_reference(run, dtype, OPS, device=device)


@FEW
@given(rows=ROWS, heads=st.integers(1, 5), columns=st.sampled_from([2, 14, 16]), dtype=DTYPES)
def test_norm_of_heads(device: torch.device, rows: int, heads: int, columns: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, heads + 2, columns), torch.randn(columns)
    assert_as_good_as_reference(
        lambda ops, cast: ops.rms_norm(cast(x)[:, 1:-1], cast(w), 1e-6), dtype, OPS, device=device
    )


@FEW
@given(rows=ROWS, heads=st.integers(1, 5), head_dim=st.sampled_from([2, 14, 16, 80]), dtype=DTYPES)
def test_rotate(device: torch.device, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x, cos, sin = torch.randn(rows, heads, head_dim), torch.randn(rows, head_dim), torch.randn(rows, head_dim)

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        wider = torch.cat((cast(x), cast(x)), dim=1)
        ops.rotate(wider[:, :heads], cos.to(wider.device), sin.to(wider.device))
        return wider

    assert_as_good_as_reference(run, dtype, OPS, device=device)


@FEW
@given(
    rows=ROWS,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 14, 16, 96]),
    block_tokens=st.sampled_from([1, 4, 5]),
    has_norms=st.booleans(),
    dtype=DTYPES,
)
def test_place_qkv_equals_the_reference(
    device: torch.device,
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    has_norms: bool,
    dtype: torch.dtype,
) -> None:
    heads = kv_heads * group
    qkv, angles = torch.randn(rows, heads + 2 * kv_heads, head_dim), torch.randn(2, rows, head_dim)
    weights, blank = torch.randn(2, head_dim), torch.randn(4, 3, 2, kv_heads, block_tokens, head_dim)
    slots = torch.randperm(4 * block_tokens)[:rows]
    qkv, angles, slots = qkv[: len(slots)], angles[:, : len(slots)], slots

    def run(ops: Ops, cast: Cast) -> torch.Tensor:
        given_qkv, pages, norm = cast(qkv), cast(blank), cast(weights)
        at = pages.device
        norms = HeadNorms(norm[0], norm[1], 1e-6) if has_norms else None
        cos, sin = (part.contiguous().to(at) for part in angles)
        ops.place_qkv(given_qkv, norms, cos, sin, pages, 1, slots.to(at))
        return torch.cat((given_qkv[:, :heads].flatten(), pages.flatten()))

    assert_as_good_as_reference(run, dtype, OPS, device=device)


def test_write_kv_changes_only_its_slots_in_its_layer(device: torch.device) -> None:
    pages = torch.zeros(4, 3, 2, 2, 5, 6, device=device)
    kv = torch.randn(3, 2, 2, 6, device=device)
    OPS.write_kv(kv, pages, 1, torch.tensor([0, 19, 7], device=device))
    for row, slot in enumerate([0, 19, 7]):
        assert torch.equal(pages[slot // 5, 1, :, :, slot % 5], kv[row])
    assert int((pages != 0).sum()) == kv.numel()


def test_pages_beyond_31_bits_are_written(device: torch.device) -> None:
    """Only written pages take memory: pages are 2^30 values apart, so the third one is at 2^31."""
    pages = torch.empty_strided((3, 1, 2, 1, 4, 8), (1 << 30, 64, 32, 32, 8, 1), dtype=torch.float16, device=device)
    kv = torch.randn(2, 2, 1, 8, dtype=torch.float16, device=device)
    OPS.write_kv(kv, pages, 0, torch.tensor([9, 6], device=device))
    assert torch.equal(pages[2, 0, :, :, 1], kv[0])
    assert torch.equal(pages[1, 0, :, :, 2], kv[1])


def test_projections_are_torch_s(device: torch.device) -> None:
    x, w, b = torch.randn(3, 57), torch.randn(11, 57), torch.randn(11)
    got = OPS.pack_linear(w.to(device), b.to(device))(x.to(device))
    torch.testing.assert_close(got.cpu(), reference.OPS.pack_linear(w, b)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_table_has_every_operation(backend: str) -> None:
    from kvferry.kernels.ops import ops_for

    ops = OPS if backend == "triton" else ops_for("cpu", backend)
    assert ops.name == backend
