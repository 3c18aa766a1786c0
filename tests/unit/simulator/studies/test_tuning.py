"""The search for better settings finds a known optimum, reports the gain of each change, and ends."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.simulator.files.spec import FleetSpec, read_fleet
from kvferry.simulator.studies.tuning import MIN_GAIN, StudyScore, fields_of, tune

SPLIT = """
slo = "ttft=1s,tpot=30ms"
[[role]]
role = "prefill"
replicas = 1
[[role]]
role = "decode"
replicas = 7
[device]
step_ms = 8.0
token_us = 100.0
[workload]
requests = 60
rate = 20.0
num_input = 600
num_output = 20
"""


def a_spec(text: str = SPLIT) -> FleetSpec:
    return read_fleet(text, lambda name: "")


def goodness(spec: FleetSpec) -> StudyScore:
    """Return a smooth function of two settings with its maximum at 4 prefill workers and 128 mixed tokens."""
    prefill, mixed = spec.pool.roles[0].replicas, spec.pool.roles[1].engine.limits.max_mixed_tokens
    return StudyScore(100.0 - 10.0 * abs(prefill - 4) - 0.05 * abs(mixed - 128), 1.0)


def test_the_search_finds_a_known_optimum_and_names_the_changes() -> None:
    found = tune(a_spec(), goodness, max_simulations=200)
    assert found.score.goodput == 100.0
    assert [role.replicas for role in found.spec.pool.roles] == [4, 4]
    assert all(role.engine.limits.max_mixed_tokens == 128 for role in found.spec.pool.roles)
    product = found.base.goodput
    for change in found.changes:
        assert change.gain >= MIN_GAIN
        product *= 1.0 + change.gain
    assert product == pytest.approx(found.score.goodput)
    text = fields_of(a_spec(), found.spec)
    assert "[engine]\nmax_mixed_tokens = 128" in text
    assert "# prefill: replicas = 4" in text


def test_the_search_keeps_within_its_simulations_and_never_gets_worse() -> None:
    for most in (2, 5, 11):
        calls = []

        def simulate(spec: FleetSpec, calls: list = calls) -> StudyScore:
            calls.append(spec)
            return goodness(spec)

        found = tune(a_spec(), simulate, max_simulations=most)
        assert len(calls) == found.simulations <= most
        assert found.score >= found.base


def test_nothing_is_changed_for_less_than_the_least_gain() -> None:
    found = tune(a_spec(), lambda spec: StudyScore(1.0 + 1e-6 * spec.pool.roles[0].replicas, 1.0), max_simulations=100)
    assert found.changes == []
    assert fields_of(a_spec(), found.spec) == ""


def test_speed_decides_between_equal_goodputs_and_goodput_between_unequal_ones() -> None:
    assert StudyScore(1.0, 2.0).gain_over(StudyScore(1.0, 1.0)) == pytest.approx(1.0)
    assert StudyScore(1.0, 2.0).gains_in(StudyScore(1.0, 1.0)) == "speed"
    assert StudyScore(2.0, 1.0).gains_in(StudyScore(1.0, 9.0)) == "goodput"
    assert StudyScore(2.0, 1.0).gain_over(StudyScore(1.0, 9.0)) == pytest.approx(1.0)
    assert StudyScore(0.0, 9.0).gain_over(StudyScore(1.0, 1.0)) == pytest.approx(-1.0)
    assert StudyScore(1.0, 1.0).gain_over(StudyScore(0.0, 0.0)) > 0


def test_the_command_tunes_a_fleet_with_too_few_prefill_workers(tmp_path: Path) -> None:
    fleet, out, result = tmp_path / "fleet.toml", tmp_path / "better.toml", tmp_path / "r.json"
    fleet.write_text(SPLIT)
    run = CliRunner().invoke(
        main, ["tune", str(fleet), "--simulations", "12", "--write", str(out), "--json", str(result)]
    )
    assert run.exit_code == 0, run.output
    found = json.loads(result.read_text())
    assert all(f"{one['field']}: " in run.output for one in found["changes"])
    assert "goodput +" in run.output
    assert {one["quantity"] for one in found["changes"]} <= {"goodput", "speed"}
    assert found["goodput"] > 1.1 * found["base_goodput"]
    assert "prefill:decode" in {change["field"] for change in found["changes"]}


def test_a_fleet_without_targets_is_refused(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(SPLIT.replace('slo = "ttft=1s,tpot=30ms"\n', ""))
    run = CliRunner().invoke(main, ["tune", str(fleet)])
    assert run.exit_code == 2
    assert "slo is missing" in run.output
