"""The comparison of engines: its requests, its rows, and child processes that fail."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.bench.roofline import MachineRates
from kvferry.core.clock import SystemClock

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from peers import report, run  # noqa: E402
from peers.arrivals import Arrivals  # noqa: E402
from peers.bounds import decode_share, prefill_share  # noqa: E402
from peers.cells import Outcome, Request, Trial, cells, wrong_counts  # noqa: E402
from peers.engines import ENGINES, engine_command  # noqa: E402
from peers.protocol import Child, EngineFailed, last_line  # noqa: E402
from peers.report import Measured  # noqa: E402

ADAPTER = """
import os, sys, time
def start(settings):
    print("noise that is no answer")
    while time.process_time() < 0.05:
        pass  # so that the process has used processor time
    if settings["fault"] == "start":
        raise RuntimeError("no such model")
    def serve(requests):
        if settings["fault"] == "silence":
            time.sleep(60)
        if settings["fault"] == "death":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(9)
        tokens = sum(len(r["tokens"]) for r in requests)
        return {"seconds": 2.0, "first_seconds": 0.5, "input_tokens": tokens, "output_tokens": 3}
    return serve, {"version": "1"}
"""
REQUEST = Request((1, 2, 3), 3)


@pytest.mark.parametrize("name", cells())
def test_all_engines_get_the_same_requests_and_none_twice(name: str) -> None:
    cell = cells()[name]
    assert cell.trials(3) == cell.trials(3)
    seen: set[tuple[int, ...]] = set()
    for round_ in range(3):
        for trial in cell.trials(round_).values():
            for request in trial.timed:
                assert request.tokens not in seen
                seen.add(request.tokens)
                assert all(500 <= token < 40_000 for token in request.tokens)


def test_the_shapes_are_the_documented_ones() -> None:
    known = cells()
    (decode,) = known["decode-1"].trials(1)["decode-1"].timed
    assert (len(decode.tokens), decode.new_tokens) == (32, 128)
    for length in (1024, 4096):
        (prompt,) = known[f"prefill-{length}"].trials(1)[f"prefill-{length}"].timed
        assert (len(prompt.tokens), prompt.new_tokens) == (length, 1)
    batch = known["batch-64"].trials(1)["batch-64"].timed
    assert len(batch) == 64
    assert all(32 <= len(r.tokens) <= 512 and 16 <= r.new_tokens <= 128 for r in batch)
    assert len({len(r.tokens) for r in batch}) > 30


def test_cold_and_warm_are_as_much_work_but_for_the_prefix() -> None:
    trials = cells()["prefix-16"].trials(2)
    cold, warm = trials["prefix-16 cold"], trials["prefix-16 warm"]
    assert [(len(r.tokens), r.new_tokens) for r in cold.timed] == [(1056, 32)] * 16
    assert [(len(r.tokens), r.new_tokens) for r in warm.timed] == [(1056, 32)] * 16
    assert len({r.tokens[:1024] for r in cold.timed}) == 16
    assert {r.tokens[:1024] for r in warm.timed} == {warm.before[0].tokens[:1024]}
    assert len({r.tokens[1024:] for r in (*warm.timed, *warm.before)}) == 17
    assert not cold.before


def test_rates_are_computed_from_outcomes() -> None:
    known = cells()
    outcome = Outcome(seconds=3.0, first_seconds=1.0, input_tokens=300, output_tokens=9)
    assert known["decode-1"].rates(outcome) == {"": 4.0}
    assert known["prefill-1024"].rates(outcome) == {"": 100.0}
    assert known["batch-64"].rates(outcome) == {"": 3.0}
    times = Outcome(20.0, 0.1, 0, 0, ttft=[0.1, 0.2, 0.9], tpot=[0.01, 0.02, 0.03])
    assert known["poisson-2"].rates(times) == {" TTFT p50": 200.0, " TTFT p99": 900.0, " TPOT p50": 20.0}


def test_requests_that_come_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("peers.arrivals.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    requests = [{"tokens": [1, 2], "new_tokens": 3, "at": 2.0}, {"tokens": [1], "new_tokens": 1, "at": 0.0}]
    arrivals = Arrivals(requests)
    assert arrivals.due() == [(1, requests[1])]
    sleep(0.5)
    arrivals.drew(1)
    assert not arrivals.are_all_here
    assert arrivals.due() == []
    arrivals.rest()
    assert arrivals.due() == [(0, requests[0])]
    assert arrivals.are_all_here
    sleep(1.0)
    arrivals.drew(0, 1)
    arrivals.drew(0, 0)
    sleep(1.0)
    arrivals.drew(0, 2)
    assert arrivals.drawn(0) == 3
    outcome = arrivals.outcome()
    assert (outcome["seconds"], outcome["first_seconds"], outcome["input_tokens"], outcome["output_tokens"]) == (
        4.0,
        0.5,
        3,
        4,
    )
    assert (outcome["ttft"], outcome["tpot"]) == ([0.5, 1.0], [0.5])


def test_an_engine_that_counts_tokens_differently_is_detected() -> None:
    trial = Trial((REQUEST, REQUEST))
    assert wrong_counts(trial, Outcome(1.0, 1.0, 6, 6)) == ""
    assert "6 tokens in and 5 out where 6 and 6" in wrong_counts(trial, Outcome(1.0, 1.0, 6, 5))
    assert wrong_counts(trial, Outcome(1.0, 1.0, 7, 6))


def test_shares_of_the_bounds() -> None:
    bounds = MachineRates(read_gbps=1.0, gflops=1000.0, threads=2, level="")
    assert decode_share(50.0, 10_000_000, bounds) == pytest.approx(0.5)
    assert prefill_share(1000.0, 100, 2e10, bounds) == pytest.approx(0.2)


def test_rows_have_medians_ranges_and_ratios_within_rounds() -> None:
    measured = [
        Measured(round_, "decode-1", engine, "16-bit", value, share)
        for round_, engine, value, share in (
            (1, "vllm-bf16", 10.0, 0.1),
            (1, "kvferry-bf16", 30.0, 0.3),
            (2, "kvferry-bf16", 40.0, 0.4),
            (2, "vllm-bf16", 40.0, 0.2),
            (3, "vllm-bf16", 20.0, 0.3),
            (3, "kvferry-bf16", 40.0, 0.5),
        )
    ]
    ours, theirs = report.rows(measured, ["kvferry-bf16", "vllm-bf16"])
    assert (ours.engine, ours.median, ours.least, ours.most, ours.n) == ("kvferry-bf16", 40.0, 30.0, 40.0, 3)
    assert ours.ours_against_it is None
    assert theirs.median == 20.0
    assert theirs.share_of_bound == 0.2
    assert theirs.ours_against_it == 2.0  # the median of 3, 1 and 2, not 40 / 20


def test_ratios_need_weights_of_one_class_and_a_common_round() -> None:
    measured = [
        Measured(1, "batch-64", "kvferry-q4", "4-bit", 5.0),
        Measured(1, "batch-64", "vllm-bf16", "16-bit", 5.0),
        Measured(2, "batch-64", "openvino-q4", "4-bit", 5.0),
    ]
    rows = report.rows(measured, ["kvferry-q4", "vllm-bf16", "openvino-q4"])
    assert [row.ours_against_it for row in rows] == [None, None, None]
    assert [row.share_of_bound for row in rows] == [None, None, None]


def test_fast_numerics_have_a_ratio_of_their_own() -> None:
    names = ["kvferry-q4", "kvferry-q4-fast", "llamacpp-q4"]
    measured = [
        Measured(1, "decode-1", name, "4-bit", value) for name, value in zip(names, (6.0, 9.0, 3.0), strict=True)
    ]
    exact, fast, theirs = report.rows(measured, names)
    assert (theirs.ours_against_it, theirs.fast_against_it) == (2.0, 3.0)
    assert exact.ours_against_it is exact.fast_against_it is fast.ours_against_it is fast.fast_against_it is None


def test_the_ratio_of_warm_to_cold_uses_rounds_with_both() -> None:
    measured = [
        Measured(1, "cold", "vllm-bf16", "16-bit", 10.0),
        Measured(1, "warm", "vllm-bf16", "16-bit", 80.0),
        Measured(2, "warm", "vllm-bf16", "16-bit", 90.0),
    ]
    rows = report.rows(report.with_ratios(measured, "warm", "cold", "ratio"), ["vllm-bf16"])
    assert [(r.row, r.median, r.unit, r.n) for r in rows][-1] == ("ratio", 8.0, "times", 1)


def test_the_table_and_the_file_have_every_row(tmp_path: Path) -> None:
    measured = [
        Measured(1, "decode-1", "kvferry-q4", "4-bit", 150.0, 0.5),
        Measured(1, "decode-1", "openvino-q4", "4-bit", 75.0, 0.25),
    ]
    rows = report.rows(measured, ["kvferry-q4", "openvino-q4"])
    table = report.markdown(rows).splitlines()
    assert table[2] == "| decode-1 | kvferry-q4 | 4-bit | 150 (150 to 150) tokens/s | 50 % |  |  |"
    assert table[3].endswith("| 75.0 (75.0 to 75.0) tokens/s | 25 % | 2.00 |  |")
    for _ in range(2):
        report.append_csv(tmp_path / "rows.csv", rows, {"commit": "abc"})
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("commit,row,engine")
    assert lines[1] == lines[3]


def test_the_command_line_lists_every_cell_and_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = run.parse(["--work", str(tmp_path)])
    assert arguments.cells == list(cells())
    assert set(arguments.peers) == {engine.peer for engine in ENGINES} == {"kvferry", "vllm", "openvino", "llamacpp"}
    with pytest.raises(SystemExit):
        run.parse(["--rounds", "0"])
    with pytest.raises(SystemExit):
        run.parse(["--help"])
    assert "prefix-16" in capsys.readouterr().out


def test_every_engine_has_its_adapter() -> None:
    for engine in ENGINES:
        text = (BENCH / "peers" / "adapters" / f"{engine.adapter}.py").read_text()
        assert "def start(settings)" in text
        assert engine.adapter == "kvferry_engine" or "kvferry" not in text


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "odd_engine.py"
    path.write_text(ADAPTER)
    return path


def _child(adapter: Path, fault: str) -> Child:
    command = engine_command(Path(sys.executable), str(adapter.with_suffix("")), {"fault": fault})
    return Child(command, dict(os.environ), adapter.with_suffix(".log"), seconds=30.0, clock=SystemClock())


def test_a_child_answers_and_ends(adapter: Path) -> None:
    child = _child(adapter, "none")
    try:
        assert child.facts == {"version": "1"}
        assert child.ask([REQUEST, REQUEST], 30.0) == Outcome(2.0, 0.5, 6, 3)
        assert child.ask([REQUEST], 30.0).input_tokens == 3
        assert child.cpu_seconds() > 0.0
    finally:
        child.close()
    assert last_line(adapter.with_suffix(".log")) == "noise that is no answer"
    with pytest.raises(EngineFailed):
        child.ask([REQUEST], 1.0)


def test_a_child_that_does_not_start_reports_the_cause(adapter: Path) -> None:
    with pytest.raises(EngineFailed, match="RuntimeError: no such model"):
        _child(adapter, "start")


def test_a_child_that_dies_reports_the_cause(adapter: Path) -> None:
    child = _child(adapter, "death")
    try:
        with pytest.raises(EngineFailed, match="its log ends: out of memory"):
            child.ask([REQUEST], 30.0)
    finally:
        child.close()


def test_a_child_without_output_is_killed_after_a_time_limit(adapter: Path) -> None:
    child = _child(adapter, "silence")
    try:
        with pytest.raises(EngineFailed, match="no answer within 0 s"):
            child.ask([REQUEST], 0.2)
    finally:
        child.kill()


def test_each_message_is_one_line_of_json() -> None:
    command = engine_command(Path("python"), "vllm_engine", {"threads": 2})
    assert json.loads(command[-1]) == {"threads": 2}
    assert command[1] == "-u"  # so that the log of a killed engine is complete
    assert command[2].endswith("child.py")
