"""Hedged loads: the quantile is exact, and hedges stay within their budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.tiers.policy.hedge import LOADS_PER_HEDGE, MIN_SAMPLES, HedgePolicy, Quantile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.floats(0.01, 1.0), st.integers(1, 40))
def test_the_quantile_is_that_of_the_last_samples(samples: list[float], share: float, window: int) -> None:
    quantile = Quantile(share, window)
    for sample in samples:
        quantile.add(sample)
    recent = sorted(samples[-window:])
    value = quantile.value()
    assert len(quantile) == len(recent)
    assert value in recent
    assert sum(s <= value for s in recent) >= share * len(recent) - 1e-9
    assert sum(s < value for s in recent) < share * len(recent) + 1e-9


def test_known_quantiles() -> None:
    quantile = Quantile(0.95, 100)
    assert quantile.value() is None
    for sample in range(1, 101):
        quantile.add(float(sample))
    assert quantile.value() == 95.0
    with pytest.raises(ValueError, match="share must be above 0"):
        Quantile(0.0)
    with pytest.raises(ValueError, match="share must be above 0"):
        Quantile(0.5, 0)


def test_no_load_is_hedged_before_the_minimum_number_of_samples() -> None:
    policy = HedgePolicy()
    for _ in range(MIN_SAMPLES - 1):
        policy.loaded(1.0)
    assert policy.wait_seconds() is None
    policy.loaded(2.0)
    assert policy.wait_seconds() == 1.0


def test_the_budget_comes_from_loads_that_were_not_hedged() -> None:
    policy = HedgePolicy()
    for _ in range(1000):
        policy.loaded(1.0)
    spent = 0
    while policy.spend():
        spent += 1
        policy.loaded(50.0, hedged=True, by_second=True)
    assert spent == 3, "the unused budget is capped"
    assert policy.wait_seconds() is None
    assert (policy.num_hedges, policy.num_won) == (3, 3)
    for _ in range(LOADS_PER_HEDGE):
        policy.loaded(1.0)
    assert policy.wait_seconds() == 1.0, "hedged loads are not counted as samples"
    assert policy.spend()
    assert not policy.spend()
