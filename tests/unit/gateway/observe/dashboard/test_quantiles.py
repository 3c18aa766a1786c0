"""Quantiles of histogram deltas, against the observations themselves."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.observe.dashboard.quantiles import Buckets, quantiles

BOUNDS = (0.1, 0.2, 0.5, 1.0, math.inf)
NONE = Buckets(BOUNDS, (0, 0, 0, 0, 0))


def reading(values: list[float]) -> Buckets:
    return Buckets(BOUNDS, tuple(float(sum(value <= bound for value in values)) for bound in BOUNDS))


def test_values_inside_a_bucket_are_taken_as_evenly_spread() -> None:
    assert quantiles(NONE, Buckets(BOUNDS, (0, 10, 10, 10, 10)), (0.5, 0.95, 1.0)) == pytest.approx([0.15, 0.195, 0.2])
    assert quantiles(NONE, Buckets(BOUNDS, (4, 4, 4, 4, 4)), (0.5,)) == pytest.approx([0.05])


def test_only_the_observations_between_the_readings_count() -> None:
    earlier = reading([0.05] * 1000)
    later = reading([0.05] * 1000 + [0.3] * 4)
    assert quantiles(earlier, later, (0.5,)) == pytest.approx([0.35])


def test_a_quantile_in_the_infinite_bucket_is_the_last_finite_bound() -> None:
    assert quantiles(NONE, reading([7.0, 8.0]), (0.5,)) == [1.0]


def test_without_observations_or_after_a_reset_there_is_no_quantile() -> None:
    assert quantiles(NONE, NONE, (0.5, 0.95)) == [None, None]
    assert quantiles(reading([0.3] * 5), reading([0.3]), (0.5,)) == [None]
    assert quantiles(reading([0.05, 0.05]), reading([0.3] * 5), (0.5,)) == [None]
    assert quantiles(Buckets((), ()), Buckets((), ()), (0.5,)) == [None]


def test_readings_of_different_histograms_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        quantiles(NONE, Buckets((1.0,), (0,)), (0.5,))


@given(before=st.lists(st.floats(0, 3)), values=st.lists(st.floats(0, 1), min_size=1), share=st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_the_value_of_its_rank(
    before: list[float], values: list[float], share: float
) -> None:
    (found,) = quantiles(reading(before), reading(before + values), (share,))
    assert found is not None
    exact = sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]
    bucket = bisect_left(BOUNDS, exact)
    low = BOUNDS[bucket - 1] if bucket else 0.0
    assert low - 1e-6 <= found <= BOUNDS[bucket] + 1e-6


@given(values=st.lists(st.floats(0, 3), min_size=1), shares=st.lists(st.floats(0, 1), min_size=2))
def test_quantiles_grow_with_their_share(values: list[float], shares: list[float]) -> None:
    found = quantiles(NONE, reading(values), sorted(shares))
    assert found == sorted(found)  # type: ignore[type-var]
