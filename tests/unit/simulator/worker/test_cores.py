"""Shared cores: work is conserved, and slowed down only while there are more pieces than cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import UsageError
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.worker.cores import SharedCores


def ends(cores: float, pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Run pieces of (begin, seconds); return the end and the duration of each."""
    clock = VirtualClock()
    shared, found = SharedCores(clock, cores), {}
    for number, (at, seconds) in enumerate(pieces):

        def begin(number: int = number, seconds: float = seconds) -> None:
            shared.run(seconds, lambda took: found.__setitem__(number, (clock.now, took)))

        clock.at(at, begin)
    clock.run()
    return [found[number] for number in range(len(pieces))]


def test_a_core_for_each_piece_takes_its_own_time() -> None:
    assert ends(2, [(0, 3.0), (1, 1.0)]) == [(3.0, 3.0), (2.0, 1.0)]


def test_three_pieces_share_two_cores() -> None:
    assert ends(2, [(0, 2.0)] * 3) == [pytest.approx((3.0, 3.0))] * 3
    first, second, third = ends(2, [(0, 4.0), (0, 4.0), (2, 1.0)])
    assert third == pytest.approx((3.5, 1.5))
    assert first == second == pytest.approx((4.5, 4.5))


def test_half_a_core_is_half_as_fast() -> None:
    assert ends(0.5, [(1, 1.0)]) == [pytest.approx((3.0, 2.0))]


@given(
    cores=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    pieces=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), min_size=1, max_size=12),
)
def test_nothing_is_faster_than_alone_nor_slower_than_on_one_core(cores: float, pieces: list) -> None:
    found = ends(cores, pieces)
    total = sum(seconds for _, seconds in pieces)
    for (at, seconds), (end, took) in zip(pieces, found, strict=True):
        assert end == pytest.approx(at + took, abs=1e-6)
        assert seconds - 1e-6 <= took <= total + 1e-6


def test_no_core_is_refused() -> None:
    with pytest.raises(UsageError, match=r"machine\.cores must be above 0"):
        SharedCores(VirtualClock(), 0)
