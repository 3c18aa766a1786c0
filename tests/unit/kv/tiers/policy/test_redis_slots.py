"""Slots of a Redis Cluster, as the servers themselves compute and send them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv.tiers.policy.redis_slots import MAX_RANGES, NUM_SLOTS, Redirection, SlotMap, key_slot, parse_redirection

ASKED = ("10.0.0.1", 6379)


@pytest.mark.parametrize(
    ("key", "slot"),
    [(b"123456789", 0x31C3), (b"foo", 12182), (b"{foo}bar", 12182), (b"a{foo}{bar}", 12182), (b"", 0)],
)
def test_known_slots(key: bytes, slot: int) -> None:
    assert key_slot(key) == slot


def test_braces_that_enclose_nothing_are_a_part_of_the_key() -> None:
    assert key_slot(b"foo{}{bar}") != key_slot(b"bar")
    assert key_slot(b"foo{bar") != key_slot(b"bar")


@given(st.binary(max_size=64))
def test_a_slot_is_within_bounds(key: bytes) -> None:
    assert 0 <= key_slot(key) < NUM_SLOTS


def test_redirections() -> None:
    assert parse_redirection("MOVED 3999 10.0.0.7:6381", ASKED) == Redirection(3999, ("10.0.0.7", 6381), True)
    assert parse_redirection("ASK 1 [fe80::1]:6381", ASKED) == Redirection(1, ("fe80::1", 6381), False)
    assert parse_redirection("MOVED 1 :6382", ASKED) == Redirection(1, ("10.0.0.1", 6382), True)
    for nonsense in (
        "ERR no", "MOVED", "MOVED x h:1", "MOVED 16384 h:1", "MOVED 1 h:0", "MOVED 1 h:65536", "MOVED 1 h", "ASK 1 h:x",
        "MOVED 1 h:1 more", "OTHER 1 h:1", "MOVED -1 h:1",
    ):  # fmt: skip
        assert parse_redirection(nonsense, ASKED) is None, nonsense


def test_the_slot_map() -> None:
    slots = SlotMap()
    assert slots.find(0) is None
    slots.replace(
        [[8192, 16383, [b"b", 2, b"id"]], [0, 100, [b"a", 1, b"id"], [b"replica", 3]], [200, 200, [None, 7]]], ASKED
    )
    assert [slots.find(s) for s in (0, 100, 101, 199, 200, 201, 8191, 8192, 16383)] == [
        ("a", 1), ("a", 1), None, None, ("10.0.0.1", 7), None, None, ("b", 2), ("b", 2),
    ]  # fmt: skip
    assert slots.addresses == {("a", 1), ("b", 2), ("10.0.0.1", 7)}
    slots.note(Redirection(100, ("c", 3), True))
    assert slots.find(100) == ("c", 3)
    assert ("c", 3) in slots.addresses
    slots.replace([[0, 16383, [b"a", 1]]], ASKED)
    assert slots.find(100) == ("a", 1)


@pytest.mark.parametrize(
    "reply",
    [
        7, None, [7], [[1, 2]], [[1, 2, 3]], [[b"1", 2, [b"a", 1]]], [[2, 1, [b"a", 1]]], [[0, NUM_SLOTS, [b"a", 1]]],
        [[0, 1, [b"a"]]], [[0, 1, [b"a", 0]]], [[0, 1, [b"a", 70000]]], [[0, 1, [b"a", b"1"]]],
        [[0, 1, [b"a", 1]]] * (MAX_RANGES + 1),
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_slot_map_changes_no_slot(reply: object) -> None:
    slots = SlotMap()
    slots.replace([[0, 16383, [b"a", 1]]], ASKED)
    with pytest.raises(ValueError, match="slot"):
        slots.replace(reply, ASKED)
    assert slots.find(5) == ("a", 1)
