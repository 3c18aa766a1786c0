"""The virtual clock runs events in order of time, then of creation."""

import math

import pytest

from kvferry.simulator.clock import VirtualClock


def test_events_run_in_order_of_time_then_of_creation() -> None:
    clock, seen = VirtualClock(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.at(at, lambda name=name: seen.append((name, clock.now)))
    clock.run()
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]
    assert clock.num_events == 4
    assert not clock.step()


def test_an_event_of_the_past_runs_now_and_time_never_goes_back() -> None:
    clock, seen = VirtualClock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    clock.run()
    assert seen == [5.0]


def test_run_stops_at_the_given_time_and_keeps_later_events() -> None:
    clock, seen = VirtualClock(), []
    for at in (1.0, 2.0, 3.0):
        clock.at(at, lambda: seen.append(clock.now))
    clock.run(until=2.0)
    assert seen == [1.0, 2.0]
    clock.run()
    assert seen == [1.0, 2.0, 3.0]


def test_a_time_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a number"):
        VirtualClock().at(math.nan, lambda: None)
