"""Causes of computed tokens keep their meaning between processes, also of other versions."""

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
