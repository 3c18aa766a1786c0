"""Pooling takes each row that it needs once, for any chunks, and reuses no cached token before a row that it still
needs.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequest, InvariantBroken
from kvferry.core.inference.pooling import Pooling, PoolingParams, pooling_named
from kvferry.engine.schedule.step.prompt_pooling import NO_ROWS, PromptPooling
from kvferry.text.requests.pooling import check_dimensions, cosine

SIZE = 5


def hidden_of(position: int) -> np.ndarray:
    return np.arange(SIZE) + 10.0 * position - 3


def rows_of(pooling: Pooling, count: int) -> list[int]:
    return {Pooling.LAST: [count - 1], Pooling.MEAN: list(range(count)), Pooling.CLS: [0]}[pooling]


@given(
    pooling=st.sampled_from(list(Pooling)),
    count=st.integers(1, 30),
    chunks=st.lists(st.integers(1, 9), min_size=1),
    restarts=st.sets(st.integers(0, 20)),
)
def test_each_row_is_pooled_once_in_any_chunks_and_after_restarts(
    pooling: Pooling, count: int, chunks: list[int], restarts: set[int]
) -> None:
    made = PromptPooling(PoolingParams(pooling, normalize=False), count)
    seen: list[int] = []
    computed, turn = 0, 0
    while computed < count:
        size = min(chunks[turn % len(chunks)], count - computed)
        positions = made.positions(computed, size)
        if positions:
            made.add(np.sum([hidden_of(p) for p in positions], axis=0), positions)
        seen += positions
        computed += size
        turn += 1
        if turn in restarts and computed < count:
            computed = made.num_reusable if turn % 2 else 0
            assert computed <= count - 1
    assert seen == rows_of(pooling, count)
    np.testing.assert_allclose(made.vector(), np.mean([hidden_of(p) for p in seen], axis=0), rtol=1e-6)


@pytest.mark.parametrize(("pooling", "reusable"), [(Pooling.LAST, 8), (Pooling.MEAN, 0), (Pooling.CLS, 0)])
def test_rows_that_are_needed_are_not_taken_from_a_cache(pooling: Pooling, reusable: int) -> None:
    made = PromptPooling(PoolingParams(pooling), 9)
    assert made.num_reusable == reusable
    assert made.may_load is (pooling is Pooling.LAST)
    made.add(hidden_of(0), range(8, 9) if pooling is Pooling.LAST else range(1))
    assert made.num_reusable == (1 if pooling is Pooling.MEAN else 8)


def test_a_vector_is_shortened_first_and_then_normalized() -> None:
    values = np.array([3.0, 4.0, 100.0])
    for normalize, expected in ((True, [0.6, 0.8]), (False, [3.0, 4.0])):
        made = PromptPooling(PoolingParams(Pooling.LAST, normalize, dimensions=2), 1)
        made.add(values, range(1))
        assert made.vector().dtype == np.float32
        np.testing.assert_allclose(made.vector(), expected, rtol=1e-6)


def test_a_vector_of_zeros_is_not_normalized() -> None:
    made = PromptPooling(PoolingParams(Pooling.LAST), 1)
    made.add(np.zeros(3), range(1))
    assert made.vector().tolist() == [0, 0, 0]
    assert cosine(made.vector(), np.ones(3, np.float32)) == 0.0


def test_missing_rows_are_a_broken_invariant() -> None:
    made = PromptPooling(PoolingParams(Pooling.MEAN), 4)
    assert made.positions(7, 2) == NO_ROWS
    with pytest.raises(InvariantBroken):
        made.vector()
    with pytest.raises(InvariantBroken):
        made.add(hidden_of(1), range(1, 2))
    with pytest.raises(InvariantBroken):
        made.add(None, range(1))


@pytest.mark.parametrize("dimensions", [0, -1, 49])
def test_dimensions_have_a_range(dimensions: int) -> None:
    with pytest.raises(InvalidRequest, match="between 1 and 48") as caught:
        check_dimensions(dimensions, 48)
    assert caught.value.field == "dimensions"
    check_dimensions(48, 48)
    check_dimensions(None, 48)


def test_an_unknown_pooling_is_named() -> None:
    with pytest.raises(InvalidRequest, match="last, mean, cls"):
        pooling_named("max")


def test_cosines_stay_in_their_range() -> None:
    vector = np.full(7, 1 / 3, np.float32)
    assert cosine(vector, vector) == pytest.approx(1.0)
    assert -1.0 <= cosine(vector, -vector) <= 1.0
