"""The offer book of a prefill worker: every path releases the pages exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import TicketId
from kvferry.kv.handoff.offers import OFFER_MACHINE, OfferBook, OfferState, OfferTimes, check_incarnation

T = TicketId("t")
TIMES = OfferTimes(offer_seconds=10, lease_seconds=30, quiesce_seconds=5)


def a_book() -> OfferBook[str]:
    book: OfferBook[str] = OfferBook(TIMES)
    book.offer(T, "pages", 0.0)
    return book


def test_a_claimed_and_finished_offer_releases_its_pages_once() -> None:
    book = a_book()
    assert book.claim(T, 1, 1.0) == 30
    assert book.finish(T, 1, 2.0, done=True) == ["pages"]
    assert book.finish(T, 1, 2.0, done=True) == []
    assert book.release(T, 2.0) == []
    assert book.is_idle


def test_an_unclaimed_offer_expires() -> None:
    book = a_book()
    assert book.expire(9.99) == []
    assert book.expire(10.0) == ["pages"]


def test_a_lease_lasts_while_it_is_renewed_and_ends_after_a_quiet_time() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    for now in range(0, 120, 20):
        assert book.expire(float(now)) == []
        book.renew(T, 1, float(now))
    assert book.expire(130.0) == []
    assert book.count(OfferState.QUIESCE) == 1
    with pytest.raises(TicketRejected, match="no longer holds"):
        book.renew(T, 1, 131.0)
    assert book.expire(134.9) == []
    assert book.expire(135.0) == ["pages"]


def test_a_failed_attempt_leaves_the_offer_for_the_next_one() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    assert book.finish(T, 1, 1.0, done=False) == []
    assert book.count(OfferState.OFFERED) == 1
    book.claim(T, 2, 2.0)
    assert book.finish(T, 1, 3.0, done=True) == [], "a late message of the first attempt has no effect"
    assert book.finish(T, 2, 3.0, done=True) == ["pages"]


def test_a_later_attempt_takes_over_the_lease_and_an_earlier_one_never_does() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    assert book.claim(T, 1, 1.0) == 30, "the same attempt may claim again"
    assert book.claim(T, 2, 20.0) == 30, "a later attempt replaces the first one"
    for late in (lambda: book.claim(T, 1, 21.0), lambda: book.renew(T, 1, 21.0)):
        with pytest.raises(TicketRejected):
            late()
    assert book.finish(T, 1, 22.0, done=True) == [], "a late message of the first attempt releases no page"
    assert book.expire(49.0) == [], "the lease was renewed by the second attempt"
    assert book.finish(T, 2, 49.0, done=True) == ["pages"]


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


def test_a_reader_that_needs_no_block_finishes_without_a_claim() -> None:
    book = a_book()
    assert book.finish(T, 1, 0.0, done=False) == []
    assert book.finish(T, 1, 0.0, done=True) == ["pages"]


def test_an_unknown_ticket_is_gone() -> None:
    book = a_book()
    for action in (book.claim, book.renew):
        with pytest.raises(TicketRejected) as caught:
            action(TicketId("other"), 1, 0.0)
        assert caught.value.reason == "TICKET_GONE"
    assert book.drop_all() == ["pages"]


def a_shared_book() -> OfferBook[str]:
    book: OfferBook[str] = OfferBook(TIMES)
    book.offer(T, "pages", 0.0, readers=2)
    return book


def test_several_readers_read_at_the_same_time_and_the_last_one_frees_the_pages() -> None:
    book = a_shared_book()
    assert book.claim(T, 1, 0.0, reader=0) == book.claim(T, 1, 0.0, reader=1) == 30
    assert book.finish(T, 1, 1.0, done=True, reader=1) == []
    assert book.finish(T, 1, 1.0, done=True, reader=1) == [], "a repeated message has no effect"
    with pytest.raises(TicketRejected, match="gone"):
        book.claim(T, 2, 1.0, reader=1)
    assert book.count(OfferState.CLAIMED) == 1
    assert book.finish(T, 1, 2.0, done=True, reader=0) == ["pages"]


def test_a_failed_reader_frees_only_its_own_place() -> None:
    book = a_shared_book()
    book.claim(T, 1, 0.0, reader=0)
    book.claim(T, 1, 0.0, reader=1)
    assert book.finish(T, 1, 1.0, done=False, reader=0) == []
    assert book.claim(T, 2, 2.0, reader=0) == 30
    book.renew(T, 1, 25.0, reader=1)
    assert book.expire(50.0) == []
    assert book.finish(T, 1, 51.0, done=True, reader=1) == [], "reader 0 may still be reading"
    assert book.expire(55.0) == ["pages"]


def test_a_reader_without_a_place_is_refused() -> None:
    book = a_shared_book()
    for reader in (-1, 2):
        with pytest.raises(TicketRejected) as caught:
            book.claim(T, 1, 0.0, reader=reader)
        assert caught.value.reason == "TICKET_READER"
        assert book.finish(T, 1, 0.0, done=True, reader=reader) == []


def test_a_release_frees_places_without_readers_and_waits_for_the_others() -> None:
    book = a_shared_book()
    book.claim(T, 1, 0.0, reader=0)
    assert book.release(T, 1.0) == []
    assert book.release(T, 2.0) == [], "a second release does not extend the wait"
    assert book.due == 6.0
    with pytest.raises(TicketRejected):
        book.claim(T, 2, 2.0, reader=0)
    assert book.expire(6.0) == ["pages"]


def test_after_three_failures_the_place_is_freed() -> None:
    book = a_book()
    for attempt in (1, 2, 3):
        book.claim(T, attempt, 0.0)
        freed = book.finish(T, attempt, 0.0, done=False)
        assert freed == (["pages"] if attempt == 3 else [])


def test_a_claim_that_arrives_after_its_attempt_has_ended_gets_no_lease() -> None:
    book = a_book()
    book.finish(T, 1, 0.0, done=False)
    with pytest.raises(TicketRejected, match="has already ended") as caught:
        book.claim(T, 1, 1.0)
    assert caught.value.reason == "TICKET_GONE"
    assert book.claim(T, 2, 1.0) == 30


def test_a_claim_in_the_quiet_time_is_refused_even_to_its_last_reader() -> None:
    book = a_book()
    book.claim(T, 1, 0.0)
    book.expire(30.0)
    for attempt in (1, 2):
        with pytest.raises(TicketRejected) as caught:
            book.claim(T, attempt, 31.0)
        assert caught.value.reason == "TICKET_TAKEN"


def test_a_renewal_that_arrives_late_never_shortens_the_lease() -> None:
    book = a_book()
    book.claim(T, 1, 10.0)
    book.renew(T, 1, 5.0)
    assert book.expire(39.0) == []
    assert book.count(OfferState.CLAIMED) == 1


def test_a_release_that_overtakes_its_offer_is_remembered() -> None:
    book: OfferBook[str] = OfferBook(TIMES)
    assert book.release(T, 0.0) == []
    assert book.offer(T, "pages", 1.0) == ["pages"]
    assert book.is_idle
    assert book.offer(T, "again", 1.0) == [], "an early release counts for one offer only"


def test_early_releases_are_remembered_within_a_bound() -> None:
    book: OfferBook[str] = OfferBook(TIMES)
    for i in range(1025):
        book.release(TicketId(f"{i}"), 0.0)
    assert book.offer(TicketId("0"), "pages", 0.0) == []
    assert book.offer(TicketId("1"), "pages", 0.0) == ["pages"]


def test_an_offer_without_readers_or_with_a_used_name_is_a_programming_error() -> None:
    book = a_book()
    for ticket_id, readers in ((T, 1), (TicketId("new"), 0)):
        with pytest.raises(ValueError, match=r"readers must be at least 1, not 0|ticket id t is in use"):
            book.offer(ticket_id, "pages", 0.0, readers=readers)


def test_a_message_for_another_incarnation_is_refused() -> None:
    check_incarnation("a", "a")
    with pytest.raises(TicketRejected) as caught:
        check_incarnation("b", "a")
    assert caught.value.reason == "TICKET_INCARNATION"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "renew", "done", "fail", "release", "expire"]),
        st.integers(1, 2),
        st.floats(0, 20),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_in_any_order_of_events_pages_are_released_exactly_once(operations: list[tuple[str, int, float]]) -> None:
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
    for _ in range(2):  # the remaining lease, then the quiet time
        now += 31
        freed += book.expire(now)
    assert freed == ["pages"], "after this time all pages are released"


def test_every_state_is_left_by_time_or_final() -> None:
    left = {state for (state, event) in OFFER_MACHINE.table if event.value == "expire"}
    assert left | OFFER_MACHINE.final == set(OfferState)
