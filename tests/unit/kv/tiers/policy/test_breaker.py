"""The circuit breaker: opens after consecutive failures, allows one probe, and closes after a success."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.kv.tiers.policy.breaker import Breaker, BreakerState, BreakerTimes

TIMES = BreakerTimes(failures=3, patience_seconds=0.1, first_backoff_seconds=1.0, longest_backoff_seconds=5.0)
INFINITE = float("inf")


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(TIMES)
    for _ in range(TIMES.failures):
        breaker.failed(now, INFINITE)
    return breaker


def test_the_breaker_opens_only_after_consecutive_failures() -> None:
    breaker = Breaker(TIMES)
    for _ in range(10):
        breaker.failed(0.0, INFINITE)
        breaker.failed(0.0, INFINITE)
        breaker.succeeded()
    assert breaker.passes
    for _ in range(3):
        assert breaker.passes
        breaker.failed(0.0, INFINITE)
    assert not breaker.passes
    assert breaker.state is BreakerState.OPEN
    assert breaker.num_trips == 1


def test_timeouts_count_by_the_time_that_they_waste() -> None:
    breaker = Breaker(TIMES)
    for _ in range(99):
        breaker.failed(0.0, 0.001)
    assert breaker.passes
    breaker.failed(0.0, 0.01)
    assert not breaker.passes
    breaker = Breaker(TIMES)
    for _ in range(500):
        breaker.failed(0.0, 0.001)
        breaker.succeeded()
    assert breaker.passes


def test_one_probe_at_a_time_and_the_backoff_doubles_up_to_its_cap() -> None:
    breaker, now = opened(), 0.0
    for backoff in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert not breaker.probe(now + backoff - 0.01)
        now += backoff
        assert breaker.probe(now)
        assert not breaker.probe(now), "another probe is running"
        assert not breaker.passes
        breaker.probed(now, alive=False)
    assert breaker.probe(now + 5.0)
    breaker.probed(now + 5.0, alive=True)
    assert breaker.passes
    for _ in range(3):
        breaker.failed(100.0, INFINITE)
    assert breaker.probe(101.0), "after a success the backoff starts from its first value"


def test_calls_begun_before_the_breaker_opened_do_not_change_it() -> None:
    breaker = opened()
    breaker.failed(0.5, INFINITE)
    breaker.succeeded()
    assert breaker.state is BreakerState.OPEN
    assert breaker.probe(1.0)
    breaker.failed(1.0, INFINITE)
    breaker.succeeded()
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_result_without_a_call_is_an_error() -> None:
    with pytest.raises(InvariantBroken):
        opened().probed(0.0, alive=True)


@given(st.lists(st.sampled_from(["ok", "fail", "probe", "alive", "dead", "wait"]), max_size=60))
def test_requests_pass_exactly_when_the_breaker_is_closed(steps: list[str]) -> None:
    breaker, now, looking, in_a_row = Breaker(TIMES), 0.0, False, 0
    for step in steps:
        if step == "ok":
            breaker.succeeded()
            in_a_row = 0
        elif step == "fail":
            was_closed = breaker.passes
            breaker.failed(now, INFINITE)
            in_a_row += 1
            assert breaker.passes == (was_closed and in_a_row < TIMES.failures)
        elif step == "probe":
            looking = breaker.probe(now) or looking
        elif step in ("alive", "dead") and looking:
            breaker.probed(now, alive=step == "alive")
            looking = False
            in_a_row = 0
        elif step == "wait":
            now += 5.0
        assert breaker.passes == (breaker.state is BreakerState.CLOSED)
        assert not (looking and breaker.passes)
