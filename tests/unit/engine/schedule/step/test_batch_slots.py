"""After each step's writes, the device's block tables equal the scheduler's; no cell is written twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.schedule.step.batch_slots import BatchSlots
from kvferry.engine.schedule.step.step import ScheduledSequence

GREEDY = SamplingParams(temperature=0)
WIDTH = 8


def scheduled(name: str, blocks: list[int], version: int, computed: int = 0, count: int = 1) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId(name),
        token_ids=[7] * (computed + count),
        num_prompt=1,
        num_computed=computed,
        num_scheduled=count,
        block_ids=[BlockId(b) for b in blocks],
        num_sampled=1,
        sampling=GREEDY,
        sample_index=0,
        table_version=version,
    )


STEPS = st.lists(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.sampled_from(["go on", "grow", "restart", "unknown"]), st.integers(1, 3)),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=12,
)


@given(STEPS)
def test_tables_follow_any_changes_of_sequences(steps: list[dict[str, tuple[str, int]]]) -> None:
    places, version, next_block = BatchSlots(3, WIDTH), 0, 0
    device = [-1] * (4 * WIDTH)
    known: dict[str, tuple[int, list[int]]] = {}
    for step in steps:
        plan = []
        for name, (what, more) in step.items():
            held, blocks = known.get(name, (0, []))
            if name not in known or what in {"restart", "unknown"}:
                version += 1
                held, blocks = version, []
            if not blocks or what == "grow":
                fresh = range(next_block, next_block + more)
                next_block += more
                blocks = [*blocks, *fresh][:WIDTH]
            known[name] = (held, blocks)
            plan.append(scheduled(name, blocks, 0 if what == "unknown" else held))
        numbers = places.assign(plan)
        assert len(set(numbers)) == len(numbers)
        assert places.spare not in numbers
        needed = [len(s.block_ids) for s in plan]
        writes = places.changes(plan, needed)
        assert len(set(writes.cells)) == len(writes.cells)
        for cell, block in zip(writes.cells, writes.blocks, strict=True):
            device[cell] = block
        for number, s in zip(numbers, plan, strict=True):
            assert device[number * WIDTH :][: len(s.block_ids)] == s.block_ids
        if all(s.table_version for s in plan):
            assert not places.changes(plan, needed).cells


def test_only_blocks_that_a_step_needs_are_written_and_only_once() -> None:
    places = BatchSlots(2, WIDTH)
    first = scheduled("a", [7, 1, 4], 5)
    places.assign([first])
    assert places.changes([first], [2]).blocks == [7, 1]
    grown = scheduled("a", [7, 1, 4, 9], 5)
    assert places.assign([grown]) == [0]
    writes = places.changes([grown], [4])
    assert (writes.cells, writes.blocks) == ([2, 3], [4, 9])


def test_all_blocks_of_a_sequence_that_missed_a_step_are_changes() -> None:
    places = BatchSlots(2, WIDTH)
    a, b = scheduled("a", [1], 1), scheduled("b", [2], 2)
    places.assign([a, b])
    places.changes([a, b], [1, 1])
    places.assign([b])
    places.assign([b, a])
    assert places.changes([a, b], [1, 1]).blocks == [1]


def test_more_sequences_than_places_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="2 sequences in a step with 1 batch slots"):
        BatchSlots(1, WIDTH).assign([scheduled("a", [1], 1), scheduled("b", [2], 2)])


def test_a_token_on_the_device_belongs_to_one_sequence_and_position() -> None:
    places = BatchSlots(2, WIDTH)
    prompt = scheduled("a", [1], 3, computed=0, count=4)
    places.assign([prompt])
    assert not places.is_drawn_here(prompt)
    places.drew(prompt, on_device=True)
    assert places.is_drawn_here(scheduled("a", [1], 3, computed=4))
    assert not places.is_drawn_here(scheduled("a", [1], 3, computed=3))
    assert not places.is_drawn_here(scheduled("a", [1], 4, computed=4)), "the same request id with another block table"
    places.drew(prompt, on_device=False)
    assert not places.is_drawn_here(scheduled("a", [1], 3, computed=4))
    unknown = scheduled("a", [1], 0, computed=0, count=4)
    places.drew(unknown, on_device=True)
    assert not places.is_drawn_here(scheduled("a", [1], 0, computed=4)), (
        "without a table version, the sequence cannot be identified"
    )
