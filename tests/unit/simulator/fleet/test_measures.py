"""Histograms of simulations: percentiles to half a percent; merged histograms equal one of all values."""

from random import Random

import pytest

from kvferry.simulator.fleet.measures import Measures, WeightedHistogram


def filled(seed: int, count: int) -> tuple[WeightedHistogram, list[float]]:
    draw, histogram = Random(seed), WeightedHistogram()
    values = [draw.lognormvariate(-3.0, 1.5) for _ in range(count)]
    for value in values:
        histogram.add(value)
    return histogram, sorted(values)


@pytest.mark.parametrize("percent", [50, 90, 99])
def test_a_percentile_is_within_a_percent_of_the_exact_one(percent: int) -> None:
    histogram, values = filled(1, 5000)
    assert histogram.percentile(percent) == pytest.approx(values[int(percent / 100 * len(values)) - 1], rel=0.011)
    assert histogram.mean == pytest.approx(sum(values) / len(values))


def test_merged_histograms_are_those_of_all_values() -> None:
    one, _ = filled(1, 400)
    other, _ = filled(2, 600)
    both = WeightedHistogram()
    for histogram in (one, other):
        both.merge(histogram)
    assert both.count == 1000
    assert both.total == pytest.approx(one.total + other.total)
    assert one.percentile(50) != other.percentile(50)
    assert min(one.percentile(50), other.percentile(50)) <= both.percentile(50)
    assert both.percentile(50) <= max(one.percentile(50), other.percentile(50))


def test_a_weight_counts_like_repeated_values_and_shares_end_at_one() -> None:
    weighted, repeated = WeightedHistogram(), WeightedHistogram()
    for value, weight in ((0.01, 3), (0.5, 1)):
        weighted.add(value, weight)
        for _ in range(weight):
            repeated.add(value)
    assert weighted.in_ms() == repeated.in_ms()
    assert weighted.shares()[-1] == (0.5, 1.0)


def test_an_empty_histogram_has_zeros() -> None:
    assert WeightedHistogram().in_ms() == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert Measures().hit_rate == Measures().goodput == 0.0
