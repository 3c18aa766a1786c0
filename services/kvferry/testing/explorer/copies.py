"""Copies of the machines under test, cheap enough for every step; `copy.deepcopy` is fifty times slower.

They reach into the machines on purpose: whoever adds a mutable field there adds it here, and
`tests/unit/testing/test_explorer.py` compares each with a deep copy.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvferry.core.ids import BlockId
from kvferry.engine.blocks import BlockPool
from kvferry.gateway.trip import Trip
from kvferry.kv.attempt import Attempt
from kvferry.kv.offers import OfferBook, _Offer, _Place

T = TypeVar("T", bound=object)


def _shallow(thing: T) -> T:
    made = object.__new__(type(thing))
    made.__dict__.update(thing.__dict__)
    return made


def copy_book(book: OfferBook[str]) -> OfferBook[str]:
    """An offer book that shares nothing with `book`."""
    made = _shallow(book)
    made._offers = {
        key: _Offer(o.pages, [_Place(p.deadline, p.state, p.attempt, p.ended, p.failures) for p in o.places])
        for key, o in book._offers.items()
    }
    made._early = book._early.copy()
    return made


def copy_pool(pool: BlockPool, on_reuse: Callable[[BlockId], None] | None) -> BlockPool:
    """A pool that shares nothing with `pool`."""
    made = _shallow(pool)
    made.epochs = [pool.epochs[block] for block in range(pool.num_blocks)]
    made._refs, made._writers = pool._refs[:], pool._writers[:]
    made._next, made._prev = pool._next[:], pool._prev[:]
    made._on_reuse = on_reuse
    return made


def copy_attempt(attempt: Attempt) -> Attempt:
    """An attempt that shares only what an attempt never changes."""
    return _shallow(attempt)


def copy_trip(trip: Trip) -> Trip:
    """A trip that shares only what a trip never changes."""
    return replace(trip, emitted=trip.emitted[:], excluded=set(trip.excluded))


def book_state(book: OfferBook[str], now: float) -> tuple[object, ...]:
    """All of a book that matters from now on."""
    offers = tuple(
        (key, tuple((p.deadline - now, p.state, p.attempt, p.ended, p.failures) for p in o.places))
        for key, o in sorted(book._offers.items())
    )
    return (offers, tuple(book._early))


def pool_state(pool: BlockPool) -> tuple[object, ...]:
    """All of a pool that matters from now on."""
    return (tuple(pool.epochs[b] for b in range(pool.num_blocks)), *map(tuple, (pool._refs, pool._writers, pool._next)))


def attempt_state(attempt: Attempt, now: float) -> tuple[object, ...]:
    """All of an attempt that matters from now on."""
    return (
        attempt.state,
        attempt._limit - now,
        attempt._stall_at - now,
        attempt._renew_at - now,
        attempt._progress,
        tuple(attempt.remote),
        tuple(attempt.local),
        tuple(attempt._promised),
        attempt.source.attempt,
    )


def trip_state(trip: Trip) -> tuple[object, ...]:
    """All of a trip that matters from now on."""
    ticket = trip.ticket and (trip.ticket.ticket_id, trip.ticket.deliveries, trip.ticket.losses)
    return (trip.state, len(trip.emitted), ticket, tuple(sorted(trip.excluded)), trip.failures)
