"""Commitments: dispatched work is counted until a status includes it, and leaves no state afterwards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.gateway.decide.estimates.estimates import Commitment, Commitments


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "p", "q"]), st.integers(0, 99), st.sampled_from(["", "p", "d"]), st.integers(0, 9)
        ),
        max_size=20,
    ),
    st.randoms(),
)
def test_the_counts_are_the_sums_of_what_is_not_released(parts, random):
    commitments = Commitments(ManualClock())
    held = [Commitment(*part) for part in parts]
    for commitment in held:
        commitments.add(commitment)
    random.shuffle(held)
    while held:
        assert commitments.count == len(held)
        for address in ("p", "q", "d"):
            waiting = [one for one in held if one.decode_address == address]
            assert commitments.sequences(address) == len(waiting)
            assert commitments.blocks(address) == sum(one.decode_blocks for one in waiting)
            computing = [one for one in held if one.prompt_address == address]
            assert commitments.prompt_tokens(address, 1e-3) == sum(one.prompt_tokens for one in computing)
        commitments.release(held.pop())
    assert commitments.count == 0
    assert not commitments._workers


def test_the_oldest_prompt_progresses_with_time_and_the_others_wait():
    clock = ManualClock()
    commitments = Commitments(clock)
    first, second = Commitment("p", 100), Commitment("p", 50)
    commitments.add(first)
    clock.advance(0.5)
    commitments.add(second)
    assert commitments.prompt_tokens("p", 0.01) == pytest.approx(100)
    clock.advance(10.0)
    assert commitments.prompt_tokens("p", 0.01) == pytest.approx(50), (
        "the first prompt is half computed, the second has not begun"
    )
    commitments.release(first)
    assert commitments.prompt_tokens("p", 0.01) == pytest.approx(50)
    clock.advance(0.2)
    assert commitments.prompt_tokens("p", 0.01) == pytest.approx(30)


def test_the_queue_is_the_larger_of_what_was_dispatched_and_what_is_left_of_the_report():
    clock = ManualClock()
    commitments = Commitments(clock)
    begun = clock.monotonic()

    def queued(seconds_per_token: float) -> float:
        return commitments.queued_tokens("p", seconds_per_token, reported=300, reported_at=begun)

    commitments.add(Commitment("p", 200))
    assert queued(0.01) == pytest.approx(300)
    clock.advance(0.5)
    assert queued(0.01) == pytest.approx(250)
    clock.advance(1.0)
    assert queued(0.01) == pytest.approx(150)
    commitments.add(Commitment("p", 400))
    assert queued(0.01) == pytest.approx(450), "the report has 150 left"
    assert queued(0.0) == 600, "no progress without an estimate"


def test_a_commitment_that_is_not_counted_cannot_be_released():
    with pytest.raises(KeyError):
        Commitments(ManualClock()).release(Commitment("p", 1))
