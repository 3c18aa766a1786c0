"""The record of removed blocks: it knows the last names exactly, within a fixed memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import BlockHash
from kvferry.engine.schedule.blocks.removed_blocks import (
    DEFAULT_CAPACITY,
    MAX_CAPACITY,
    UNKNOWN,
    RemovedBlocks,
    capacity_for,
)


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def found(removed: RemovedBlocks, number: int) -> tuple[bool, float] | None:
    """Return whether a block was dropped, and the seconds since then; `None` if its removal is not known."""
    stamp = removed.stamp(name_of(number))
    return None if stamp == UNKNOWN else (removed.is_dropped(stamp), removed.age(stamp))


def test_a_removal_is_found_with_its_kind_and_age() -> None:
    removed = RemovedBlocks()
    removed.at(100.0)
    removed.add(name_of(1))
    removed.at(107.9)
    removed.add(name_of(2), is_dropped=True)
    removed.at(110.0)
    assert found(removed, 1) == (False, 10.0)
    assert found(removed, 2) == (True, 3.0)
    assert found(removed, 3) is None
    removed.add(name_of(2))
    assert found(removed, 2) == (False, 0.0)


def test_without_a_clock_ages_are_0() -> None:
    removed = RemovedBlocks()
    removed.add(name_of(0))
    assert found(removed, 0) == (False, 0.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 30), max_size=120))
def test_the_last_names_are_known_and_no_others_invented(capacity: int, numbers: list[int]) -> None:
    removed = RemovedBlocks(capacity)
    before = removed.num_bytes
    for count, number in enumerate(numbers, 1):
        removed.add(name_of(number))
        known = {n for n in range(1, 31) if found(removed, n) is not None}
        assert known <= set(numbers[:count])
        assert set(numbers[max(0, count - capacity) : count]) <= known
        assert len(removed) <= 4 * capacity
    assert removed.num_bytes == before


def test_equal_slots_do_not_hide_each_other() -> None:
    removed = RemovedBlocks(4)
    numbers = [n for n in range(1000) if hash(name_of(n)) % 8 == 3]  # the same of eight slots
    for number in numbers[:4]:
        removed.add(name_of(number))
    assert all(found(removed, number) for number in numbers[:4])
    assert found(removed, numbers[4]) is None


def test_the_memory_follows_the_pool_within_bounds() -> None:
    assert capacity_for(10) == DEFAULT_CAPACITY
    assert capacity_for(10_000) == 40_000
    assert capacity_for(1 << 30) == MAX_CAPACITY
    assert RemovedBlocks(MAX_CAPACITY).num_bytes == 48 * MAX_CAPACITY
    with pytest.raises(ValueError, match="capacity must be positive, not 0"):
        RemovedBlocks(0)
