"""Restart delays: they grow, are bounded, and are reset after a long run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.stack.plan.restarts import RestartHistory, RestartPolicy, death_text


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


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "exited with status 1"),
        (-9, "was ended by SIGKILL (the kernel ends processes when memory runs out)"),
        (-11, "was ended by SIGSEGV"),
        (-7, ("was ended by SIGBUS (a file of the model was truncated while it was in use, or its disk failed; replace "
         "models by new files, and do not write to files that are served)")),
        (-1000, "exited with status -1000"),
    ],
)  # fmt: skip
def test_the_line_about_an_exit_names_the_signal_and_its_usual_cause(status: int, said: str) -> None:
    assert death_text("prefill-0", status, 0.2) == f"prefill-0 {said}; restarting in 0.2 s"


def test_the_line_about_an_exit_has_its_error() -> None:
    line = death_text("decode-1", 1, 1.0, "no memory")
    assert line == "decode-1 exited with status 1: no memory; restarting in 1.0 s"
