"""The kernel benchmark in Triton's interpreter: which cases are run and skipped, its rows, and its tuning. No speed is
tested.
"""

import csv
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from harness.device.host_timer import HostTimer

from kvferry.bench.formulas.gpu_work import OPERATIONS, SMALL, GpuTiming, Rates, Spec
from kvferry.bench.formulas.launch_choice import TUNABLE, Tunable
from kvferry.bench.gpu import cases, kernels, tuner
from kvferry.bench.gpu.cases import differs, make_case
from kvferry.bench.gpu.session import Session, about_now, on_gpu
from kvferry.bench.gpu.timing import Action, rates_of
from kvferry.bench.rows import append_csv
from kvferry.cli.main import main
from kvferry.core.clock import ManualClock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.kernels.gpu import launch

CPU = torch.device("cpu")


def session(
    lines: list[str], specs: tuple[Spec, ...] = SMALL, timer: Callable[[Action], GpuTiming] | None = None
) -> Session:
    return Session(
        CPU,
        torch.float32,
        timer or HostTimer(SystemClock(), 1),
        Rates(10.0, 1.0),
        about_now("interpreter", ManualClock()),
        specs,
        lines.append,
    )


def test_every_operation_runs_and_its_peers_compute_the_same(tmp_path: Path) -> None:
    lines: list[str] = []
    shown: list[str] = []
    file = tmp_path / "results" / "gpu.csv"
    rows = kernels.run(session(lines), (), shown.append, csv_file=file)
    assert lines == [], "each peer gives the kernels' result, so none is left out"
    assert tuple(dict.fromkeys(row.op for row in rows)) == OPERATIONS
    assert sum(row.kernels == "triton" for row in rows) == len(SMALL)
    assert {row.op for row in rows if row.kernels == "torch sdpa"} == {"decode_attention", "prefill_attention"}
    with_torch = {row.op for row in rows if row.kernels == "torch"}
    alone = {"decode_attention", "decode_int8", "decode_fp8", "prefill_attention", "digest_blocks"}
    assert with_torch == set(OPERATIONS) - alone
    for row in rows:
        assert row.ms > 0
        assert bool(row.launch) == (row.kernels == "triton")
    assert len(shown) == len(rows)
    decode = next(row for row in rows if row.op == "decode_attention")
    assert decode.launch == (
        "attend_small: rows=8 keys=8 partition=16 warps=1 stages=1; merge_parts: block=2 warps=1 stages=1"
    )
    append_csv(file, [asdict(rows[0])])
    written = list(csv.DictReader(file.read_text().splitlines()))
    assert len(written) == len(rows) + 1
    assert (written[0]["gpu"], written[0]["op"]) == ("interpreter", "decode_attention")
    assert {"commit", "torch", "triton", "ms_10", "ms_90", "share_of_bound"} <= written[0].keys()


def test_operations_can_be_named_and_unknown_ones_are_refused() -> None:
    rows = kernels.run(session([]), ("silu_mul",), lambda _: None)
    assert {row.op for row in rows} == {"silu_mul"}
    with pytest.raises(UsageError, match="unknown operation 'fly'; expected one of decode_attention, "):
        kernels.run(session([]), ("fly",), lambda _: None)


def test_a_peer_with_other_results_or_an_error_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (spec,) = (s for s in SMALL if s.op == "silu_mul")

    def fails() -> Action:
        raise RuntimeError("no kernel image\nand a long story")

    def absent() -> Action:
        raise ModuleNotFoundError("nobody")

    def with_bad_peers(spec: Spec, device: torch.device, dtype: torch.dtype) -> cases.Case:
        case = make_case(spec, device, dtype)
        zeros = torch.zeros(spec["rows"], spec["columns"])
        return replace(case, peers={"zeros": lambda: lambda: zeros, "broken": fails, "absent": absent})

    monkeypatch.setattr(kernels, "make_case", with_bad_peers)
    lines: list[str] = []
    (row,) = kernels.measure([spec], session(lines))
    assert row.kernels == "triton"
    assert [text.partition(" left out: ")[0].split()[-1] for text in lines] == ["zeros", "broken"]
    assert "exceeds the tolerance" in lines[0]
    assert lines[1].endswith("broken left out: no kernel image")


def test_results_differ_beyond_the_precision_of_their_type() -> None:
    one = torch.tensor([1.0, 2.0])
    assert differs(one, one) is None
    assert differs(one + 1e-6, one) is None
    assert differs(one + 1e-2, one) is not None
    assert differs((one + 1e-2).bfloat16(), one) is None, "within the precision of bfloat16"
    assert differs(one[:1], one) == "(1,) instead of (2,)"
    assert differs(torch.tensor([1, 2]), torch.tensor([1, 3])) == "1 of 2 numbers differ"
    assert differs(one * torch.nan, one) is not None


class Favourite:
    """A timer for which one value of `block` is the fastest; a launch choice takes longer the further it is from this
    value.
    """

    def __init__(self, op: str, size: int) -> None:
        self.op, self.size = op, size

    def __call__(self, action: Action) -> GpuTiming:
        action()
        chosen = launch.choose(self.op, CPU)
        size = chosen.sizes["block"]
        return GpuTiming.of([1.0 + abs(size - self.size)])


def test_the_tuner_finds_the_fastest_launch_choice_and_writes_it_to_the_table(tmp_path: Path) -> None:
    lines: list[str] = []
    specs = tuple(s for s in SMALL if s.op == "silu_mul")
    grids = {"silu_mul": Tunable(("silu_mul",), {"block": (8, 16, 32, 64)})}
    (won,) = tuner.tune(specs, session(lines, specs, Favourite("silu_mul", 16)), grids)
    assert (won.key, dict(won.sizes)) == (("silu_mul", "interpreter", "any"), {"block": 16})
    assert won.why.startswith("measured on interpreter, torch ")
    assert "17.00 times as fast as block=32 warps=1 stages=1" in won.why
    assert lines == ["silu_mul interpreter any: block=32 warps=1 stages=1 -> block=16 warps=1 stages=1"]
    table = tmp_path / "launch.toml"
    table.write_bytes(launch.TABLE.read_bytes())
    tuner.rewrite(table, [won])
    after = {row.key: row for row in launch.read(table)}
    assert after.pop(won.key) == won
    assert after == {key: row for key, row in launch.table().items() if key != won.key}


def test_a_choice_that_gives_wrong_results_or_fails_is_never_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    specs = tuple(s for s in SMALL if s.op == "silu_mul")

    def broken(spec: Spec, device: torch.device, dtype: torch.dtype) -> cases.Case:
        case = make_case(spec, device, dtype)

        def make() -> Action:
            size = launch.choose("silu_mul", device).sizes["block"]
            if size == 16:
                raise RuntimeError("out of resources")
            action = case.make()
            return action if size == 32 else lambda: action() + 1

        return replace(case, make=make)

    monkeypatch.setattr(tuner, "make_case", broken)
    grids = {"silu_mul": Tunable(("silu_mul",), {"block": (8, 16)})}
    assert tuner.tune(specs, session(lines, specs, Favourite("silu_mul", 8)), grids) == []
    assert lines == ["silu_mul interpreter any: block=32 warps=1 stages=1 -> stays"]


def test_a_second_kernel_of_an_operation_is_tuned_and_rows_name_both_launch_choices() -> None:
    lines: list[str] = []
    specs = tuple(s for s in SMALL if s.op == "decode_attention")
    grids = {"merge_parts": Tunable(("decode_attention",), {"block": (2, 4)})}
    won = tuner.tune(specs, session(lines, specs, Favourite("merge_parts", 4)), grids)
    assert [row.key for row in won] == [("merge_parts", "interpreter", "any")]
    with launch.trial(won):
        (first, *_) = kernels.measure(specs[:1], session(lines, specs))
    assert first.launch.endswith("merge_parts: block=4 warps=1 stages=1")


def test_a_trial_overrides_launch_choices_while_it_is_active_and_records_lookups() -> None:
    before = launch.choose("silu_mul", CPU)
    outer, inner = replace(before, warps=2), replace(launch.choose("rotate", CPU), warps=3)
    with launch.trial([outer]) as first, launch.trial([inner]) as launches:
        assert launch.choose("silu_mul", CPU) == outer
        assert launch.choose("rotate", CPU, "d64") != inner, "the row applies to keys without a head size only"
        assert launch.choose("rotate", CPU) == inner
        assert launches == {
            ("silu_mul", "interpreter", "any"), ("rotate", "interpreter", "d64"), ("rotate", "interpreter", "any")
        }  # fmt: skip
        assert first == set()
    assert launch.choose("silu_mul", CPU) == before


def test_bounds_are_measured_by_a_copy_and_a_product() -> None:
    rates = rates_of(CPU, lambda action: GpuTiming.of([0.5 if action().ndim == 1 else 0.25]), copy_bytes=1000, side=10)
    assert rates == Rates(2 * 1000 / 0.5 / 1e9, 2 * 10**3 / 0.25 / 1e12)


def test_all_tunable_operations_are_tuned_on_a_copy_of_the_table_and_then_measured(tmp_path: Path) -> None:
    lines: list[str] = []
    table = tmp_path / "launch.toml"
    table.write_bytes(launch.TABLE.read_bytes())
    specs = tuple(s for s in SMALL if s.op in {"log_probabilities", "embedding", "gather_rows"})
    slow = session(lines, specs, lambda action: GpuTiming.of([1.0 if action() is not None else 0.0]))
    rows = kernels.run(slow, (), lambda _: None, tune=True, table=table)
    assert [row.op for row in rows if row.kernels == "triton"] == ["embedding", "gather_rows", "log_probabilities"]
    assert lines == [
        "take_rows interpreter any: block=32 warps=1 stages=1 -> stays",
        "log_probabilities interpreter any: chunk=128 warps=1 stages=1 -> stays",
        "0 rows of launch.toml are new",
    ]
    assert launch.read(table) == launch.read(launch.TABLE), "no other choice is faster"


def test_a_table_that_cannot_be_written_is_reported_before_a_trial_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tune writes launch\.toml, which is read-only here"):
        kernels.run(session([]), (), print, tune=True, table=tmp_path / "missing" / "launch.toml")


def test_every_measured_operation_can_be_tuned() -> None:
    assert {op for tunable in TUNABLE.values() for op in tunable.ops} == set(OPERATIONS)


def test_the_command_reports_a_missing_gpu() -> None:
    with pytest.raises(UsageError, match="the speed of interpreted kernels is meaningless"):
        on_gpu(CPU, ManualClock(), say=lambda _: None)
    for flag in (("--tune",), ("--csv", "x.csv"), ("--op", "sample")):
        done = CliRunner().invoke(main, ["bench", "kernels", "--device", "cpu", *flag])
        assert done.exit_code == 2
        assert f"{flag[0]} is only supported with GPU kernels" in done.output
