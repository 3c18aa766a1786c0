"""GPU performance targets, each for a ratio of two measurements of the same run, and their evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.formulas.gpu_work import GpuRow
from kvferry.kernels.coded_weights import CodeKind

OURS = "triton"
_LARGE_BYTES = 16 << 20
_PLAIN = "without graphs"
"""Label of steps without CUDA graphs, measured only for comparison with captured steps."""
_SMALL_OPS = ("add_rms_norm", "silu_mul", "place_qkv")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result for one performance target."""

    name: str
    worst: float | None
    """The lowest ratio over all shapes; `None` if it was not measured."""
    target: float
    at: str = ""
    """Shape with the lowest ratio; empty if it was not measured."""

    @property
    def is_reached(self) -> bool:
        """Whether the ratio was measured and reaches the target."""
        return self.worst is not None and self.worst >= self.target

    @property
    def line(self) -> str:
        """Format the result as one line of text."""
        if self.worst is None:
            return f"not measured  {self.name} (target {self.target:.2f})"
        outcome = "reached" if self.is_reached else "missed"
        return f"{outcome:<12}  {self.name}: {self.worst:.2f} (target {self.target:.2f}) at {self.at}"


def verdicts(rows: Sequence[GpuRow]) -> list[Verdict]:
    """Evaluate all targets with the rows of a run."""
    ours = [row for row in rows if row.kernels == OURS]
    decode = [row for row in ours if row.op == "decode_attention" and "batch=64 " in row.shape]
    small = [row for row in ours if row.op in _SMALL_OPS and row.bytes >= _LARGE_BYTES]
    steps = [row for row in ours if row.op.startswith("decode_step ") and row.launch != _PLAIN and not _is_coded(row)]
    prefill = [
        (best / row.ms, row)
        for row in ours
        if row.op == "prefill_attention" and (best := _best_of_torch(rows, row)) is not None
    ]
    return [
        _worst("paged decode attention, share of copy bandwidth", 0.85, [(r.gbps / r.copy_gbps, r) for r in decode]),
        _worst("prefill attention, relative to the fastest of torch", 0.75, prefill),
        _worst(
            "small operations from 16 MB up, share of copy bandwidth",
            0.85,
            [(r.gbps / r.copy_gbps, r) for r in small],
        ),
        _worst("decode step, share of its roofline bound", 0.8, [(r.share_of_bound, r) for r in steps]),
    ]


def _is_coded(row: GpuRow) -> bool:
    """Return whether a row is of a step with coded weights, which has no target."""
    return any(row.op.endswith(f" {kind.value}") for kind in CodeKind)


def _best_of_torch(rows: Sequence[GpuRow], ours: GpuRow) -> float | None:
    same = (ours.op, ours.shape)
    return min((r.ms for r in rows if (r.op, r.shape) == same and r.kernels.startswith("torch sdpa")), default=None)


def _worst(name: str, target: float, ratios: Sequence[tuple[float, GpuRow]]) -> Verdict:
    if not ratios:
        return Verdict(name, None, target)
    worst, row = min(ratios, key=lambda pair: pair[0])
    return Verdict(name, worst, target, row.shape)
