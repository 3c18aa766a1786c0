"""Sizes of captured steps: each batch has a size with little padding; their memory is computed before the capture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.schedule.step.graph_sizes import fit, max_tokens, memory, piece_bytes, sizes, token_sizes
from kvferry.model.shapes import shape_of


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_the_sizes(most: int, expected: tuple[int, ...]) -> None:
    assert sizes(most) == expected


def test_large_batches_run_as_they_are_and_make_no_more_sizes() -> None:
    assert sizes(4096) == sizes(512)
    assert len(sizes(512)) < 32
    assert fit(513, sizes(4096)) is None


@given(most=st.integers(1, 512), share=st.floats(0.0, 1.0))
def test_every_batch_has_a_size_and_little_of_it_is_padding(most: int, share: float) -> None:
    rows = max(1, round(share * most))
    size = fit(rows, sizes(most))
    assert size is not None
    assert rows <= size <= most
    assert size < 2 * rows or size == 1
    assert size - rows < (8 if rows <= 64 else 32)


def test_only_sizes_that_are_ready_are_used() -> None:
    assert fit(3, [64]) == 64
    assert fit(3, []) is None


@given(size=st.integers(1, 512), longest=st.integers(1, 1 << 20), pool=st.integers(1, 1 << 24))
def test_contexts_are_bounded_so_that_memory_is(size: int, longest: int, pool: int) -> None:
    tokens = max_tokens(size, longest, pool)
    assert 1 <= tokens <= min(longest, pool)
    assert tokens == min(longest, pool) or tokens * size <= 1 << 22


def test_steps_of_an_8b_model_take_less_than_a_gibibyte() -> None:
    shape = shape_of("llama-3.1-8b")
    tokens = max_tokens(64, shape.max_model_tokens, 1 << 20)
    bound = memory(shape, sizes(64), value_bytes=2, tokens=tokens, width=8192)
    assert tokens == 65536
    # Parts of attention: 64 rows, 32 heads, 128 partitions of 129 numbers.
    assert 64 * 32 * 128 * 129 * 4 < bound.scratch_bytes < 256 << 20
    assert 64 * 128256 * 4 < bound.static_bytes < 64 << 20
    assert bound.max_bytes == bound.scratch_bytes + bound.static_bytes


def test_pieces_are_for_steps_that_take_longer_to_launch_than_to_compute() -> None:
    rows = token_sizes()
    assert rows == (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert 16 << 20 < piece_bytes(shape_of("llama-3.1-8b"), rows, value_bytes=2) < 128 << 20
