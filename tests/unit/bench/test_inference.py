"""The benchmarks of one engine: their counts, and the format that scripts read."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.inference import Bench, BenchmarkReport, mixed_shapes
from kvferry.bench.products import FORMS, ROWS
from kvferry.bench.roofline import MachineRates, step_work
from kvferry.cli.main import main
from kvferry.core.clock import SystemClock
from kvferry.core.errors import UsageError
from kvferry.engine.execute.models.build import level_of
from kvferry.engine.offline.llm import LLM
from kvferry.model import tiny

TINY = ("--model", "tiny", "--threads", "1", "--kv-memory", "8MiB")


def test_a_steps_bound_is_the_longer_of_bytes_and_operations() -> None:
    machine = MachineRates(read_gbps=10.0, gflops=100.0, threads=1, level="")
    assert machine.seconds(KernelWork(20 * 10**9, 50 * 10**9)) == pytest.approx(2.0)
    assert machine.seconds(KernelWork(10**9, 300 * 10**9)) == pytest.approx(3.0)


def test_a_steps_work_by_hand() -> None:
    config = tiny.config()
    # Weights per layer: q 64 x 48, k and v 32 x 48 each, o 48 x 64, and three of 112 x 48. Two layers; head 259 x 48.
    linear, head = 2 * (64 * 48 + 2 * 32 * 48 + 48 * 64 + 3 * 112 * 48), 259 * 48
    work = step_work(config, weight_bytes=1000, kv_token_bytes=10, rows=3, seen=6, context=7, sampled=1)
    assert work.num_bytes == 1000 + 70
    assert work.flops == 2 * 3 * linear + 2 * head + 4 * 2 * 4 * 16 * 6


def test_the_level_is_that_of_compiled_kernels_alone() -> None:
    assert level_of("compiled-avx2") == "avx2"
    assert level_of("torch") == ""


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_rates_and_bounds_come_out_of_real_steps(kernels: str) -> None:
    bench = Bench(LLM("tiny", kv_memory=8 << 20, kernels=kernels, threads=1), 1, SystemClock())
    seen: list[int] = []
    run = bench.latency(3, (20, 6), 1, lambda: seen.append(1))
    assert len(seen) == 2, "the callback runs for the warm-up and for the measured round"
    assert (run.batch, run.input_tokens, run.output_tokens) == (3, 20, 6)
    assert run.ttft_ms > 0
    assert run.least <= run.tokens_per_second <= run.most
    assert run.share_of_bound == pytest.approx(run.tokens_per_second / run.bound_tokens_per_second)
    whole = bench.throughput(mixed_shapes(4), 1, lambda: None)
    report = BenchmarkReport((run, whole), bench.machine()).as_json()
    assert isinstance(report["machine"], dict)
    assert report["machine"]["read_gbps"] > 0


def test_the_phases_of_a_step_are_reported() -> None:
    bench = Bench(LLM("tiny", kv_memory=8 << 20, kernels="compiled", threads=1), 1, SystemClock())
    phases = bench.phases((9, 6), 2)
    assert {"qkv", "attend", "gate_up", "down", "head"} <= phases.keys()
    others = {"route", "plan_experts", "gather", "expert_gate_up", "expert_down", "combine"}
    others |= {"latent_rows", "query_up", "split_queries", "absorb", "value_up", "attended_rows"}
    others |= {"meet", "embedded"}
    others |= {name for name in phases if name.startswith("shrink_")}
    assert all(ms > 0 for name, ms in phases.items() if name not in {"embed", *others})
    assert all(phases[name] == 0 for name in others), "the model has no adapters, experts, latent attention or ranks"
    slow = Bench(LLM("tiny", kv_memory=8 << 20, kernels="torch", threads=1), 1, SystemClock())
    with pytest.raises(UsageError, match="only the compiled kernels report"):
        slow.phases((9, 6), 2)


def test_mixed_sizes_stay_within_the_limits() -> None:
    shapes = mixed_shapes(64)
    assert {min(i for i, _ in shapes), max(i for i, _ in shapes)} == {32, 512}
    assert {min(o for _, o in shapes), max(o for _, o in shapes)} == {16, 128}


def test_the_files_have_the_public_shape(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    arguments = ["bench", "latency", "--batch", "2", "--input-tokens", "9", "--output-tokens", "3", "--rounds", "1"]
    done = CliRunner().invoke(main, [*arguments, *TINY, "--json", str(out)])
    assert done.exit_code == 0, done.output
    (run,) = json.loads(out.read_text())["runs"]
    assert {"batch", "input_tokens", "output_tokens", "ttft_ms", "itl_ms", "tokens_per_second"} <= run.keys()
    assert {"bound_tokens_per_second", "share_of_bound"} <= run.keys()
    assert run["itl_ms"].keys() == {"p50", "p90", "p99"}
    assert {"read_gbps", "bf16_gflops", "threads"} <= json.loads(out.read_text())["machine"].keys()


def test_every_form_and_number_of_rows_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    # The inputs of the matrices must fill whole blocks of codes; those of the tiny model do not.
    done = CliRunner().invoke(main, ["bench", "kernels", "--threads", "1", "--rounds", "1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * len(FORMS) * len(ROWS)
    assert rows[0].keys() == {"op", "shape", "dtype", "ms", "bytes", "flops", "share_of_bound"}


def test_without_compiled_kernels_the_command_is_refused() -> None:
    done = CliRunner().invoke(main, ["bench", "kernels", "--kernels", "torch"])
    assert done.exit_code == 2
    assert "only compiled kernels can be measured" in done.output
