"""Targets of the GPU benchmark, judged by one run, and the command that makes the run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.device.coded_rows import linear_rows
from harness.device.gpu_steps import decode_rows
from harness.device.gpu_targets import verdicts
from harness.device.host_timer import HostTimer
from harness.fakes.tape import TapeGraphs

from kvferry.bench.formulas.gpu_work import About, GpuRow, GpuTiming, Rates, Spec, row
from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.gpu.session import Session, about_now
from kvferry.core.clock import ManualClock, SystemClock
from kvferry.core.errors import UnknownModel
from kvferry.engine import build as engine_build
from kvferry.engine.execute.gpu.runner import DeviceRunner
from kvferry.engine.execute.models.transformer import Transformer
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels.coded_weights import CodeKind
from kvferry.kernels.ops import device_ops_for

SCRIPT = Path(__file__).parents[2] / "bench" / "bench_gpu.py"
ABOUT = About("2026-01-01", "abc", "H200", "2.15", "3.9")
SESSION = Session(
    torch.device("cpu"),
    torch.float32,
    HostTimer(SystemClock(), 1),
    Rates(10.0, 1.0),
    about_now("interpreter", ManualClock()),
    (),
    print,
)


def made(
    op: str, milliseconds: float, kernels: str = "triton", num_bytes: int = 10**9, launch: str = "", **sizes: int
) -> GpuRow:
    timing = GpuTiming.of([milliseconds / 1e3])
    work = KernelWork(num_bytes)
    rates = Rates(1000.0, 1.0)
    return row(ABOUT, Spec.of(op, **sizes), work, timing, rates, dtype="bf16", kernels=kernels, launch=launch)


def test_the_worst_shape_decides() -> None:
    rows = [
        made("decode_attention", 1.1, batch=64, context=4096),
        made("decode_attention", 1.25, batch=64, context=32768),
        made("decode_attention", 50.0, batch=1, context=4096),
        made("prefill_attention", 2.0, tokens=2048),
        made("prefill_attention", 1.8, "torch sdpa cudnn", tokens=2048),
        made("prefill_attention", 1.6, "torch sdpa flash", tokens=2048),
        made("prefill_attention", 0.1, "flash-attn", tokens=2048),
        made("prefill_attention", 9.0, tokens=512),
        made("silu_mul", 1.1, rows=7),
        made("silu_mul", 5.0, num_bytes=1 << 20, rows=1),
        made("decode_step llama-3.1-8b", 2.0, launch="graphs", batch=1, context=9),
        made("decode_step llama-3.1-8b", 9.0, launch="without graphs", batch=1, context=9),
        made("decode_step_host llama-3.1-8b", 9.0, num_bytes=0, launch="graphs", batch=1, context=9),
    ]
    decode, prefill, small, step = verdicts(rows)
    assert (decode.worst, decode.at, decode.is_reached) == (pytest.approx(0.8), "batch=64 context=32768", False)
    assert decode.line.startswith("missed ")
    assert (prefill.worst, prefill.at, prefill.is_reached) == (pytest.approx(0.8), "tokens=2048", True)
    assert (small.worst, small.is_reached) == (pytest.approx(0.909, abs=1e-3), True)
    name = "small operations from 16 MB up, share of copy bandwidth"
    assert small.line == f"reached       {name}: 0.91 (target 0.85) at rows=7"
    assert (step.worst, step.is_reached) == (0.5, False)


def test_a_target_without_measurements_is_not_reached() -> None:
    for verdict in verdicts([]):
        assert not verdict.is_reached
        assert verdict.line.startswith("not measured  ")


def test_steps_of_an_engine_become_rows() -> None:
    one, two = decode_rows(SESSION, SystemClock(), model="tiny", batches=(1, 2), context=20, steps=3)
    assert (one.op, one.shape, one.n) == ("decode_step tiny", "batch=1 context=20", 3)
    # The middle one of three steps has 22 tokens of context per sequence: 22 or 44 in all. All weights are read once
    # for any batch.
    assert two.bytes - one.bytes == 22 * (2 * 2 * 2 * 16 * 4)
    assert one.ms > 0
    with pytest.raises(UnknownModel):
        next(decode_rows(replace(SESSION), SystemClock(), model="nobody", batches=(1,), context=20, steps=3))


def test_steps_with_graphs_stand_beside_steps_without_and_the_host_s_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(
        model: Transformer, kv: PagedKv, *, max_sequences: int, cuda_graphs: str, runs_ahead: bool
    ) -> DeviceRunner:
        return DeviceRunner(
            model, kv, device_ops_for("cpu", "triton"), max_sequences=max_sequences, graphs=TapeGraphs()
        )

    monkeypatch.setattr(engine_build, "build_runner", build)
    rows = list(decode_rows(SESSION, SystemClock(), model="tiny", batches=(2,), context=9, steps=2))
    assert [(r.op, r.launch, r.n) for r in rows] == [
        (op, launch, 2)
        for launch in ("graphs", "without graphs")
        for op in ("decode_step tiny", "decode_step_host tiny")
    ]
    for step, host in (rows[:2], rows[2:]):
        assert 0 < host.ms <= step.ms
        assert host.bytes == 0 < step.bytes


@pytest.mark.parametrize("only", [(), ("--only", "kernels")])
def test_without_a_gpu_the_command_fails_with_the_reason(only: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--csv", str(tmp_path / "gpu.csv"), *only],
        capture_output=True,
        text=True,
        timeout=120,
        env={"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["no GPU: torch detects none, so nothing was measured"]
    assert not (tmp_path / "gpu.csv").exists()


def test_projections_with_codes_are_measured_beside_16_bits() -> None:
    rows = list(linear_rows(SESSION, matrices=((32, 256),), counts=(1, 3)))
    assert [row.op for row in rows[:4]] == ["linear_w4a16", "linear_w8a16", "linear_fp8", "linear_16bit"]
    assert len(rows) == 8
    four, eight, fp8, plain = (row.bytes for row in rows[:4])
    assert four < eight < fp8 < plain
    assert all("rows=16" in row.launch for row in rows if row.op != "linear_16bit")


def test_decode_steps_with_codes_read_fewer_bytes() -> None:
    coded, plain = (
        next(decode_rows(SESSION, SystemClock(), model="tiny", batches=(1,), context=9, steps=1, codes=codes))
        for codes in (CodeKind.INT4, None)
    )
    assert coded.op == "decode_step tiny W4A16"
    assert coded.bytes < plain.bytes
