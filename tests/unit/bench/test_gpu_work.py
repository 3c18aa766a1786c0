"""The kernel benchmark: formulas of bytes and operations, quantiles, rows, and the choice of launch settings."""

import pytest

from kvferry.bench.formulas.gpu_work import OPERATIONS, SERVED, SMALL, About, GpuTiming, Rates, Spec, row, work_of
from kvferry.bench.formulas.launch_choice import TUNABLE, gain, steps, winner
from kvferry.bench.formulas.work import KernelWork
from kvferry.kernels.gpu import launch

HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64, "block_tokens": 16}
PAGES = {"blocks": 3, "layers": 5, "kv_heads": 2, "block_tokens": 16, "head_dim": 64}
KV, Q = 2 * 2 * 64 * 2, 2 * 8 * 64 * 2  # bytes: keys and values of a token; queries and result of a row

LATENT = {"heads": 8, "rank": 512, "rotated": 64, "plain": 128, "value": 128, "block_tokens": 16}
# 300 vectors, 3 rows of queries and results, and the projections of 8 heads, of 2 bytes per value.
LATENT_BYTES = 2 * (300 * 576 + 3 * 8 * (192 + 128) + 8 * 512 * 256)


@pytest.mark.parametrize(
    ("spec", "num_bytes", "flops"),
    [
        (Spec.of("decode_attention", batch=3, context=100, **HEADS), 300 * KV + 3 * Q, 4 * 8 * 64 * 300),
        (Spec.of("prefill_attention", tokens=4, history=0, **HEADS), 4 * KV + 4 * Q, 4 * 8 * 64 * 10),
        (Spec.of("prefill_attention", tokens=4, history=7, **HEADS), 11 * KV + 4 * Q, 4 * 8 * 64 * (28 + 10)),
        (Spec.of("latent_decode", batch=3, context=100, **LATENT), LATENT_BYTES, 2 * 3 * 8 * (100 * 1088 + 512 * 256)),
        (Spec.of("add_rms_norm", rows=10, columns=32), 4 * 10 * 32 * 2 + 64, 0),
        (Spec.of("silu_mul", rows=10, columns=32), 3 * 10 * 32 * 2, 0),
        (Spec.of("place_qkv", rows=10, **HEADS), 10 * (2 * 12 * 64 * 2 + 8 * 64 + 8), 0),
        (Spec.of("embedding", rows=10, columns=32, vocabulary=99), 10 * (2 * 32 * 2 + 8), 0),
        (Spec.of("sample", rows=10, vocabulary=99, top_k=0, top_p_percent=100), 10 * 99 * 4, 0),
        (Spec.of("scatter_blocks", **PAGES), 2 * 3 * 5 * 2 * 2 * 16 * 64 * 2, 0),
        (Spec.of("digest_blocks", **PAGES), 3 * 5 * 2 * 2 * 16 * 64 * 2, 0),
    ],
    ids=lambda value: value.op if isinstance(value, Spec) else "",
)
def test_bytes_and_operations_by_hand(spec: Spec, num_bytes: int, flops: int) -> None:
    assert work_of(spec, 2) == KernelWork(num_bytes, flops)


def test_every_operation_is_measured_in_both_sets_of_shapes() -> None:
    for specs in (SERVED, SMALL):
        assert tuple(dict.fromkeys(spec.op for spec in specs)) == OPERATIONS
    assert len({(spec.op, spec.shape) for spec in SERVED}) == len(SERVED)


def test_the_shapes_are_the_documented_ones() -> None:
    decode = [spec for spec in SERVED if spec.op == "decode_attention"]
    assert {(s["batch"], s["context"]) for s in decode} == {
        (batch, context) for batch in (1, 64) for context in (4096, 16384, 32768)
    }
    assert all((s["heads"] // s["kv_heads"], s["head_dim"]) == (4, 128) for s in decode)
    latent = [spec for spec in SERVED if spec.op == "latent_decode"]
    assert [(s["batch"], s["context"], s["heads"]) for s in latent] == [
        (64, 4096, 128), (64, 16384, 128), (64, 16384, 16),
    ]  # fmt: skip
    for op in ("add_rms_norm", "silu_mul", "place_qkv"):
        moved = [work_of(spec, 2).num_bytes for spec in SERVED if spec.op == op]
        assert any(16 << 20 <= size <= 64 << 20 for size in moved), op
        assert max(moved) >= 256 << 20, op


def test_the_bound_is_the_longer_of_bytes_and_operations() -> None:
    rates = {"gbps": 1000.0, "gflops": 100e3}
    assert KernelWork(2 * 10**12, 10**13).seconds(**rates) == pytest.approx(2.0)
    assert KernelWork(10**11, 3 * 10**14).seconds(**rates) == pytest.approx(3.0)


def test_quantiles() -> None:
    assert GpuTiming.of([5.0, 1.0, 3.0, 2.0, 4.0]) == GpuTiming(median=3.0, low=1.0, high=5.0, count=5)
    assert GpuTiming.of([7.0]) == GpuTiming(7.0, 7.0, 7.0, 1)
    assert GpuTiming.of([float(i) for i in range(101)]) == GpuTiming(50.0, 10.0, 90.0, 101)


def test_a_row_contains_its_share_of_the_bound() -> None:
    spec = Spec.of("silu_mul", rows=10, columns=32)
    about = About("2026-01-01", "abc", "H200", "2.15", "3.9")
    made = row(
        about, spec, KernelWork(10**9), GpuTiming(0.002, 0.001, 0.003, 9), Rates(1000.0, 100.0),
        dtype="bfloat16", kernels="triton", launch="block=1",
    )  # fmt: skip
    assert (made.op, made.shape, made.gpu, made.launch) == ("silu_mul", "rows=10 columns=32", "H200", "block=1")
    assert (made.ms, made.ms_10, made.ms_90, made.n) == (2.0, 1.0, 3.0, 9)
    assert (made.gbps, made.tflops, made.share_of_bound) == (500.0, 0.0, 0.5)


def test_one_value_is_varied_at_a_time() -> None:
    now = (("block", 4), ("warps", 2), ("stages", 1))
    tried = steps(now, {"block": (2, 4, 16), "warps": (2, 4), "rows": (1, 2)})
    assert {tuple(t) for t in tried} == {
        (("block", 2), ("warps", 2), ("stages", 1)),
        (("block", 16), ("warps", 2), ("stages", 1)),
        (("block", 4), ("warps", 4), ("stages", 1)),
    }
    assert tried[-1] == (("block", 16), ("warps", 2), ("stages", 1)), "values far from the present one are tried last"


def test_the_winner_is_clearly_faster_over_all_shapes() -> None:
    old, new, odd = (("warps", 1),), (("warps", 2),), (("warps", 4),)
    assert gain([1.0, 4.0], [2.0, 2.0]) == pytest.approx(1.0)
    assert winner(old, {old: [1.0, 1.0], new: [0.9, 0.9], odd: [0.5, 1.9]}) == new
    assert winner(old, {old: [1.0, 1.0], new: [0.99, 0.99]}) == old, "a difference of 1 % may be noise"
    assert winner(old, {old: [1.0]}) == old


def test_the_grids_name_operations_and_sizes_of_the_table() -> None:
    rows = launch.table()
    for op, tunable in TUNABLE.items():
        sizes = rows[op, "any", "any"].sizes if (op, "any", "any") in rows else rows[op, "any", "wide"].sizes
        assert tunable.grid.keys() <= {*sizes, "warps", "stages"}, op
