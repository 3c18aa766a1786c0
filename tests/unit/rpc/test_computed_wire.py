"""Causes of computed tokens keep their meaning between processes, also of other versions."""

import math

import pytest

from kvferry.core.causes import ComputeCause, ComputedTokens
from kvferry.rpc.computed_wire import computed_from_wire, computed_to_wire
from kvferry.v1 import common_pb2


def test_every_cause_of_a_worker_has_a_number() -> None:
    given = [ComputedTokens(cause, 3, 1.5) for cause in ComputeCause if cause is not ComputeCause.ON_ANOTHER_WORKER]
    assert computed_from_wire(computed_to_wire(given)) == tuple(given)
    assert {one.cause for one in computed_to_wire(given)} == set(common_pb2.ComputedTokens.Cause.values()) - {0}


def test_a_cause_of_a_newer_worker_is_counted() -> None:
    message = common_pb2.ComputedTokens.FromString(b"\x08\x63\x10\x05")
    assert computed_from_wire([message]) == (ComputedTokens(ComputeCause.FIRST_SEEN, 5),)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_an_age_that_is_no_time_is_0(seconds: float) -> None:
    message = common_pb2.ComputedTokens(cause="CAUSE_EVICTED", num_tokens=5, seconds=seconds)
    assert computed_from_wire([message]) == (ComputedTokens(ComputeCause.EVICTED, 5),)
