"""Step plans become the arrays that the kernels expect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.execute.tensors.batch import StepBatch, build_batch
from kvferry.engine.schedule.step.step import ScheduledSequence, StepPlan


def sequence(tokens: list[int], computed: int, scheduled: int, blocks: list[int]) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId(f"r{blocks[0] if blocks else 0}"),
        token_ids=tokens,
        num_prompt=len(tokens),
        num_computed=computed,
        num_scheduled=scheduled,
        block_ids=[BlockId(b) for b in blocks],
        num_sampled=int(computed + scheduled == len(tokens)),
        sampling=SamplingParams(temperature=0),
        sample_index=0,
    )


def build(*sequences: ScheduledSequence) -> StepBatch:
    return build_batch(StepPlan(tuple(sequences)), block_tokens=4)


def test_slots_of_three_prompts_and_of_their_next_tokens() -> None:
    # Gordic, "Inside vLLM", 2025, slot mapping: prompts of 5, 7 and 3 tokens, B = 4.
    prompts = build(
        sequence(list(range(5)), 0, 5, [1, 2]),
        sequence(list(range(10, 17)), 0, 7, [3, 4]),
        sequence(list(range(20, 23)), 0, 3, [5]),
    )
    assert prompts.slots.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]
    assert prompts.positions.tolist() == [*range(5), *range(7), *range(3)]
    assert prompts.token_ids.tolist() == [*range(5), *range(10, 17), *range(20, 23)]
    assert prompts.sample_rows.tolist() == [4, 11, 14]
    assert prompts.queries.tolist() == [5, 7, 3]
    decode = build(
        sequence(list(range(6)), 5, 1, [1, 2]),
        sequence(list(range(8)), 7, 1, [3, 4]),
        sequence(list(range(4)), 3, 1, [5]),
    )
    assert decode.slots.tolist() == [9, 19, 23]
    assert decode.positions.tolist() == [5, 7, 3]
    assert decode.contexts.tolist() == [6, 8, 4]


def test_only_sequences_that_sample_give_a_row() -> None:
    batch = build(sequence(list(range(9)), 2, 3, [7, 8, 9]), sequence([1, 2], 1, 1, [0]))
    assert batch.sample_rows.tolist() == [3]
    assert batch.block_tables.tolist() == [[7, 8], [0, 0]]


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=6))
def test_a_step_of_single_rows_has_the_arrays_of_the_general_case(sequences: list[tuple[int, bool]]) -> None:
    ones = [
        sequence(list(range(100 * i, 100 * i + computed + 1 + more)), computed, 1, list(range(10 * i, 10 * i + 10)))
        for i, (computed, more) in enumerate(sequences)
    ]
    other = sequence(list(range(900, 940)), 0, 40, list(range(90, 100)))
    alone, beside = build(*ones), build(*ones, other)
    n = len(ones)
    for ours, theirs in (
        (alone.token_ids, beside.token_ids),
        (alone.positions, beside.positions),
        (alone.slots, beside.slots),
    ):
        assert ours.dtype == theirs.dtype
        assert ours.flags.c_contiguous
        assert ours.tolist() == theirs[:n].tolist()
    assert alone.sample_rows.tolist() == beside.sample_rows.tolist()[:-1]
    assert alone.queries.tolist() == [1] * n
    assert alone.contexts.tolist() == beside.contexts[:n].tolist()
    width = alone.block_tables.shape[1]
    assert alone.block_tables.tolist() == beside.block_tables[:n, :width].tolist()


@pytest.mark.parametrize(
    "broken",
    [
        sequence(list(range(9)), 0, 9, [1, 2]),
        sequence([1, 2], 1, 2, [1]),
        sequence([1, 2], 2, 0, [1]),
    ],
)
def test_a_plan_that_does_not_fit_its_sequence_breaks_the_invariant(broken: ScheduledSequence) -> None:
    with pytest.raises(InvariantBroken, match="scheduled after"):
        build(broken)
