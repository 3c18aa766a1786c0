"""Pins in a pool: references, the quota, deadlines."""

import pytest

from kvferry.core.errors import Overloaded
from kvferry.core.ids import BlockHash, BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.pins.pins import MAX_PINS, Pin, Pins


def a_pin(name: str, pages: list[int], deadline: float = 10.0) -> Pin:
    return Pin(BlockHash(name.encode()), 4 * len(pages), len(pages), tuple(map(BlockId, pages)), deadline)


def some_pins(quota: int = 4) -> tuple[BlockPool, Pins]:
    pool = BlockPool(8)
    return pool, Pins(pool, lambda: quota)


def test_a_page_in_two_pins_counts_once_and_is_free_when_both_have_ended() -> None:
    pool, pins = some_pins()
    pins.add(a_pin("a", [0, 1, 2]))
    pins.add(a_pin("b", [0, 1, 3]))
    assert (len(pins), pins.num_pages, pool.num_free) == (2, 4, 4)
    assert pins.num_unpinned([BlockId(0), BlockId(3), BlockId(4)]) == 1
    pool.check_references(pins.held)
    assert pins.remove(BlockHash(b"a")) is not None
    assert (pins.num_pages, pool.num_free) == (3, 5)
    assert pins.remove(BlockHash(b"a")) is None
    assert pins.remove(BlockHash(b"b")) is not None
    assert (len(pins), pins.num_pages, pool.num_free) == (0, 0, 8)


def test_the_quota_includes_the_pages_reserved_for_prefixes_in_progress() -> None:
    _, pins = some_pins(quota=4)
    pins.add(a_pin("a", [0, 1]))
    pins.check_room(2, num_reserved=0, num_pins=0)
    pins.check_room(1, num_reserved=1, num_pins=1)
    with pytest.raises(Overloaded, match="needs 3 more pages, but pins may use 4 pages and use 2") as caught:
        pins.check_room(3, num_reserved=0, num_pins=0)
    assert caught.value.reason == "PIN_QUOTA"
    with pytest.raises(Overloaded, match="needs 2 more pages, but pins may use 4 pages and use 3"):
        pins.check_room(2, num_reserved=1, num_pins=1)


def test_the_number_of_pins_is_bounded() -> None:
    _, pins = some_pins()
    for number in range(MAX_PINS - 1):
        pins.add(a_pin(str(number), [0]))
    pins.check_room(0, num_reserved=0, num_pins=0)
    with pytest.raises(Overloaded, match="1000 prefixes are pinned"):
        pins.check_room(0, num_reserved=0, num_pins=1)


def test_pins_end_at_their_deadlines_and_a_renewal_never_shortens_one() -> None:
    pool, pins = some_pins()
    pins.add(a_pin("a", [0], deadline=10.0))
    pins.add(a_pin("b", [1], deadline=20.0))
    assert pins.next_deadline == 10.0
    assert pins.renew(BlockHash(b"a"), 30.0) is not None
    assert pins.renew(BlockHash(b"a"), 5.0) is not None
    assert pins.renew(BlockHash(b"other"), 5.0) is None
    assert pins.next_deadline == 20.0
    pins.expire(19.9)
    assert len(pins) == 2
    pins.expire(20.0)
    assert (len(pins), pool.refs(BlockId(0)), pool.refs(BlockId(1)), pins.next_deadline) == (1, 1, 0, 30.0)
    pins.expire(30.0)
    assert (pool.num_free, pins.next_deadline) == (8, None)
