"""Roofline of GPU kernels: measured shapes, their minimum bytes and operations, and the rows of results.

    bound of a kernel = max(bytes / rate of a copy, operations / rate of a matrix product)

Both rates are measured in the same run. Each input value counts once, even if a kernel reads it repeatedly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.bench.formulas.work import KernelWork
from kvferry.core.dtypes import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Spec:
    """An operation with specific sizes."""

    op: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, op: str, **sizes: int) -> "Spec":
        """Create a spec from an operation and its sizes."""
        return cls(op, MappingProxyType(sizes))

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def shape(self) -> str:
        """Sizes as text, for a result row."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of the device."""

    gbps: float
    """Rate of a large copy in 10^9 bytes per second; bytes read and bytes written both count."""
    tflops: float
    """Rate of a large matrix product in 10^12 operations per second."""


@dataclass(frozen=True, slots=True)
class GpuTiming:
    """Statistics of the durations of an action's runs, in seconds."""

    median: float
    low: float
    """10th percentile of the durations, seconds."""
    high: float
    """90th percentile of the durations, seconds."""
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "GpuTiming":
        """Compute the statistics of the durations of at least one run."""
        ordered, last = sorted(seconds), len(seconds) - 1
        low, median, high = (ordered[round(share * last)] for share in (0.1, 0.5, 0.9))
        return cls(median, low, high, len(ordered))


@dataclass(frozen=True, slots=True)
class About:
    """Columns that all rows of a run have in common."""

    date: str
    commit: str
    gpu: str
    torch: str
    triton: str


@dataclass(frozen=True, slots=True)
class GpuRow:
    """Result of a measured action, as a row of the CSV file."""

    date: str
    commit: str
    gpu: str
    torch: str
    triton: str
    op: str
    shape: str
    dtype: str
    kernels: str
    """Implementation: `triton` for kvferry's kernels, otherwise the name of the library."""
    ms: float
    """Median duration in milliseconds."""
    ms_10: float
    ms_90: float
    n: int
    bytes: int
    flops: int
    gbps: float
    tflops: float
    copy_gbps: float
    """Copy rate of the device in 10^9 bytes per second, measured in the same run."""
    matmul_tflops: float
    share_of_bound: float
    launch: str
    """Launch choice (block sizes, warps, stages) as text; empty for other libraries."""


def row(
    about: About,
    spec: Spec,
    work: KernelWork,
    timing: GpuTiming,
    rates: Rates,
    *,
    dtype: str,
    kernels: str,
    launch: str,
) -> GpuRow:
    """Create the result row of a measured action.

    Args:
        about: columns that all rows of the run have in common.
        spec: the operation and its shape.
        work: bytes and operations of one action.
        timing: measured times in seconds.
        rates: peak rates of the device, for the bound.
        dtype: dtype of the operands.
        kernels: `triton` for kvferry's kernels, otherwise the name of the library.
        launch: launch choice of the kernels; see `GpuRow.launch`.
    """
    seconds = timing.median
    return GpuRow(
        date=about.date,
        commit=about.commit,
        gpu=about.gpu,
        torch=about.torch,
        triton=about.triton,
        op=spec.op,
        shape=spec.shape,
        dtype=dtype,
        kernels=kernels,
        ms=round(1e3 * seconds, 5),
        ms_10=round(1e3 * timing.low, 5),
        ms_90=round(1e3 * timing.high, 5),
        n=timing.count,
        bytes=work.num_bytes,
        flops=work.flops,
        gbps=round(work.num_bytes / seconds / 1e9, 1),
        tflops=round(work.flops / seconds / 1e12, 2),
        copy_gbps=round(rates.gbps, 1),
        matmul_tflops=round(rates.tflops, 2),
        share_of_bound=round(work.seconds(gbps=rates.gbps, gflops=1e3 * rates.tflops) / seconds, 4),
        launch=launch,
    )


def work_of(spec: Spec, itemsize: int) -> KernelWork:
    """Return the minimum number of bytes and operations of a spec.

    Args:
        spec: a spec of an operation in `OPERATIONS`.
        itemsize: bytes per value.
    """
    return _WORK[spec.op](spec, itemsize)


def _decode(s: Spec, item: int) -> KernelWork:
    return _attention(s, item, rows=s["batch"], keys=s["batch"] * s["context"], seen=s["batch"] * s["context"])


def _prefill(s: Spec, item: int) -> KernelWork:
    tokens, history = s["tokens"], s["history"]
    return _attention(s, item, rows=tokens, keys=history + tokens, seen=tokens * history + tokens * (tokens + 1) // 2)


def _attention(s: Spec, item: int, *, rows: int, keys: int, seen: int) -> KernelWork:
    dim = s["head_dim"]
    return KernelWork(item * dim * (2 * s["kv_heads"] * keys + 2 * s["heads"] * rows), 4 * s["heads"] * dim * seen)


def _coded_decode(s: Spec, item: int) -> KernelWork:
    """Return the work of decoding with KV in 8 bits: keys and values have scales, queries and outputs `item` bytes per
    value."""
    keys, rows, dim = s["batch"] * s["context"], s["batch"], s["head_dim"]
    num_bytes = 2 * s["kv_heads"] * keys * (dim + SCALE_BYTES) + item * dim * 2 * s["heads"] * rows
    return KernelWork(num_bytes, 4 * s["heads"] * dim * keys)


def _latent_decode(s: Spec, item: int) -> KernelWork:
    """Return the work of latent decoding: each latent vector counts once per sequence, the projections of all heads
    once."""
    batch, heads, rank, both = s["batch"], s["heads"], s["rank"], s["plain"] + s["value"]
    values = batch * s["context"] * (rank + s["rotated"]) + batch * heads * (both + s["rotated"]) + heads * rank * both
    of_head = s["context"] * (2 * rank + s["rotated"]) + rank * both
    return KernelWork(item * values, 2 * batch * heads * of_head)


def _add_rms_norm(s: Spec, item: int) -> KernelWork:
    return KernelWork(item * (4 * s["rows"] + 1) * s["columns"])


def _silu_mul(s: Spec, item: int) -> KernelWork:
    return KernelWork(item * 3 * s["rows"] * s["columns"])


def _place_qkv(s: Spec, item: int) -> KernelWork:
    values = (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"]
    return KernelWork(s["rows"] * (2 * item * values + 8 * s["head_dim"] + 8))


def _take_rows(s: Spec, item: int) -> KernelWork:
    return KernelWork(s["rows"] * (2 * item * s["columns"] + 8))


def _logits(s: Spec, item: int) -> KernelWork:
    return KernelWork(4 * s["rows"] * s["vocabulary"])  # logits are float32 for all dtypes of the model


def _moved_blocks(s: Spec, item: int) -> KernelWork:
    return KernelWork(2 * _pages(s, item))


def _digest_blocks(s: Spec, item: int) -> KernelWork:
    return KernelWork(_pages(s, item))


def _pages(s: Spec, item: int) -> int:
    return s["blocks"] * s["layers"] * 2 * s["kv_heads"] * s["block_tokens"] * s["head_dim"] * item


_WORK: Mapping[str, Callable[[Spec, int], KernelWork]] = MappingProxyType(
    {
        "decode_attention": _decode,
        "decode_int8": _coded_decode,
        "decode_fp8": _coded_decode,
        "prefill_attention": _prefill,
        "latent_decode": _latent_decode,
        "add_rms_norm": _add_rms_norm,
        "silu_mul": _silu_mul,
        "place_qkv": _place_qkv,
        "embedding": _take_rows,
        "gather_rows": _take_rows,
        "sample": _logits,
        "log_probabilities": _logits,
        "gather_blocks": _moved_blocks,
        "scatter_blocks": _moved_blocks,
        "digest_blocks": _digest_blocks,
    }
)
OPERATIONS = tuple(_WORK)
_BLOCK_OPERATIONS = OPERATIONS[-3:]


def _specs(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    decode: Sequence[tuple[int, int]],
    prefill: Sequence[tuple[int, int]],
    latent: Sequence[tuple[int, int, int]],
    of_latent: Mapping[str, int],
    rows: Sequence[int],
    hidden: int,
    intermediate: int,
    vocabulary: int,
    sampled: int,
    blocks: tuple[int, int],
) -> tuple[Spec, ...]:
    of_heads = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": 16}
    pages = {"blocks": blocks[0], "layers": blocks[1], "kv_heads": kv_heads, "block_tokens": 16, "head_dim": head_dim}
    logits = {"rows": sampled, "vocabulary": vocabulary}
    return (
        *(
            Spec.of(op, batch=batch, context=context, **of_heads)
            for op in ("decode_attention", "decode_int8", "decode_fp8")
            for batch, context in decode
        ),
        *(Spec.of("prefill_attention", tokens=now, history=before, **of_heads) for now, before in prefill),
        *(
            Spec.of("latent_decode", batch=batch, context=context, heads=count, **of_latent, block_tokens=16)
            for batch, context, count in latent
        ),
        *(Spec.of("add_rms_norm", rows=count, columns=hidden) for count in rows),
        *(Spec.of("silu_mul", rows=count, columns=intermediate) for count in rows),
        *(Spec.of("place_qkv", rows=count, **of_heads) for count in rows),
        Spec.of("embedding", rows=rows[-1], columns=hidden, vocabulary=vocabulary),
        Spec.of("gather_rows", rows=sampled, columns=hidden, vocabulary=rows[-1]),
        Spec.of("sample", **logits, top_k=0, top_p_percent=100),
        Spec.of("sample", **logits, top_k=50, top_p_percent=90),
        Spec.of("log_probabilities", **logits),
        *(Spec.of(op, **pages) for op in _BLOCK_OPERATIONS),
    )


SERVED = _specs(
    heads=32,
    kv_heads=8,
    head_dim=128,
    decode=[(batch, context) for batch in (1, 64) for context in (4096, 16384, 32768)],
    prefill=[(2048, 0), (8192, 0), (512, 8192)],
    latent=[(64, 4096, 128), (64, 16384, 128), (64, 16384, 16)],
    of_latent={"rank": 512, "rotated": 64, "plain": 128, "value": 128},
    rows=(512, 2048, 8192, 32768),
    hidden=4096,
    intermediate=14336,
    vocabulary=128256,
    sampled=64,
    blocks=(64, 32),
)
"""Shapes of Llama 3.1 8B; row operations transfer both less and more than 16 MB. Latent attention has the shapes of
DeepSeek V3 (128 heads) and V2-Lite (16 heads)."""
SMALL = _specs(
    heads=4,
    kv_heads=2,
    head_dim=16,
    decode=[(1, 20), (3, 33)],
    prefill=[(19, 0), (5, 18)],
    latent=[(3, 12, 20), (2, 50, 5)],
    of_latent={"rank": 24, "rotated": 8, "plain": 12, "value": 10},
    rows=(3,),
    hidden=48,
    intermediate=64,
    vocabulary=200,
    sampled=2,
    blocks=(3, 2),
)
"""Small shapes of the operations in `SERVED`, for tests with Triton's interpreter."""
