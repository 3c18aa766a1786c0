"""The autoscaler's decisions: replica counts, delays, and missing data, which does not count as idleness."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.load import WorkerLoad
from kvferry.gateway.decide.flow.capacity import PREFILL_TOKENS_PER_WORKER
from kvferry.operator.plan.autoscale import Recommendations, decide
from kvferry.operator.pool.facts import FleetReport, GatewayQueue, WorkerReport
from kvferry.operator.pool.spec import RoleSpec, ScaleDownSpec, ScalingSpec

NOW = 10_000.0


def a_load(running: int, use: float) -> WorkerLoad:
    return WorkerLoad(running, blocks_total=100, blocks_free=round(100 * (1 - use)))


def role(**scaling) -> RoleSpec:
    return RoleSpec("decode", scaling=ScalingSpec(mode="Auto", **scaling))


def pods(*loads: tuple[int, float], held: int = 0, at: float = NOW, takes_work: bool = True) -> FleetReport:
    """Return a report of decode pods, each with (requests, share of KV in use)."""
    workers = tuple(
        WorkerReport(
            f"d{i}", "decode", takes_work, load=WorkerLoad(n, blocks_total=100, blocks_free=round(100 * (1 - use)))
        )
        for i, (n, use) in enumerate(loads)
    )
    return FleetReport(at, workers, held)


def watched(*recommendations: tuple[float, int], busy_at: float = NOW) -> Recommendations:
    """Return a history long enough for every window."""
    return Recommendations(recommendations, busy_at=busy_at, began_at=0.0)


def test_more_requests_than_the_target_want_more_pods():
    decision = decide(role(), 2, 2, pods((30, 0.1), (30, 0.1)), watched(), NOW)
    assert (decision.replicas, decision.reason) == (4, "60 requests, target 16 per pod")


def test_one_full_pod_among_idle_ones_causes_growth():
    decision = decide(role(), 4, 4, pods((1, 0.1), (1, 0.1), (1, 0.1), (1, 0.98)), watched(), NOW)
    assert decision.replicas == 6
    assert "98%" in decision.reason


def test_a_small_deviation_from_the_target_changes_nothing():
    decision = decide(role(scale_down=ScaleDownSpec(0)), 2, 2, pods((30, 0.75), (1, 0.1)), watched(), NOW)
    assert decision.replicas == 2
    assert decision.reason.endswith("unchanged")


def test_growth_is_by_steps_and_within_bounds():
    assert decide(role(), 1, 1, pods((900, 0.1)), watched(), NOW).replicas == 5
    assert decide(role(max_replicas=50), 10, 10, pods(*[(90, 0.1)] * 10), watched(), NOW).replicas == 20
    assert decide(role(max_replicas=3), 1, 1, pods((900, 0.1)), watched(), NOW).replicas == 3
    assert (
        decide(role(min_replicas=2, scale_down=ScaleDownSpec(0)), 3, 3, pods(*[(1, 0.0)] * 3), watched(), NOW).replicas
        == 2
    )


def test_the_number_falls_only_when_the_whole_window_agrees():
    busy = watched((NOW - 200, 4))
    assert decide(role(), 4, 4, pods(*[(1, 0.0)] * 4), busy, NOW).replicas == 4
    assert decide(role(), 4, 4, pods(*[(1, 0.0)] * 4), watched((NOW - 301, 4)), NOW).replicas == 1


def test_an_operator_that_has_just_started_removes_no_pod():
    first = decide(role(), 4, 4, pods(*[(1, 0.0)] * 4), None, NOW)
    assert first.replicas == 4
    again = decide(role(), 4, 4, pods(*[(1, 0.0)] * 4, at=NOW + 299), first.history, NOW + 299)
    assert again.replicas == 4
    assert decide(role(), 4, 4, pods(*[(1, 0.0)] * 4, at=NOW + 301), again.history, NOW + 301).replicas == 1


@pytest.mark.parametrize(
    ("report", "ready"),
    [
        (None, 2),
        (pods((90, 0.9), at=NOW - 20), 1),
        (pods((90, 0.9)), 2),
        (pods((90, 0.9), takes_work=False), 1),
        (pods(), 0),
    ],
    ids=["none", "stale", "one of two", "takes no work", "none ready"],
)
def test_without_a_report_of_every_ready_pod_nothing_changes(report, ready):
    assert decide(role(), 2, ready, report, watched((NOW - 1, 9)), NOW).replicas == 2


def test_outstanding_exports_are_load():
    exporting = FleetReport(NOW, (WorkerReport("d", "decode", takes_work=True, load=WorkerLoad(tickets_offered=40)),))
    assert decide(role(), 1, 1, exporting, watched(), NOW).replicas == 3


def test_a_role_that_may_sleep_sleeps_after_its_time_and_not_while_requests_are_held():
    idle = watched(busy_at=NOW - 600)
    assert decide(role(min_replicas=0), 1, 1, pods((0, 0.0)), idle, NOW).replicas == 0
    assert decide(role(min_replicas=0), 1, 1, pods((0, 0.0), held=1), idle, NOW).replicas == 1
    assert decide(role(), 1, 1, pods((0, 0.0)), idle, NOW).replicas == 1
    starting = decide(role(min_replicas=0), 1, 0, pods(), idle, NOW)
    assert (starting.replicas, starting.history.busy_at) == (1, NOW)
    slept = decide(role(min_replicas=0), 0, 0, pods(), idle, NOW)
    assert (slept.replicas, slept.history.busy_at) == (0, NOW)


@given(
    current=st.integers(1, 10),
    loads=st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1)), min_size=1, max_size=10),
    recommendations=st.lists(st.tuples(st.floats(NOW - 300, NOW), st.integers(0, 20)), max_size=5),
    bounds=st.tuples(st.integers(0, 5), st.integers(5, 10)),
)
def test_never_beyond_the_bounds(current, loads, recommendations, bounds):
    wanted = role(min_replicas=bounds[0], max_replicas=bounds[1])
    decision = decide(wanted, current, len(loads), pods(*loads), watched(*recommendations), NOW)
    assert bounds[0] <= decision.replicas <= bounds[1]


def saturated(num_pods: int, prompt_tokens: int, queued: int, role: str = "prefill") -> FleetReport:
    """Return the report of a gateway that has dispatched all prompts that it may, and has a queue."""
    per_pod = math.ceil(PREFILL_TOKENS_PER_WORKER / prompt_tokens)
    workers = tuple(
        WorkerReport(f"p{i}", role, takes_work=True, load=replace(a_load(per_pod, 0.25), tokens_to_compute=0))
        for i in range(num_pods)
    )
    queue = GatewayQueue(
        requests=queued,
        prompt_tokens=queued * prompt_tokens,
        dispatched_prompt_tokens=PREFILL_TOKENS_PER_WORKER * num_pods,
        waits_for_prefill=True,
    )
    return FleetReport(NOW, workers, queue=queue)


@pytest.mark.parametrize("prompt_tokens", [500, 1000, 1500, 2000, 4000, 30_000])
@pytest.mark.parametrize("queued", [1, 40])
def test_prefill_grows_while_prompts_wait_for_it_whatever_their_length(prompt_tokens: int, queued: int) -> None:
    history, number = watched(), 4
    for second in range(0, 1200, 15):
        report = replace(saturated(number, prompt_tokens, queued), at=NOW + second)
        prefill = RoleSpec("prefill", scaling=ScalingSpec(mode="Auto"))
        decision = decide(prefill, number, number, report, history, NOW + second)
        assert decision.replicas >= number
        number, history = decision.replicas, decision.history
    assert number == 10


def test_the_reason_names_the_work_that_decides() -> None:
    prefill = RoleSpec("prefill", scaling=ScalingSpec(mode="Auto", max_replicas=99))
    decision = decide(prefill, 4, 4, saturated(4, 4000, 20), watched(), NOW)
    assert (decision.replicas, decision.reason) == (8, "145536 prompt tokens to compute, target 8192 per pod")
    few = decide(prefill, 40, 40, saturated(40, 30_000, 1), watched(), NOW)
    assert few.replicas == 41, "a prompt is computed by one pod"
    cached = replace(saturated(4, 10, 1), queue=GatewayQueue(requests=1, prompt_tokens=1, waits_for_prefill=True))
    assert decide(prefill, 500, 4, cached, watched(), NOW).reason.startswith("6557 requests")


@pytest.mark.parametrize(
    ("name", "queue", "wanted"),
    [
        ("decode", GatewayQueue(requests=5, waits_for_sequences=True), 3),
        ("decode", GatewayQueue(requests=5, waits_for_prefill=True), 2),
        ("prefill", GatewayQueue(requests=5, waits_for_sequences=True), 2),
        ("both", GatewayQueue(requests=5, waits_for_prefill=True), 3),
        ("both", GatewayQueue(requests=5, waits_for_sequences=True), 3),
        ("both", GatewayQueue(requests=5), 2),
    ],
)
def test_only_the_role_that_requests_wait_for_grows(name: str, queue: GatewayQueue, wanted: int) -> None:
    workers = tuple(WorkerReport(f"w{i}", name, takes_work=True, load=a_load(16, 0.1)) for i in range(2))
    report = FleetReport(NOW, workers, queue=queue)
    assert decide(RoleSpec(name, scaling=ScalingSpec(mode="Auto")), 2, 2, report, watched(), NOW).replicas == wanted


def test_each_gateway_has_a_queue() -> None:
    report = FleetReport(
        NOW,
        (WorkerReport("d", "decode", takes_work=True, load=a_load(16, 0.1)),),
        queue=GatewayQueue(requests=40, waits_for_sequences=True),
    )
    one, three = (decide(role(), 1, 1, report, watched(), NOW, num_gateways=number) for number in (1, 3))
    assert (one.replicas, three.replicas) == (4, 5)
    assert three.reason == "136 requests, 120 of them waiting, target 16 per pod"


def test_a_queue_keeps_a_role_awake() -> None:
    report = replace(pods((0, 0.0)), queue=GatewayQueue(requests=1, waits_for_sequences=True))
    assert decide(role(min_replicas=0), 1, 1, report, watched(busy_at=NOW - 600), NOW).replicas >= 1


@given(
    loads=st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), min_size=1, max_size=8),
    queue=st.tuples(st.integers(0, 100), st.integers(0, 10**6), st.integers(0, 10**6), st.booleans(), st.booleans()),
    more=st.tuples(st.integers(0, 100), st.integers(0, 10**6), st.integers(0, 10**6)),
    name=st.sampled_from(["prefill", "decode", "both"]),
)
def test_more_queue_never_means_fewer_pods(loads, queue, more, name) -> None:
    report = pods(*loads)
    workers = tuple(replace(worker, role=name) for worker in report.workers)
    spec = RoleSpec(name, scaling=ScalingSpec(mode="Auto", max_replicas=1000))
    less = GatewayQueue(*queue)
    requests, prompt_tokens, dispatched = (a + b for a, b in zip(queue[:3], more, strict=True))
    larger = GatewayQueue(requests, prompt_tokens, dispatched, waits_for_prefill=True, waits_for_sequences=True)
    numbers = [
        decide(spec, 4, len(loads), replace(report, workers=workers, queue=one), watched(), NOW).replicas
        for one in (GatewayQueue(), less, larger)
    ]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_one_long_prompt_needs_one_pod(num_gateways: int) -> None:
    report = FleetReport(
        NOW,
        (WorkerReport("p", "prefill", takes_work=True, load=a_load(1, 0.1)),),
        queue=GatewayQueue(dispatched_prompt_tokens=128_000),
    )
    prefill = RoleSpec("prefill", scaling=ScalingSpec(mode="Auto"))
    assert decide(prefill, 1, 1, report, watched(), NOW, num_gateways=num_gateways).replicas == 1
