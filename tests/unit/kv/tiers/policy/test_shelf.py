"""The shelf: slots, states, fairness between tenants, and resistance to scans."""

import hashlib

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.interface.tier import ObjectKey, Presence
from kvferry.kv.tiers.policy.frequency import FrequencySketch
from kvferry.kv.tiers.policy.shelf import Shelf


def name(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(number.to_bytes(4, "little")).digest())


def key(number: int, tenant: str = "a") -> ObjectKey:
    return ObjectKey(name(number), tenant)


def put(shelf: Shelf, number: int, tenant: str = "a") -> bool:
    if shelf.reserve(key(number, tenant)) is None:
        return False
    shelf.commit(name(number))
    return True


def here(shelf: Shelf, numbers: range | list[int]) -> list[int]:
    return [n for n in numbers if shelf.find(name(n)) is Presence.YES]


def test_an_object_is_found_only_when_it_is_whole() -> None:
    shelf = Shelf(2)
    assert shelf.find(name(1)) is Presence.NO
    assert shelf.reserve(key(1)) is not None
    assert shelf.find(name(1)) is Presence.NOT_YET
    assert shelf.reserve(key(1)) is None, "the object is being written already"
    assert shelf.pin(name(1)) is None
    shelf.commit(name(1))
    assert shelf.find(name(1)) is Presence.YES
    assert shelf.reserve(key(2)) is not None
    shelf.abandon(name(2))
    assert shelf.find(name(2)) is Presence.NO


def test_the_least_recently_used_is_evicted_and_chains_lose_their_tail_first() -> None:
    shelf = Shelf(4)
    for n in range(4):
        put(shelf, n)
    shelf.ask([name(0), name(1)])  # a prompt of two objects: 0 is the root of the chain
    for n in (10, 11, 12):
        assert put(shelf, n) is (n < 12), "1 was looked up once more often than 12"
    assert here(shelf, range(4)) == [0, 1]
    shelf.ask([name(12)])
    assert put(shelf, 12), "looked up as often as the object that is evicted"
    assert here(shelf, range(4)) == [0], "the root of a chain is evicted after the objects that depend on it"


def test_a_pinned_object_stays() -> None:
    shelf = Shelf(1)
    put(shelf, 1)
    assert shelf.pin(name(1)) == 0
    assert not put(shelf, 2)
    shelf.unpin(name(1))
    assert put(shelf, 2)
    assert here(shelf, [1, 2]) == [2]


def test_a_tenant_that_floods_evicts_itself() -> None:
    shelf = Shelf(10)
    for n in range(3):
        put(shelf, n, "quiet")
    for n in range(100, 200):
        put(shelf, n, "flood")
    assert here(shelf, range(3)) == [0, 1, 2]
    for n in range(3, 9):
        assert put(shelf, n, "quiet"), "below its equal share, a tenant evicts objects of the tenant with the most"
    assert len(here(shelf, range(9))) == 5 or len(here(shelf, range(9))) == 6


def test_a_quota_holds_even_if_there_is_room() -> None:
    shelf = Shelf(10, tenant_slots=2)
    for n in range(5):
        put(shelf, n)
    assert here(shelf, range(5)) == [3, 4]


def test_a_scan_does_not_evict_used_objects() -> None:
    shelf = Shelf(8)
    for n in range(8):
        put(shelf, n)
    for _ in range(3):
        shelf.ask([name(n) for n in range(8)])
    for n in range(1000, 1200):
        shelf.ask([name(n)])
        put(shelf, n)
    assert len(here(shelf, range(8))) >= 7
    assert shelf.num_declined >= 190


def test_misuse_is_an_error() -> None:
    shelf = Shelf(1)
    for wrong in (shelf.commit, shelf.abandon, shelf.unpin):
        with pytest.raises(InvariantBroken):
            wrong(name(1))
    put(shelf, 1)
    for wrong in (shelf.commit, shelf.abandon, shelf.unpin):
        with pytest.raises(InvariantBroken):
            wrong(name(1))
    with pytest.raises(ValueError, match="must be positive"):
        Shelf(0)


def test_counts_of_past_lookups_decay() -> None:
    sketch = FrequencySketch(16)
    for _ in range(100):
        sketch.count(name(1))
    for n in range(2, 2000):
        sketch.count(name(n))
    assert sketch.estimate(name(1)) <= 50


class ShelfMachine(RuleBasedStateMachine):
    """The shelf against a plain model of written, ready and pinned objects."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(5, tenant_slots=4)
        self.writing: dict[int, int] = {}
        self.pinned: dict[int, list[int]] = {}
        self.slots: dict[int, int] = {}

    @rule(number=st.integers(0, 12))
    def reserve(self, number: int) -> None:
        before = self.shelf.find(name(number))
        slot = self.shelf.reserve(key(number, "ab"[number % 2]))
        if slot is not None:
            assert before is Presence.NO
            assert slot not in self.writing.values()
            assert slot not in [s for n, s in self.slots.items() if n in self.pinned]
            self.writing[number] = slot

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_whole=st.booleans())
    def finish(self, data: st.DataObject, is_whole: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(number)
        if is_whole:
            self.shelf.commit(name(number))
            self.slots[number] = slot
        else:
            self.shelf.abandon(name(number))

    @rule(number=st.integers(0, 12))
    def pin(self, number: int) -> None:
        found = self.shelf.find(name(number))
        slot = self.shelf.pin(name(number))
        assert (slot is not None) == (found is Presence.YES)
        if slot is not None:
            assert slot == self.slots[number]
            self.pinned.setdefault(number, []).append(slot)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.pinned)))
        self.shelf.unpin(name(number))
        self.pinned[number].pop()
        if not self.pinned[number]:
            del self.pinned[number]

    @rule(numbers=st.lists(st.integers(0, 12), max_size=4))
    def ask(self, numbers: list[int]) -> None:
        self.shelf.ask([name(n) for n in numbers])

    @invariant()
    def laws_hold(self) -> None:
        self.shelf.check_integrity()
        assert all(self.shelf.find(name(n)) is Presence.YES for n in self.pinned)
        assert all(self.shelf.find(name(n)) is Presence.NOT_YET for n in self.writing)
        assert self.shelf.is_idle == (not self.pinned and not self.writing)


TestShelfMachine = ShelfMachine.TestCase
TestShelfMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
