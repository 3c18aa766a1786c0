"""The gateway splits blocks that a worker has not seen by whether another worker had them, and loses no token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.causes import ComputeCause, ComputedTokens
from kvferry.gateway.decide.lifecycle.computed_causes import refined, summed

FIRST, OTHER = ComputeCause.FIRST_SEEN, ComputeCause.ON_ANOTHER_WORKER


@pytest.mark.parametrize(
    ("num_elsewhere", "expected"),
    [
        (0, {FIRST: 64}),
        (32, {FIRST: 64}),
        (48, {OTHER: 16, FIRST: 48}),
        (96, {OTHER: 64}),
        (4096, {OTHER: 64}),
    ],
)
def test_blocks_that_another_worker_had(num_elsewhere: int, expected: dict[ComputeCause, int]) -> None:
    """A prompt of 100 tokens: 32 are cached, 64 were not seen, and 4 are in the last block."""
    computed = (ComputedTokens(FIRST, 64), ComputedTokens(ComputeCause.PARTIAL_BLOCK, 4))
    found = refined(computed, num_prompt=100, block_tokens=16, num_elsewhere=num_elsewhere)
    assert {one.cause: one.num_tokens for one in found} == {**expected, ComputeCause.PARTIAL_BLOCK: 4}


@given(
    st.lists(st.builds(ComputedTokens, st.sampled_from(ComputeCause), st.integers(1, 300), st.floats(0, 9))),
    st.integers(0, 300),
    st.integers(1, 64),
    st.integers(0, 400),
)
def test_no_token_is_lost(computed: list[ComputedTokens], num_prompt: int, block: int, elsewhere: int) -> None:
    found = refined(computed, num_prompt=num_prompt, block_tokens=block, num_elsewhere=elsewhere)
    assert all(one.num_tokens > 0 for one in found)
    assert sum(one.num_tokens for one in found) == sum(one.num_tokens for one in computed)
    total = summed(found)
    assert len({one.cause for one in total}) == len(total)
    assert sum(one.num_tokens for one in total) == sum(one.num_tokens for one in found)
