"""Phases of a sample: in order, adjoining, within its time."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.observe.dashboard.phases import phases

SECONDS = st.floats(0, 1000)


def named(**timing: float) -> list[tuple[str, float, float]]:
    defaults = {"queue": 0.0, "prefill": 0.0, "first_token": 0.0, "handoff": 0.0, "total": 0.0}
    return [(phase.name, phase.start, phase.end) for phase in phases(**{**defaults, **timing})]


def test_a_sample_that_was_handed_off() -> None:
    assert named(queue=1, prefill=2, first_token=4, handoff=2, total=10) == [
        ("queue", 0, 1),
        ("prefill", 1, 3),
        ("first_token", 3, 4),
        ("handoff", 4, 6),
        ("decode", 6, 10),
    ]


def test_a_sample_of_one_worker_has_no_hand_off() -> None:
    assert named(prefill=1, first_token=1, total=3) == [("prefill", 0, 1), ("decode", 1, 3)]


def test_phases_of_a_sample_without_tokens() -> None:
    assert named(queue=5, total=5) == [("queue", 0, 5)]
    assert named(queue=2, total=5) == [("queue", 0, 2), ("first_token", 2, 5)]
    assert named() == []


def test_durations_that_contradict_an_instant_are_cut_there() -> None:
    assert named(queue=3, prefill=9, first_token=4, handoff=9, total=6) == [
        ("queue", 0, 3),
        ("prefill", 3, 4),
        ("handoff", 4, 6),
    ]
    assert named(queue=1, first_token=8, total=5) == [("queue", 0, 1), ("first_token", 1, 5)]


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_phases_fill_the_time_of_a_sample(
    queue: float, prefill: float, first_token: float, handoff: float, total: float
) -> None:
    found = named(queue=queue, prefill=prefill, first_token=first_token, handoff=handoff, total=total)
    assert [start for _, start, _ in found] == [0.0, *(end for _, _, end in found[:-1])][: len(found)]
    assert all(start < end for _, start, end in found)
    assert (found[-1][2] if found else 0.0) == total
