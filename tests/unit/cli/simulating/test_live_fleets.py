"""The live stage of the tuner: processes of a fleet, its requests, turns and the choice."""

from dataclasses import replace

import pytest

from kvferry.bench.workload.measures import MeasuredAnswer
from kvferry.cli.simulating.live_fleets import LiveScore, choose, compare, goodput, live_requests, stack_of
from kvferry.core.errors import UsageError
from kvferry.simulator.files.spec import FleetSpec, read_fleet

FLEET = """
slo = "ttft=1s,tpot=30ms"
[[role]]
role = "prefill"
replicas = 1
[[role]]
role = "decode"
replicas = 2
[engine]
blocks = 100
kv_bytes_per_token = 1000
max_mixed_tokens = 64
scheduling = "srtf"
[device]
step_ms = 8.0
[gateway]
policy = "least-loaded"
[workload]
requests = 60
rate = 20.0
num_input = 60
num_output = 20
num_prefix = 32
"""


def a_spec(text: str = FLEET) -> FleetSpec:
    return read_fleet(text, lambda _: "")


def test_the_processes_have_the_settings_of_the_fleet() -> None:
    config = stack_of(a_spec(), "tiny", 1)
    assert (config.prefill, config.decode, config.both, config.threads) == (1, 2, 0, 1)
    flags = dict(zip(config.worker_flags[::2], config.worker_flags[1::2], strict=True))
    assert flags["--max-mixed-tokens"] == "64"
    assert flags["--scheduling"] == "srtf"
    assert flags["--kv-memory"] == str(100 * 16 * 1000)
    gateway = dict(zip(config.gateway_flags[::2], config.gateway_flags[1::2], strict=True))
    assert gateway["--policy"] == "least-loaded"
    assert "--kv-memory" not in stack_of(a_spec(FLEET.replace("kv_bytes_per_token = 1000", "")), "tiny", 1).worker_flags


def test_fleets_that_one_machine_cannot_run_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 16 can run on one machine"):
        stack_of(a_spec(FLEET.replace("replicas = 2", "replicas = 20")), "tiny", 1)
    with pytest.raises(UsageError, match="one \\[engine\\] for all"):
        stack_of(a_spec(FLEET.replace("replicas = 2", "replicas = 2\nengine.token_budget = 64")), "tiny", 1)


def test_the_requests_are_those_of_the_workload_with_ids_of_a_vocabulary() -> None:
    spec = a_spec()
    found = live_requests(spec, 10)
    expected = [request for request, _ in zip(spec.requests(0), range(10), strict=False)]
    assert [(r.at, len(r.prompt), r.num_output) for r in found] == [
        (r.at, len(r.prompt), r.output.count) for r in expected
    ]
    assert {r.prompt[:32] for r in found} == {found[0].prompt[:32]}
    assert all(300 <= token < 4300 for r in found for token in r.prompt)


def test_goodput_counts_the_requests_in_time() -> None:
    fast, slow = MeasuredAnswer(0.0, 0.0, (0.5, 0.6), 4, 2), MeasuredAnswer(1.0, 1.0, (3.0, 4.0), 4, 2)
    failed = MeasuredAnswer(0.0, 0.0, (), 4, 0, "HTTP 500")
    assert goodput([fast, slow, failed], {"ttft": 1.0}) == 0.25
    assert goodput([failed], {"ttft": 1.0}) == 0.0


def test_each_round_begins_with_another_fleet() -> None:
    fleets = [replace(a_spec(), seed=number) for number in range(3)]
    order: list[int] = []

    def serve_one(spec: FleetSpec) -> float:
        order.append(spec.seed)
        return float(spec.seed + len(order))

    scores = compare(fleets, serve_one, 2)
    assert order == [0, 1, 2, 1, 2, 0]
    assert [score.goodputs for score in scores] == [(1.0, 6.0), (3.0, 5.0), (5.0, 7.0)]


def test_the_files_fleet_is_kept_unless_another_one_is_surely_better() -> None:
    base = LiveScore((1.0, 1.0, 1.0))
    assert choose([base, LiveScore((1.2, 1.1, 1.3)), LiveScore((1.1, 1.1, 1.1))], 0.01) == 1
    assert choose([base, LiveScore((1.005, 1.005, 1.005))], 0.01) == 0
    assert choose([base, LiveScore((1.5, 1.4, 0.9))], 0.01) == 0, "in one round it was worse than the fleet of the file"
    assert choose([LiveScore((0.0,)), LiveScore((0.0,))], 0.01) == 0
