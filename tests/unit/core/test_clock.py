"""Clocks: the system's is monotonic, the manual one moves only by its methods."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock, SystemClock


def test_the_system_clock_is_monotonic_and_has_the_year() -> None:
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(1000)]
    assert readings == sorted(readings)
    assert clock.wall() > 1_700_000_000, "the wall clock counts seconds since 1970"


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_a_manual_clock_advances_both_readings_alike(pauses: list[float]) -> None:
    clock = ManualClock(epoch=100.0)
    for pause in pauses:
        before = clock.monotonic()
        clock.advance(pause)
        assert clock.monotonic() == before + pause
        assert clock.wall() == 100.0 + clock.monotonic()
    assert clock.monotonic() == clock.monotonic()


def test_a_manual_clock_does_not_go_back() -> None:
    clock = ManualClock(now=5.0)
    with pytest.raises(ValueError, match=r"seconds is -0\.1; a clock cannot move backwards"):
        clock.advance(-0.1)
    assert clock.monotonic() == 5.0
