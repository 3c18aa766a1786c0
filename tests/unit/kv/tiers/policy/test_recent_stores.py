"""Recently stored objects are not stored again until a lookup misses them."""

from kvferry.core.ids import BlockHash
from kvferry.kv.tiers.policy.recent_stores import RecentStores


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def test_a_name_is_kept_until_a_lookup_misses_it() -> None:
    lately = RecentStores(8)
    lately.begin(name(1))
    lately.end(name(1), is_there=True)
    assert name(1) in lately
    lately.miss([name(1), name(2)])
    assert name(1) not in lately


def test_a_name_whose_store_runs_is_not_missed_yet() -> None:
    lately = RecentStores(8)
    lately.begin(name(1))
    lately.miss([name(1)])
    assert name(1) in lately


def test_a_store_that_failed_may_be_tried_again() -> None:
    lately = RecentStores(8)
    lately.begin(name(1))
    lately.end(name(1), is_there=False)
    assert name(1) not in lately


def test_the_oldest_are_forgotten() -> None:
    lately = RecentStores(2)
    for number in range(3):
        lately.begin(name(number))
    lately.end(name(0), is_there=True)
    assert [n in lately for n in map(name, range(3))] == [False, True, True]
