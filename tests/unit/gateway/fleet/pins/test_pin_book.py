"""The prefixes registered with a gateway: identity, deadlines, bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import Overloaded
from kvferry.gateway.fleet.pins.pin_book import PinBook, Prefix

TEXT = st.text(st.characters(codec="utf-8") | st.just("\ud800"), max_size=3)
FIELDS = st.tuples(st.lists(st.integers(0, 300), max_size=4).map(tuple), TEXT, TEXT, TEXT)


@given(FIELDS, FIELDS)
def test_prefixes_with_equal_fields_have_equal_keys(
    first: tuple[tuple[int, ...], str, str, str], second: tuple[tuple[int, ...], str, str, str]
) -> None:
    assert (Prefix.of(*first).key == Prefix.of(*second).key) is (first == second)


def test_neighbouring_fields_are_distinguished() -> None:
    assert Prefix.of([1], "ab", "c").key != Prefix.of([1], "a", "bc").key
    assert Prefix.of([1], "", "a").key != Prefix.of([1], "", "", "a").key


def test_a_deadline_is_extended_and_never_shortened() -> None:
    book, prefix = PinBook(), Prefix.of([1, 2])
    assert book.add(prefix, 10.0)
    assert not book.add(Prefix.of([1, 2]), 20.0)
    assert not book.add(prefix, 5.0)
    assert book.deadline(prefix.key) == 20.0
    book.expire(19.9)
    assert prefix.key in book
    book.expire(20.0)
    assert (len(book), book.deadline(prefix.key), book.remove(prefix.key)) == (0, None, False)


def test_the_prefixes_that_a_worker_lacks_are_in_the_order_of_registration() -> None:
    book = PinBook()
    prefixes = [Prefix.of([number]) for number in range(3)]
    for number, prefix in enumerate(prefixes):
        book.add(prefix, 9.0 - number)
    assert book.lacking({prefixes[1].key}) == [prefixes[0], prefixes[2]]
    assert [deadline for _, deadline in book.items()] == [9.0, 8.0, 7.0]


def test_the_numbers_of_prefixes_and_tokens_are_bounded() -> None:
    book = PinBook(max_prefixes=2, max_tokens=10)
    book.add(Prefix.of(range(8)), 1.0)
    with pytest.raises(Overloaded, match="have 8 tokens; with the 3 of this one they exceed 10"):
        book.add(Prefix.of([1, 2, 3]), 1.0)
    book.add(Prefix.of([1, 2]), 1.0)
    with pytest.raises(Overloaded, match="has 2 pinned prefixes, the maximum"):
        book.add(Prefix.of([]), 1.0)
    book.add(Prefix.of([1, 2]), 2.0)
    book.expire(1.0)
    book.add(Prefix.of(range(3, 11)), 2.0)
    book.clear()
    book.add(Prefix.of(range(10)), 2.0)
