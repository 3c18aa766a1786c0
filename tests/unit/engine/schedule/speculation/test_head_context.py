"""Hidden states that a head reads: consecutive tokens up to the last one, whether the engine recomputes, drops or skips
rows.
"""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.engine.schedule.speculation.head_context import MAX_LAG_ROWS, MAX_NEW_ROWS, Floats, HeadContext


def rows(first: int, end: int) -> Floats:
    """Return a hidden state per position, which is the position."""
    return np.arange(first, end, dtype=np.float32)[:, None]


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-3, 3), st.integers(0, 90)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
        st.tuples(st.just("keep"), st.integers(0, 40), st.just(0)),
    ),
    max_size=60,
)


@given(_EVENTS)
@example([("add", 0, 2), ("take", 0, 0), ("restart", 0, 0), ("add", -2, 1)])  # begins again before the last row
def test_pending_rows_are_consecutive_and_end_with_the_last_known_one(events: list[tuple[str, int, int]]) -> None:
    context, end = HeadContext(), 0
    for event, number, count in events:
        if event == "add":
            first = max(0, end + number)
            is_new = first > end or not context.num_read + context.num_pending
            context.add(first, rows(first, first + count))
            end = first + count if is_new else max(end, first + count)
            if context.num_read + context.num_pending:
                assert context.end == end
        elif event == "keep":
            context.keep(number)
            assert context.num_pending <= number
        elif event == "restart":
            context.restart()
        elif context.num_pending:
            first, expected = context.first, context.num_pending
            start = context.start
            assert context.take()[:, 0].tolist() == list(range(first, first + expected))
            assert (context.start, context.end, context.num_pending) == (start, first + expected, 0)
        assert 0 <= context.start <= context.first <= context.end
        assert context.num_pending <= 2 * MAX_NEW_ROWS + 90


def test_a_gap_starts_a_new_context() -> None:
    context = HeadContext()
    context.add(0, rows(0, 5))
    context.take()
    context.add(8, rows(8, 10))
    assert (context.start, context.first, context.end) == (8, 8, 10)
    assert context.take()[:, 0].tolist() == [8, 9]


def test_rows_that_are_computed_again_are_left_out() -> None:
    context = HeadContext()
    context.add(3, rows(3, 9))
    context.take()
    context.add(0, rows(0, 4))
    context.add(4, rows(4, 11))
    assert (context.start, context.take()[:, 0].tolist()) == (3, [9, 10])


def test_a_long_pause_begins_the_context_with_the_last_rows() -> None:
    context = HeadContext()
    context.add(0, rows(0, 20))
    context.take()
    for position in range(20, 20 + 5 * MAX_LAG_ROWS):
        context.add(position, rows(position, position + 1))
        assert context.num_pending <= 2 * MAX_LAG_ROWS
    context.keep(MAX_LAG_ROWS)
    assert (context.num_read, context.num_pending, context.end) == (0, MAX_LAG_ROWS, 20 + 5 * MAX_LAG_ROWS)


def test_states_are_copied_since_a_step_may_return_those_of_many_sequences() -> None:
    context, step = HeadContext(), rows(0, 4)
    context.add(0, step)
    step[:] = -1.0
    assert context.take()[:, 0].tolist() == [0, 1, 2, 3]
