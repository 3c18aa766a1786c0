"""The block pool: order of allocation, reference counts, content after release, epochs."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool


def test_blocks_are_taken_least_recently_freed_first_and_a_sequences_last_block_before_its_first() -> None:
    pool = BlockPool(6)
    first = pool.allocate(3)
    second = pool.allocate(3)
    assert first == [0, 1, 2]
    assert second == [3, 4, 5]
    pool.release(second)
    pool.release(first)
    assert pool.free_list() == [5, 4, 3, 2, 1, 0]


def test_a_wanted_block_leaves_the_middle_of_the_free_list_with_its_content() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    assert taken is not None
    pool.release(taken)
    epoch = pool.epochs[1]
    pool.hold([BlockId(1)])
    assert pool.free_list() == [3, 2, 0]
    assert pool.epochs[1] == epoch, "hold keeps the content, so the epoch does not change"


def test_an_epoch_rises_when_a_block_is_taken_for_new_content() -> None:
    reused: list[int] = []
    pool = BlockPool(2, on_reuse=reused.append)
    taken = pool.allocate(1)
    assert taken == [0]
    before = pool.epochs[0]
    pool.release(taken)
    assert pool.epochs[0] == before, "a free block keeps its content until it is allocated"
    assert pool.allocate(2) == [1, 0]
    assert pool.epochs[0] == before + 1
    assert reused == [0, 1, 0]


def test_a_block_that_a_transport_may_still_write_is_in_quarantine_until_the_writer_ends() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    assert taken is not None
    pool.begin_write(taken)
    pool.release(taken)
    assert pool.num_quarantined == 1
    assert pool.allocate(2) is None, "a quarantined block is not allocated"
    with pytest.raises(InvariantBroken, match="quarantine"):
        pool.hold(taken)
    pool.check_integrity()
    pool.end_write(taken)
    assert pool.is_idle


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.is_idle
    assert [pool.epochs[i] for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("wrong", ["release", "end_write", "begin_write"])
def test_unbalanced_calls_are_refused(wrong: str) -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantBroken):
        getattr(pool, wrong)([BlockId(0)])


@pytest.mark.parametrize(("num_blocks", "order"), [(0, None), (3, [0, 1]), (2, [0, 0])])
def test_an_impossible_pool_is_refused(num_blocks: int, order: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"block|order"):
        BlockPool(num_blocks, free_order=order)


def test_integrity_notices_a_lost_block() -> None:
    pool = BlockPool(3)
    pool._unlink(1)
    with pytest.raises(InvariantBroken, match="free list"):
        pool.check_integrity()


def test_a_pool_is_refused_that_would_not_cover_its_pages() -> None:
    for arguments, says in [
        ({"num_blocks": 0}, "num_blocks must be positive, not 0"),
        ({"num_blocks": 2, "free_order": [0, 0]}, "every block once"),
        ({"num_blocks": 2, "epochs": [0]}, "1 entries for 2 blocks"),
    ]:
        with pytest.raises(ValueError, match=says):
            BlockPool(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pool: setattr(pool, "num_free", 1), "counted 1"),
        (lambda pool: setattr(pool, "num_quarantined", 1), "0 blocks in quarantine, counted 1"),
        (lambda pool: pool._refs.__setitem__(0, 1), "free list has 2 blocks"),
        (lambda pool: (pool._refs.__setitem__(1, -1), pool._unlink(1)), "negative"),
    ],
    ids=["free count", "quarantine count", "a held page in the list", "negative"],
)
def test_the_integrity_check_detects_wrong_counts(spoil: Callable[[BlockPool], object], says: str) -> None:
    pool = BlockPool(2)
    pool.check_integrity()
    spoil(pool)
    with pytest.raises(InvariantBroken, match=says):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls keeps invariant I1, and no block is allocated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[list[BlockId]] = []
        self.written: list[list[BlockId]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        taken = self.pool.allocate(count)
        owned = {b for blocks in [*self.held, *self.written] for b in blocks}
        if taken is None:
            assert count > 12 - len(owned)
            return
        assert not owned & set(taken)
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.hold(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def begin_write(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.begin_write(blocks)
        self.written.append(list(blocks))

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        self.pool.end_write(self.written.pop(data.draw(st.integers(0, len(self.written) - 1))))

    @invariant()
    def laws_hold(self) -> None:
        self.pool.check_integrity()
        owned = {b for blocks in self.held for b in blocks}
        quarantined = {b for blocks in self.written for b in blocks} - owned
        assert self.pool.num_held == len(owned)
        assert self.pool.num_quarantined == len(quarantined)


TestPoolMachine = PoolMachine.TestCase
