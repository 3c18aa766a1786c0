"""Requests held for a pool without workers, and the roles that they wake."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import Overloaded
from kvferry.gateway.decide.config import HoldConfig
from kvferry.gateway.decide.routing.holding import AGAIN_SECONDS, Holding, Scaler, WakePolicy


def test_requests_beyond_the_bound_are_refused_with_a_retry_time():
    holding = Holding(HoldConfig(max_held=1, seconds=7), "ns/p")
    with holding.held():
        assert holding.num_held == 1
        with pytest.raises(Overloaded, match="ns/p") as full, holding.held():
            pass
        assert full.value.retry_after_seconds
        assert holding.num_held == 1
    assert holding.num_held == 0
    assert holding.gave_up().http_status == 503
    assert holding.gave_up().retry_after_seconds
    assert holding.seconds == 7


def test_requests_with_several_samples_count_with_all_of_them():
    holding = Holding(HoldConfig(max_held=4), "ns/p")
    with holding.held(3):
        with pytest.raises(Overloaded), holding.held(2):
            pass
        with holding.held(1):
            assert holding.num_held == 4
    with holding.held(9):
        assert holding.num_held == 9
    with pytest.raises(Overloaded), Holding(HoldConfig(max_held=0), "ns/p").held():
        pass


def scaler(**fields: Any) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": "3", "annotations": {"kvferry.dev/wake": "true"}},
        "spec": {"replicas": 0},
        **fields,
    }


def test_a_scaler_is_read():
    assert Scaler.read("decode", scaler()) == Scaler("decode", 0, True, "3")


@pytest.mark.parametrize("value", ["false", "True", "1", True, None])
def test_only_the_exact_annotation_allows_to_wake(value):
    metadata = {"resourceVersion": "3", "annotations": {"kvferry.dev/wake": value}}
    read = Scaler.read("decode", scaler(metadata=metadata))
    assert read is not None
    assert not read.may_wake


@pytest.mark.parametrize(
    "fields",
    [
        {"spec": {}},
        {"spec": None},
        {"spec": {"replicas": "0"}},
        {"spec": {"replicas": False}},
        {"metadata": {}},
        {"metadata": None},
    ],
)
def test_a_scaler_without_number_or_version_is_not_changed(fields):
    assert Scaler.read("decode", scaler(**fields)) is None


def test_a_pool_is_woken_only_for_waiting_requests_and_not_twice_in_a_short_time():
    policy = WakePolicy()
    asleep = Scaler("decode", 0, True, "3")
    assert policy.choose([asleep], num_held=0, now=0.0) == []
    assert policy.choose([asleep], num_held=1, now=0.0) == [asleep]
    assert policy.choose([asleep], num_held=1, now=AGAIN_SECONDS - 0.1) == []
    assert policy.choose([Scaler("prefill", 0, True, "1")], num_held=1, now=1.0) != []
    assert policy.choose([asleep], num_held=1, now=AGAIN_SECONDS) == [asleep]


@given(st.lists(st.tuples(st.integers(-1, 3), st.booleans(), st.integers(0, 2), st.floats(0, 60)), max_size=20))
def test_only_roles_at_zero_are_woken_and_not_too_often(looks):
    policy, last, now = WakePolicy(), None, 0.0
    for replicas, may_wake, held, seconds in looks:
        now += seconds
        for chosen in policy.choose([Scaler("decode", replicas, may_wake, "1")], num_held=held, now=now):
            assert chosen.replicas == 0
            assert chosen.may_wake
            assert held
            assert last is None or now - last >= AGAIN_SECONDS
            last = now
