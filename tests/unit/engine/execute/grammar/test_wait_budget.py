"""The time for which steps wait for masks is a bounded share of all time."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.execute.grammar.wait_budget import WaitBudget

BURST, SHARE = 0.002, 0.05


def test_the_first_wait_may_take_the_whole_burst() -> None:
    budget = WaitBudget(BURST, SHARE)
    assert budget.available(100.0) == BURST
    budget.spend(BURST)
    assert budget.available(100.0) == 0.0


def test_an_overlong_wait_is_paid_for_before_the_next() -> None:
    budget = WaitBudget(BURST, SHARE)
    budget.available(0.0)
    budget.spend(2 * BURST)
    assert budget.available(BURST / SHARE) == 0.0
    assert budget.available(1.5 * BURST / SHARE) > 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_waits_take_at_most_the_burst_and_the_share(steps: list[tuple[float, bool]]) -> None:
    budget, now, waited = WaitBudget(BURST, SHARE), 0.0, 0.0
    for pause, is_late in steps:
        now += pause
        wait = budget.available(now)
        assert 0.0 <= wait <= BURST
        if is_late:
            budget.spend(wait)
            now += wait
            waited += wait
        assert waited <= BURST + SHARE * now + 1e-9
