"""Restart delays: they grow, are bounded, and are reset after a long run."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.stack.plan.restarts import RestartHistory, RestartPolicy


def test_quick_exits_increase_the_delay_and_a_long_run_resets_it() -> None:
    policy, history = RestartPolicy(first_seconds=0.2, max_seconds=1.0, calm_seconds=30), RestartHistory()
    pauses = []
    for ran in (1, 1, 1, 1, 31, 1):
        history, pause = history.after_death(policy, ran)
        pauses.append(pause)
    assert pauses == [0.2, 0.4, 0.8, 1.0, 0.2, 0.4]


@given(st.lists(st.floats(0, 100), max_size=200))
def test_a_pause_is_always_within_bounds(runs: list[float]) -> None:
    policy, history = RestartPolicy(), RestartHistory()
    for ran in runs:
        history, pause = history.after_death(policy, ran)
        assert policy.first_seconds <= pause <= policy.max_seconds
