"""Fitted durations: convergence, the observations that they use, and the observations that they ignore."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.estimates.estimates import (
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_PREFILL,
    DEFAULT_STEP,
    DEFAULT_TRANSFER,
    Estimates,
    FittedLine,
    Process,
)

A, B = WorkerId("a"), WorkerId("b")
P, Q = Process(A, "1"), Process(B, "1")


@given(st.floats(0, 1), st.floats(1e-5, 1), st.lists(st.integers(1, 10_000), min_size=2, max_size=80, unique=True))
def test_a_line_is_found_exactly(intercept, slope, amounts):
    fit = FittedLine(1.0)
    for amount in amounts:
        fit.add(amount, intercept + slope * amount)
    for amount in amounts:
        assert fit.predict(amount) == pytest.approx(intercept + slope * amount, rel=0.06)


@given(
    st.sampled_from([0.0, 0.05, 1.0]),
    st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e3)), max_size=60),
    st.floats(0, 1e6),
)
def test_predictions_are_finite_and_never_decrease(share, observations, amount):
    fit = FittedLine(share)
    for one in observations:
        fit.add(*one)
    intercept, slope = fit.line()
    assert 0 <= intercept < 1e9
    assert 0 <= slope < 1e9
    assert fit.predict(amount + 1) >= fit.predict(amount) >= 0


def test_amounts_that_do_not_differ_leave_the_assumed_slope():
    proportional, flat = FittedLine(1.0), FittedLine(0.0)
    for fit in (proportional, flat):
        for _ in range(9):
            fit.add(100, 0.5)
    assert proportional.predict(200) == pytest.approx(1.0)
    assert flat.predict(200) == pytest.approx(0.5)


def test_a_pause_of_the_process_is_limited_and_a_change_is_followed():
    fit = FittedLine(1.0)
    for amount in range(100, 200):
        fit.add(amount, amount * 1e-3)
    fit.add(150, 60.0)
    assert fit.predict(150) < 0.3
    for amount in range(100, 600):
        fit.add(amount, amount * 4e-3)
    assert fit.predict(300) == pytest.approx(1.2, rel=0.05)


def test_amounts_and_durations_that_cannot_be_are_ignored():
    fit = FittedLine(1.0)
    fit.add(0, 1.0)
    fit.add(5, -1.0)
    assert (fit.count, fit.predict(10)) == (0, 0.0)


def test_without_observations_the_defaults_hold():
    estimates = Estimates()
    assert estimates.prefill_line(A) == DEFAULT_PREFILL
    assert estimates.step_line(A) == DEFAULT_STEP
    assert estimates.transfer_line(A, B, "zone") == DEFAULT_TRANSFER
    assert estimates.output_tokens(1000) == DEFAULT_OUTPUT_TOKENS
    assert estimates.output_tokens(7) == 7
    assert estimates.hit_share == 0


def test_the_first_observation_of_a_process_is_dropped():
    estimates = Estimates()
    estimates.observe_prefill(P, 100, 30.0)
    assert estimates.prefill_line(A) == DEFAULT_PREFILL
    for _ in range(4):
        estimates.observe_prefill(P, 100, 0.1)
    estimates.observe_prefill(Process(A, "2"), 100, 30.0)
    assert estimates.prefill_line(A)[1] == pytest.approx(1e-3)


def test_a_worker_without_observations_gets_the_estimates_of_the_fleet():
    estimates = Estimates()
    for _ in range(5):
        estimates.observe_prefill(P, 100, 0.1)
        estimates.observe_output(P, 4, 10, 0.5)
    assert estimates.prefill_line(B) == estimates.prefill_line(A)
    assert estimates.step_line(B) == estimates.step_line(A)
    for _ in range(5):
        estimates.observe_prefill(Q, 100, 0.4)
    assert estimates.prefill_line(B)[1] == pytest.approx(4 * estimates.prefill_line(A)[1])


def test_a_pair_without_observations_gets_the_estimates_of_its_distance():
    estimates = Estimates()
    for _ in range(5):
        estimates.observe_transfer(P, Q, "remote", 100, 1.0)
        estimates.observe_transfer(Q, P, "node", 100, 0.01)
    assert estimates.transfer_line(WorkerId("c"), B, "remote")[1] == pytest.approx(0.01)
    assert estimates.transfer_line(WorkerId("c"), B, "node")[1] == pytest.approx(1e-4)
    assert 1e-4 < estimates.transfer_line(WorkerId("c"), B, "zone")[1] < 0.01


def test_lengths_and_hits_are_averages():
    estimates = Estimates()
    for _ in range(600):
        estimates.observe_length(40)
        estimates.observe_prompt(100, 75)
    assert estimates.output_tokens(1000) == pytest.approx(40)
    assert estimates.hit_share == pytest.approx(0.75, rel=0.01)
