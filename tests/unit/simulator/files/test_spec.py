"""Fleet files: every field has its effect; errors name field, value and remedy."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.core.errors import UsageError
from kvferry.gateway.decide.config import POLICIES
from kvferry.simulator.files.report import as_json
from kvferry.simulator.files.spec import read_fleet
from kvferry.simulator.studies.run import simulate_pool

EXAMPLES = Path(__file__).resolve().parents[4] / "docs" / "examples"
SMALL = """
[[role]]
role = "both"
[device]
step_ms = 8.0
token_us = 20.0
[workload]
requests = 30
rate = 4.0
num_input = 50
num_output = 10
"""


def no_files(name: str) -> str:
    raise UsageError(f"cannot read {name}", field=name)


def with_line(table: str, line: str) -> str:
    """Return the small fleet file with a line added to one of its tables, or replaced if it has the same field."""
    field = line.split(" = ")[0]
    text = "\n".join(one for one in SMALL.splitlines() if not one.startswith(f"{field} ="))
    if not table or line.startswith("[["):
        return f"{line}\n{text}"
    return text.replace(f"[{table}]", f"[{table}]\n{line}") if f"[{table}]" in text else f"{text}\n[{table}]\n{line}"


def test_the_smallest_file_runs() -> None:
    spec = read_fleet(SMALL, no_files)
    found = as_json(spec, simulate_pool(spec, 0))
    assert found["requests"] == 30
    assert set(found) >= {"ttft_ms", "itl_ms", "e2e_ms", "goodput", "hit_rate", "requests", "seconds_simulated"}
    assert found["ttft_ms"]["p50"] == pytest.approx(8.0 + 50 * 0.02 + 0.4, rel=0.3)
    assert found["itl_ms"]["p50"] == pytest.approx(8.02, rel=0.02)


@pytest.mark.parametrize(
    ("table", "line", "field", "remedy"),
    [
        ("workload", "rate = -1", "workload.rate is -1", "number from"),
        ("workload", "arrivals = 'often'", "workload.arrivals is 'often'", "poisson"),
        ("workload", "lengths = 'long'", "workload.lengths is 'long'", "sharegpt"),
        ("workload", "requests = 0", "workload.requests is 0", "whole number"),
        ("workload", "requests = 1.5", "workload.requests is 1.5", "whole number"),
        ("workload", "reqeusts = 5", "workload.reqeusts is 5", "remove it; the fields here are"),
        ("engine", "blocks = true", "engine.blocks is True", "whole number"),
        ("engine", "scheduling = 'lifo'", "engine.scheduling is 'lifo'", "fcfs"),
        ("device", "step_s = 1", "device.step_s is 1", "step_ms"),
        ("link", "gbps = 0", "link.gbps is 0", "number from"),
        ("gateway", "policy = 'best'", "gateway.policy is 'best'", "prefix-hash"),
        ("gateway", "cache_map = 1", "gateway.cache_map is 1", "true or false"),
        ("", "seed = 'x'", "seed is 'x'", "whole number"),
        ("", "link = 3", "link is 3", r"\[link\]"),
        ("", "slo = 'ttft=fast'", "ttft=fast", "ttft=500ms"),
        ("", "[[failure]]\nrole = 'decode'", "failure.0.role is 'decode'", "both"),
        ("", "[[failure]]\nindex = 1", "failure.0.index is 1", "from 0 to 0"),
        ("", "[[role]]\nrole = 'both'", "role is", "for each role"),
        ("", "[machine]\ncores = 0", "machine.cores is 0", "number from"),
        ("", "[machine]\ncpus = 2", "machine.cpus is 2", "remove it"),
        ("", f"[machine]\ncores = 1{'0' * 400}", "machine.cores is 1000", "number from"),
        ("", f"seed = 0x{'f' * 5000}", "seed is too large to show", "whole number"),
        ("", f"seed = {'9' * 5000}", "too many digits", "not TOML"),
        ("", '"a\\nb\\u001b[2J" = 1', r"'a\nb\x1b[2J' is 1", "remove it"),
        ("", "pools = 31", "pools is 31", "at most one for each of the 30 requests"),
        ("", "[[tenant]]\n[[tenant]]", "tenant.name is ['', '']", "different name"),
        ("", f"{'k' * 10_000} = 1", f"'{'k' * 38}… is 1", "remove it"),
    ],
)
def test_an_invalid_field_is_named_with_its_value_and_a_remedy(table: str, line: str, field: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy) as caught:
        read_fleet(with_line(table, line), no_files)
    assert field in caught.value.message


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("roles", ["", "[[role]]\nrole = 'prefill'\n"])
def test_every_policy_of_the_gateway_routes(policy: str, roles: str) -> None:
    text = SMALL.replace('role = "both"', 'role = "decode"\nreplicas = 2' if roles else 'role = "both"\nreplicas = 2')
    spec = read_fleet(f"{roles}{text}[gateway]\npolicy = '{policy}'\n", no_files)
    result = simulate_pool(spec, 0)
    assert result.measures.completed == 30
    assert result.measures.ttft._buckets == simulate_pool(spec, 0).measures.ttft._buckets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[roles]]\nrole = 'both'", "roles is .*; write role"),
        ("[cluster]\nname = 'x'", "cluster is .*; remove it; the fields here are seed, pools"),
    ],
)
def test_an_unknown_section_is_named_before_missing_fields(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_fleet(text, no_files)


@pytest.mark.parametrize("text", ["", "[workload]", "not toml", "[[role]]\nrole = 'prefill'"])
def test_a_file_without_a_fleet_is_an_error(text: str) -> None:
    with pytest.raises(UsageError):
        read_fleet(text, no_files)


def test_a_role_has_its_own_device_and_engine_on_top_of_the_common_one() -> None:
    text = """
    [engine]
    blocks = 100
    max_num_seqs = 7
    [device]
    step_ms = 1
    [[role]]
    role = "prefill"
    engine = {blocks = 50}
    [[role]]
    role = "decode"
    device = {step_ms = 2}
    """
    prefill, decode = read_fleet(text, no_files).pool.roles
    assert (prefill.engine.num_blocks, decode.engine.num_blocks) == (50, 100)
    assert prefill.engine.limits.max_num_seqs == 7
    assert (prefill.device.step, decode.device.step) == (0.001, 0.002)


def test_a_report_of_a_fleet_whose_worker_is_lost_at_the_end() -> None:
    text = SMALL.replace('role = "both"', 'role = "both"\nreplicas = 2') + (
        "[[failure]]\nat = 1\nindex = 0\nrestart_seconds = 1000\n"
    )
    spec = read_fleet(text, no_files)
    found = as_json(spec, simulate_pool(spec, 0))
    assert found["roles"]["both"]["replicas"] == 1
    assert found["requests"] == 30


def test_cores_and_jitter_are_read() -> None:
    text = "[[role]]\nreplicas = 2\njitter = [0.5, 2]\n[device]\nstep_ms = 1\n[machine]\ncores = 1.5\n"
    pool = read_fleet(text, no_files).pool
    assert (pool.cores, pool.roles[0].jitter) == (1.5, (0.5, 2.0))
    for wrong in ("3", "[-1]", "[true]", "['x']"):
        with pytest.raises(UsageError, match="jitter"):
            read_fleet(text.replace("[0.5, 2]", wrong), no_files)


def test_traces_and_profiles_are_read_by_name() -> None:
    files = {
        "day.jsonl": '{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'
        '{"timestamp": 500, "input_length": 30, "output_length": 3, "hash_ids": [1]}\n',
        "fast": "step_ms = 1\n[measured]\ndate = 'today'\n",
    }
    text = "[[role]]\n[device]\nprofile = 'fast'\n[workload]\ntrace = 'day.jsonl'\nrepeat = 2\n"
    spec = read_fleet(text, files.__getitem__)
    assert spec.num_requests == 4
    assert simulate_pool(spec, 0).measures.completed == 4


def test_pools_divide_the_requests_and_the_rate() -> None:
    spec = read_fleet(f"pools = 3\n{SMALL}", no_files)
    assert spec.demand.count == 10
    assert spec.demand.arrivals.rate == pytest.approx(4.0 / 3)
    first, second = (simulate_pool(spec, index) for index in range(2))
    assert first.measures.ended_at != second.measures.ended_at
    first.merge(second)
    assert first.measures.completed == 20
    assert first.roles["both"].replicas == 2


def test_pools_divide_the_requests_of_a_trace() -> None:
    line = '{"timestamp": 0, "input_length": 40, "output_length": 3}\n'
    workload = SMALL.index("[workload]")
    spec = read_fleet(f'pools = 3\n{SMALL[:workload]}[workload]\ntrace = "t"\n', lambda _: line * 7)
    assert [simulate_pool(spec, index).measures.completed for index in range(3)] == [3, 2, 2]


# ---------------------------------------------------------------------- the command


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["simulate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(SMALL)
    return path


def result(*arguments: object) -> dict[str, Any]:
    """Return the JSON that the command writes to its standard output, and nothing else."""
    done = CliRunner().invoke(main, ["simulate", *map(str, arguments), "--json", "-"])
    assert done.exit_code == 0, done.output
    assert "simulated seconds" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_command_writes_the_documented_json_and_a_picture(fleet: Path, tmp_path: Path) -> None:
    output = run(fleet, "--json", tmp_path / "r.json", "--svg", tmp_path / "r.svg")
    found = json.loads((tmp_path / "r.json").read_text())
    assert "{" not in output
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert set(found[name]) == {"p50", "p90", "p99"}
    assert (found["requests"], found["hit_rate"]) == (30, 0.0)
    drawn = (tmp_path / "r.svg").read_text()
    assert drawn.startswith("<svg")
    assert "30 requests for each of 1 pool, poisson at 4 requests/s" in drawn
    assert drawn.count("<polyline") == 4, "values that are all 0 are drawn too"


def test_compare_shows_both_and_the_change(fleet: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(SMALL.replace("step_ms = 8.0", "step_ms = 16.0"))
    output = run(fleet, "--compare", other, "--json", tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["compared"]["itl_ms"]["p50"] == pytest.approx(2 * found["itl_ms"]["p50"], rel=0.02)
    assert "+99" in output or "+100" in output


def test_the_result_depends_on_the_seed_and_not_on_the_processes(fleet: Path, tmp_path: Path) -> None:
    fleet.write_text(f"pools = 2\n{SMALL}")
    seeded = [result(fleet, "--seed", s) for s in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    alone = result(fleet, "--seed", 1, "--processes", 1)
    assert alone == seeded[0]


def test_errors_end_with_status_2_and_name_the_field(fleet: Path) -> None:
    fleet.write_text(SMALL.replace("rate = 4.0", "rate = 'x'"))
    assert "workload.rate is 'x'" in run(fleet, code=2)
    assert "cannot read" in run(fleet.with_name("none.toml"), code=2)


@pytest.mark.parametrize("name", ["fleet.toml", "fleet-split.toml", "fleet-thousand.toml", "fleet-agents.toml"])
def test_the_examples_of_the_docs_run(name: str, tmp_path: Path) -> None:
    """The examples run with fewer requests than documented."""
    text = (EXAMPLES / name).read_text()
    requests, pools = tomllib.loads(text)["workload"]["requests"], tomllib.loads(text).get("pools", 1)
    shown = f"{requests:_}" if f"{requests:_}" in text else str(requests)
    small = tmp_path / name
    small.write_text(text.replace(f"requests = {shown}", "requests = 60").replace(f"pools = {pools}", "pools = 1", 1))
    found = result(small)
    assert found["requests"] == 60
    assert found["goodput"] > 0


def test_files_without_an_end_are_refused(fleet: Path) -> None:
    assert "/dev/zero is not a regular file" in run("/dev/zero", code=2)
    fleet.write_text('[workload]\ntrace = "/dev/zero"\n\n[device]\nstep_ms = 1\n\n[[role]]\nrole = "both"\n')
    assert "/dev/zero is not a regular file" in run(fleet, code=2)


@pytest.mark.parametrize("name", ["a\\u0000b", "x" * 300])
def test_a_name_that_no_file_can_have_is_an_error(fleet: Path, name: str) -> None:
    role = '[[role]]\nrole = "both"\n'
    for text in (
        f'[workload]\ntrace = "{name}"\n[device]\nstep_ms = 1\n{role}',
        f'[device]\nprofile = "{name}"\n{role}',
    ):
        fleet.write_text(text)
        assert "cannot read" in run(fleet, code=2)
