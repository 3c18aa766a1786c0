"""Sizes of a fleet by load: the targets are met, and with one worker less they are not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from unit.simulator.studies.test_tuning import SPLIT, a_spec

from kvferry.cli.main import main
from kvferry.core.errors import UsageError
from kvferry.simulator.files.spec import FleetSpec
from kvferry.simulator.studies.planning import PoolPlanner, attained_share, with_sizes
from kvferry.simulator.studies.run import simulate_pool

PRICED = SPLIT.replace('role = "decode"', 'role = "decode"\nprice_per_hour = 2.0')


def capacity(spec: FleetSpec) -> float:
    """Return the share of the load that a fleet serves, at 4 requests/s per prefill worker and 3 per decode worker."""
    assert spec.demand is not None
    prefill, decode = (role.replicas for role in spec.pool.roles)
    return min(1.0, 4.0 * prefill / spec.demand.arrivals.rate, 3.0 * decode / spec.demand.arrivals.rate)


def test_each_rate_has_the_smallest_fleet_and_the_ratio_of_the_workload() -> None:
    planner = PoolPlanner(a_spec(), capacity, min_share=0.95, max_simulations=200)
    rows = planner.plan([96.0, 12.0, 24.0])
    assert [row.rate for row in rows] == [12.0, 24.0, 96.0]
    assert [dict(row.sizes) for row in rows] == [
        {"prefill": 3, "decode": 4},
        {"prefill": 6, "decode": 8},
        {"prefill": 23, "decode": 31},
    ]
    assert all(row.is_enough for row in rows)


def test_a_rate_beyond_the_simulations_is_not_enough() -> None:
    (row,) = PoolPlanner(a_spec(), capacity, min_share=0.95, max_simulations=9).plan([1000.0])
    assert not row.is_enough
    assert row.attained < 0.95


def test_expensive_workers_are_removed_first() -> None:
    def either(spec: FleetSpec) -> float:
        prefill, decode = (role.replicas for role in spec.pool.roles)
        return min(1.0, (prefill + decode) / 8)

    (row,) = PoolPlanner(a_spec(PRICED), either, min_share=1.0, max_simulations=200).plan([1.0])
    assert dict(row.sizes) == {"prefill": 7, "decode": 1}
    assert row.price_per_hour == 2.0


def test_a_planned_fleet_keeps_its_targets_in_the_simulator_and_one_worker_less_does_not() -> None:
    spec = a_spec()
    planner = PoolPlanner(spec, lambda one: attained_share(simulate_pool(one, 0)), min_share=0.9, max_simulations=60)
    (row,) = planner.plan([20.0])
    assert row.is_enough
    for role, count in row.sizes.items():
        if count > 1:
            smaller = with_sizes(spec, {**row.sizes, role: count - 1}, 20.0)
            assert attained_share(simulate_pool(smaller, 0)) < 0.9


def test_the_command_prints_rows_and_writes_json(tmp_path: Path) -> None:
    fleet, out = tmp_path / "fleet.toml", tmp_path / "plan.json"
    fleet.write_text(SPLIT)
    done = CliRunner().invoke(main, ["plan", str(fleet), "--rates", "5,10", "--attain", "0.8", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "requests/s" in done.output
    found = json.loads(out.read_text())
    assert [row["rate"] for row in found["rows"]] == [5.0, 10.0]
    assert all(row["replicas"].keys() == {"prefill", "decode"} for row in found["rows"])
    assert "cost/hour" not in done.output, "the file has no prices"
    fleet.write_text(SPLIT.replace("[[role]]", "[[role]]\nprice_per_hour = 1.5", 1))
    done = CliRunner().invoke(main, ["plan", str(fleet), "--rates", "5", "--attain", "0.8", "--json", "-"])
    assert json.loads(done.stdout)["rows"][0]["price_per_hour"] > 0
    assert "in the currency of the file's price_per_hour" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rates", "2,x"], "numbers from 1e-6 to 1e9"),
        (["--rates", "0"], "numbers from 1e-6 to 1e9"),
        (["--rates", "1e-320"], "numbers from 1e-6 to 1e9"),
        (["--rates", "nan"], "numbers from 1e-6 to 1e9"),
        (["--attain", "0"], "0"),
        (["--attain", "nan"], "'nan' is not a number"),
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, words: list[str], message: str) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(SPLIT)
    done = CliRunner().invoke(main, ["plan", str(fleet), *words])
    assert done.exit_code == 2
    assert message in done.output


def test_a_trace_has_its_own_rate() -> None:
    with pytest.raises(UsageError, match="a trace has its own rate"):
        PoolPlanner(replace(a_spec(), demand=None), capacity, min_share=0.9, max_simulations=9)
