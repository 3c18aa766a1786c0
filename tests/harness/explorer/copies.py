"""Fast copies of the state machines under test; `copy.deepcopy` is fifty times slower.

The functions access private fields: a mutable field that is added to a state machine must be added here too;
`tests/unit/harness/test_explorer.py` compares each copy with a deep copy.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvferry.core.ids import BlockId
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.kv.handoff.attempt import Attempt
from kvferry.kv.handoff.offers import OfferBook, _Offer, _Reader

T = TypeVar("T", bound=object)


def _shallow(thing: T) -> T:
    made = object.__new__(type(thing))
    made.__dict__.update(thing.__dict__)
    return made


def copy_book(book: OfferBook[str]) -> OfferBook[str]:
    """Return an independent copy of an offer book."""
    made = _shallow(book)
    made._offers = {
        key: _Offer(o.pages, [_Reader(p.deadline, p.state, p.attempt, p.ended, p.failures) for p in o.places])
        for key, o in book._offers.items()
    }
    made._early = book._early.copy()
    return made


def copy_pool(pool: BlockPool, on_reuse: Callable[[BlockId], None] | None) -> BlockPool:
    """Return an independent copy of a block pool."""
    made = _shallow(pool)
    made.epochs = [pool.epochs[block] for block in range(pool.num_blocks)]
    made._refs, made._writers = pool._refs[:], pool._writers[:]
    made._next, made._prev = pool._next[:], pool._prev[:]
    made._on_reuse = on_reuse
    return made


def copy_attempt(attempt: Attempt) -> Attempt:
    """Return a copy of an attempt; the copy shares only immutable fields."""
    return _shallow(attempt)


def copy_run(run: SampleRun) -> SampleRun:
    """Return a copy of a sample run; the copy shares only immutable fields."""
    return replace(run, emitted=run.emitted[:], excluded=set(run.excluded))


def book_state(book: OfferBook[str], now: float) -> tuple[object, ...]:
    """Return the part of an offer book's state that affects the future, with times relative to `now`."""
    offers = tuple(
        (key, tuple((p.deadline - now, p.state, p.attempt, p.ended, p.failures) for p in o.places))
        for key, o in sorted(book._offers.items())
    )
    return (offers, tuple(book._early))


def pool_state(pool: BlockPool) -> tuple[object, ...]:
    """Return the part of a block pool's state that affects the future."""
    return (tuple(pool.epochs[b] for b in range(pool.num_blocks)), *map(tuple, (pool._refs, pool._writers, pool._next)))


def attempt_state(attempt: Attempt, now: float) -> tuple[object, ...]:
    """Return the part of an attempt's state that affects the future, with times relative to `now`."""
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


def run_state(run: SampleRun) -> tuple[object, ...]:
    """Return the part of a sample run's state that affects the future."""
    ticket = run.ticket and (run.ticket.ticket_id, run.ticket.deliveries, run.ticket.losses)
    return (run.state, len(run.emitted), ticket, tuple(sorted(run.excluded)), run.failures)
