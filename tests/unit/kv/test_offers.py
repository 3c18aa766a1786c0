"""The prefill side's table: every path gives the pages back exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import TicketId
from kvferry.kv.offers import OFFER_MACHINE, OfferBook, OfferState, OfferTimes

T = TicketId("t")
TIMES = OfferTimes(offer_seconds=10, lease_seconds=30, quiesce_seconds=5)


def a_book() -> OfferBook[str]:
    book: OfferBook[str] = OfferBook(TIMES)
    book.offer(T, "pages", 0.0)
    return book


def test_a_claimed_and_finished_offer_gives_its_pages_back_once() -> None:
    book = a_book()
    assert book.claim(T, 1, 1.0) == 30
    assert book.finish(T, 1, 2.0, done=True) == ["pages"]
    assert book.finish(T, 1, 2.0, done=True) == []
    assert book.release(T, 2.0) == []
    assert book.is_idle


def test_an_unclaimed_offer_runs_out() -> None:
    book = a_book()
    assert book.expire(9.99) == []
    assert book.expire(10.0) == ["pages"]


def test_a_lease_lives_while_it_is_renewed_and_then_gives_the_reader_a_moment() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    for now in range(0, 120, 20):
        assert book.expire(float(now)) == []
        book.renew(T, 1, float(now))
    assert book.expire(130.0) == []
    assert book.count(OfferState.QUIESCE) == 1
    with pytest.raises(TicketRejected, match="no lease"):
        book.renew(T, 1, 131.0)
    assert book.expire(134.9) == []
    assert book.expire(135.0) == ["pages"]


def test_a_failed_attempt_leaves_the_offer_for_the_next_one() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    assert book.finish(T, 1, 1.0, done=False) == []
    assert book.count(OfferState.OFFERED) == 1
    book.claim(T, 2, 2.0)
    assert book.finish(T, 1, 3.0, done=True) == [], "a late word of the first attempt changes nothing"
    assert book.finish(T, 2, 3.0, done=True) == ["pages"]


def test_a_second_reader_is_refused_while_the_first_reads() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    assert book.claim(T, 1, 1.0) == 30, "the same attempt may ask again"
    with pytest.raises(TicketRejected) as caught:
        book.claim(T, 2, 1.0)
    assert caught.value.reason == "TICKET_TAKEN"


def test_a_release_during_a_read_waits_for_the_reader_or_a_moment() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    assert book.release(T, 1.0) == []
    assert book.finish(T, 1, 1.5, done=False) == ["pages"]
    book.offer(T, "more", 2.0)
    book.claim(T, 1, 2.0)
    book.release(T, 2.0)
    book.release(T, 2.0)
    assert book.expire(7.0) == ["more"]


def test_a_reader_that_needs_nothing_says_so_without_a_claim() -> None:
    book = a_book()
    assert book.finish(T, 1, 0.0, done=False) == []
    assert book.finish(T, 1, 0.0, done=True) == ["pages"]


def test_a_stranger_ticket_is_gone() -> None:
    book = a_book()
    for action in (book.claim, book.renew):
        with pytest.raises(TicketRejected) as caught:
            action(TicketId("other"), 1, 0.0)
        assert caught.value.reason == "TICKET_GONE"
    assert book.drop_all() == ["pages"]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "renew", "done", "fail", "release", "expire"]),
        st.integers(1, 2),
        st.floats(0, 20),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_in_any_order_of_events_pages_come_back_exactly_once(operations: list[tuple[str, int, float]]) -> None:
    book, now = a_book(), 0.0
    freed: list[str] = []
    for name, attempt, pause in operations:
        now += pause
        try:
            match name:
                case "claim":
                    book.claim(T, attempt, now)
                case "renew":
                    book.renew(T, attempt, now)
                case "release":
                    freed += book.release(T, now)
                case "expire":
                    freed += book.expire(now)
                case _:
                    freed += book.finish(T, attempt, now, done=name == "done")
        except TicketRejected:
            pass
        assert book.is_idle == (freed == ["pages"])
    for _ in range(2):  # a lease, then its quiet time
        now += 31
        freed += book.expire(now)
    assert freed == ["pages"], "time alone brings every page back"


def test_every_state_is_left_by_time_or_final() -> None:
    left = {state for (state, event) in OFFER_MACHINE.table if event.value == "expire"}
    assert left | OFFER_MACHINE.final == set(OfferState)
