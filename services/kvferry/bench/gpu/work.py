"""What a GPU kernel cannot do without, by formula: which shapes are measured, their bytes and operations, their rows.

    bound of a kernel = the longer of  bytes / rate of a copy  and  operations / rate of a matrix product

Both rates are measured in the same run. A value that must be read counts once, however often a kernel reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.bench.work import Work


@dataclass(frozen=True, slots=True)
class Spec:
    """One operation in one shape."""

    op: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, op: str, **sizes: int) -> "Spec":
        """A spec that nobody changes."""
        return cls(op, MappingProxyType(sizes))

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def shape(self) -> str:
        """As it stands in a row."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at most."""

    gbps: float
    """10^9 bytes a second, read and written, of a large copy."""
    tflops: float
    """10^12 operations a second of a large matrix product."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one action, run again and again."""

    median: float
    low: float
    """Seconds that a tenth of the runs stayed below."""
    high: float
    """Seconds that nine tenths stayed below."""
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """Of at least one run."""
        ordered, last = sorted(seconds), len(seconds) - 1
        low, median, high = (ordered[round(share * last)] for share in (0.1, 0.5, 0.9))
        return cls(median, low, high, len(ordered))


@dataclass(frozen=True, slots=True)
class About:
    """What a run's rows have in common."""

    date: str
    commit: str
    gpu: str
    torch: str
    triton: str


@dataclass(frozen=True, slots=True)
class Row:
    """One measured action, as it stands in the CSV."""

    date: str
    commit: str
    gpu: str
    torch: str
    triton: str
    op: str
    shape: str
    dtype: str
    kernels: str
    """Whose: `triton` are kvferry's own, `torch` and what follows is somebody else's."""
    ms: float
    """Median."""
    ms_10: float
    ms_90: float
    n: int
    bytes: int
    flops: int
    gbps: float
    tflops: float
    copy_gbps: float
    """Measured in the same run, as the next."""
    matmul_tflops: float
    share_of_bound: float
    launch: str
    """Block sizes, warps and stages; empty where they are not ours."""


def row(
    about: About, spec: Spec, work: Work, timing: Timing, rates: Rates, *, dtype: str, kernels: str, launch: str
) -> Row:
    """The row of one measured action."""
    seconds = timing.median
    return Row(
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


def work_of(spec: Spec, itemsize: int) -> Work:
    """Bytes and operations of a spec.

    Args:
        spec: of an operation among `OPERATIONS`.
        itemsize: bytes of a value.
    """
    return _WORK[spec.op](spec, itemsize)


def _decode(s: Spec, item: int) -> Work:
    return _attention(s, item, rows=s["batch"], keys=s["batch"] * s["context"], seen=s["batch"] * s["context"])


def _prefill(s: Spec, item: int) -> Work:
    tokens, history = s["tokens"], s["history"]
    return _attention(s, item, rows=tokens, keys=history + tokens, seen=tokens * history + tokens * (tokens + 1) // 2)


def _attention(s: Spec, item: int, *, rows: int, keys: int, seen: int) -> Work:
    dim = s["head_dim"]
    return Work(item * dim * (2 * s["kv_heads"] * keys + 2 * s["heads"] * rows), 4 * s["heads"] * dim * seen)


def _add_rms_norm(s: Spec, item: int) -> Work:
    return Work(item * (4 * s["rows"] + 1) * s["columns"])


def _silu_mul(s: Spec, item: int) -> Work:
    return Work(item * 3 * s["rows"] * s["columns"])


def _place_qkv(s: Spec, item: int) -> Work:
    values = (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"]
    return Work(s["rows"] * (2 * item * values + 8 * s["head_dim"] + 8))


def _take_rows(s: Spec, item: int) -> Work:
    return Work(s["rows"] * (2 * item * s["columns"] + 8))


def _logits(s: Spec, item: int) -> Work:
    return Work(4 * s["rows"] * s["vocabulary"])  # float32 whatever the model's type


def _copy_blocks(s: Spec, item: int) -> Work:
    return Work(2 * _pages(s, item))


def _digest_blocks(s: Spec, item: int) -> Work:
    return Work(_pages(s, item))


def _pages(s: Spec, item: int) -> int:
    return s["blocks"] * s["layers"] * 2 * s["kv_heads"] * s["block_tokens"] * s["head_dim"] * item


_WORK: Mapping[str, Callable[[Spec, int], Work]] = MappingProxyType(
    {
        "decode_attention": _decode,
        "prefill_attention": _prefill,
        "add_rms_norm": _add_rms_norm,
        "silu_mul": _silu_mul,
        "place_qkv": _place_qkv,
        "embedding": _take_rows,
        "gather_rows": _take_rows,
        "sample": _logits,
        "log_probabilities": _logits,
        "copy_blocks": _copy_blocks,
        "gather_blocks": _copy_blocks,
        "scatter_blocks": _copy_blocks,
        "digest_blocks": _digest_blocks,
    }
)
OPERATIONS = tuple(_WORK)
_BLOCK_OPERATIONS = OPERATIONS[-4:]


def _specs(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    decode: Sequence[tuple[int, int]],
    prefill: Sequence[tuple[int, int]],
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
        *(Spec.of("decode_attention", batch=batch, context=context, **of_heads) for batch, context in decode),
        *(Spec.of("prefill_attention", tokens=now, history=before, **of_heads) for now, before in prefill),
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
    rows=(512, 2048, 8192, 32768),
    hidden=4096,
    intermediate=14336,
    vocabulary=128256,
    sampled=64,
    blocks=(64, 32),
)
"""Shapes of Llama 3.1 8B; operations on rows move from 16 MB or less up."""
SMALL = _specs(
    heads=4,
    kv_heads=2,
    head_dim=16,
    decode=[(1, 20), (3, 33)],
    prefill=[(19, 0), (5, 18)],
    rows=(3,),
    hidden=48,
    intermediate=64,
    vocabulary=200,
    sampled=2,
    blocks=(3, 2),
)
"""The same operations in shapes that Triton's interpreter computes in a moment, for tests."""
