"""Philox against the authors' known-answer vectors, and the properties on which the sampler depends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected  # type: ignore[arg-type]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_draw_is_in_the_unit_interval_and_repeatable(seed: int, stream: int, position: int) -> None:
    draw = uniform(seed, stream, position)
    assert 0.0 <= draw < 1.0
    assert draw == uniform(seed, stream, position)


def test_seeds_streams_and_positions_are_independent_dimensions() -> None:
    draws = {uniform(s, n, p) for s in range(8) for n in range(8) for p in range(8)}
    assert len(draws) == 512


def test_draws_fill_the_interval_evenly() -> None:
    bins = [0] * 10
    for position in range(10_000):
        bins[int(10 * uniform(7, 0, position))] += 1
    assert max(abs(count - 1000) for count in bins) < 150  # five standard deviations
