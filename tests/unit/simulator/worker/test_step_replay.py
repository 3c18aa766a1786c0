"""The simulator replays a recorded run of an engine with the same schedule, step by step."""

import json
from contextlib import suppress

import pytest
from harness.fakes.recorded import a_request, record
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.observe.log_file import read_log, write_log
from kvferry.engine.observe.step_log import StepLog
from kvferry.engine.schedule.policies.policy import POLICIES
from kvferry.simulator.worker.step_replay import StepReplay

ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 120),
        st.integers(1, 40),
        st.sampled_from([1000, 1000, 2000]),
        st.integers(0, 9),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=24,
)


def replayed(log: StepLog) -> None:
    for one in (log, read_log(write_log(log))):
        replay = StepReplay(one)
        found = replay.run(observe=lambda plan, of=replay: of.scheduler.allocator.check_integrity())
        assert found.difference is None
        assert found.num_steps == len(log.steps)
        assert len(found.work) == sum(bool(step.plan) for step in log.steps)
        replay.scheduler.allocator.check_integrity()
        assert replay.scheduler.is_idle


@given(
    arrivals=ARRIVALS,
    policy=st.sampled_from(sorted(POLICIES)),
    blocks=st.sampled_from([400, 26]),
    ahead=st.booleans(),
    has_tokens=st.booleans(),
    aborted=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 23)), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_the_simulator_plans_the_logged_steps(arrivals, policy, blocks, ahead, has_tokens, aborted) -> None:
    """With 26 blocks of 16 tokens, sequences are preempted. Some share prefixes, some export their pages, and some end
    with an end token or are aborted.
    """
    requests = [
        (
            at,
            a_request(
                str(number), num_prompt, num_output, first=first, exports=kind == 0, priority=priority,
                scope="other" if kind == 1 else "",
            ),
        )
        for number, (at, num_prompt, num_output, first, kind, priority) in enumerate(arrivals)
    ]  # fmt: skip
    limits = SchedulerLimits(128, 48, 64, max_num_seqs=6, scheduling=policy)
    log = record(
        requests, limits=limits, blocks=blocks, eos=True, ahead=ahead, has_tokens=has_tokens,
        aborts=[(at, str(number)) for at, number in aborted],
    )  # fmt: skip
    assert log.obstacle == ""
    replayed(log)


def test_a_different_plan_is_found() -> None:
    log = record([(0, a_request("a", 40, 5)), (2, a_request("b", 40, 5))])
    log.steps[3].plan = [(0, 0, 1, 1)]
    found = StepReplay(log).run().difference
    assert found is not None
    assert (found.step, found.logged) == (3, [(0, 0, 1, 1)])
    assert found.planned != found.logged


def test_a_log_that_cannot_be_replayed_is_refused() -> None:
    log = record([(0, a_request("a", 40, 5))])
    log.obstacle = "requests were running"
    with pytest.raises(UsageError, match="cannot be replayed: requests were running"):
        StepReplay(log)


ODD: list[object] = [
    None, True, -1, 0, 1, 7, 2**40, 2**70, 1.5, 1e300, float("nan"), float("inf"), "", "x" * 300, [], {}, [[1]], [-1],
]  # fmt: skip


def changed(value: object, at: int, odd: object) -> tuple[object, int]:
    """Return a JSON value with its value number `at`, depth first, replaced, and the number left to count."""
    if at == 0:
        return odd, -1
    at -= 1
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key], at = changed(inner, at, odd)
            if at < 0:
                break
    return value, at


@given(has_tokens=st.booleans(), line=st.integers(0, 8), at=st.integers(0, 60), odd=st.sampled_from(ODD))
@settings(max_examples=400, deadline=None)
def test_a_changed_log_is_refused_or_replayed(has_tokens: bool, line: int, at: int, odd: object) -> None:
    log = record(
        [(0, a_request("a", 20, 3)), (1, a_request("b", 20, 2, exports=True))], has_tokens=has_tokens, eos=True
    )
    lines = list(write_log(log))
    entry, _ = changed(json.loads(lines[line % len(lines)]), at, odd)
    lines[line % len(lines)] = json.dumps(entry)
    with suppress(UsageError):
        StepReplay(read_log(lines)).run()
