"""Independent check that a prefill worker does not free an offer's pages too early, based only on its messages."""

from typing import NamedTuple

from harness.explorer.scenario import OFFER_TIMES
from harness.explorer.violation import Violation


class Row(NamedTuple):
    """State of a reader of an offer, derived from messages."""

    until: float
    """Time until which the pages are leased to the reader."""
    holder: int = -1
    """Number of the attempt that has the lease; -1 if no attempt has it."""
    is_over: bool = False
    failures: int = 0
    ended: int = -1
    """Number of the latest attempt that sent `finish`."""


class Account(NamedTuple):
    """State of an offer, derived from messages."""

    rows: tuple[Row, ...]
    released_at: float | None = None

    def with_row(self, reader: int, row: Row) -> "Account":
        rows = list(self.rows)
        rows[reader] = row
        return self._replace(rows=tuple(rows))


def opened(readers: int, now: float, was_released: bool) -> Account:
    """Return the state of a new offer."""
    return Account((Row(now + OFFER_TIMES.offer_seconds),) * readers, now if was_released else None)


def leased(account: Account, reader: int, attempt: int, now: float) -> Account:
    """Record that a claim or a renewal was granted.

    Raises:
        Violation: the attempt had already finished.
    """
    row = account.rows[reader]
    if attempt <= row.ended:
        raise Violation(f"P granted a lease to attempt {attempt}, which had already finished")
    return account.with_row(reader, row._replace(until=now + OFFER_TIMES.lease_seconds, holder=attempt))


def finished(account: Account, reader: int, attempt: int, now: float, *, done: bool) -> Account:
    """Record that an attempt sent `finish`."""
    if not 0 <= reader < len(account.rows):
        return account
    row = account.rows[reader]
    if row.holder == attempt:
        failures = row.failures + (not done)
        over = done or failures >= OFFER_TIMES.max_failures or now >= row.until or account.released_at is not None
        return account.with_row(reader, Row(now + OFFER_TIMES.offer_seconds, -1, over, failures, attempt))
    if row.holder < 0:
        ended = max(row.ended, attempt)
        return account.with_row(reader, row._replace(is_over=row.is_over or done, ended=ended))
    return account


def released(account: Account, now: float) -> Account:
    """Record that the offer was released."""
    return account if account.released_at is not None else account._replace(released_at=now)


def check_given_back(account: Account, ticket_id: str, now: float) -> None:
    """Check that the pages may be freed: each reader has finished, or its lease has expired.

    Raises:
        Violation: a reader's lease is still valid.
    """
    for reader, row in enumerate(account.rows):
        reading = row.holder >= 0
        quiesce = OFFER_TIMES.quiesce_seconds if reading else 0.0
        ends = row.until + quiesce
        if account.released_at is not None:
            ends = min(ends, account.released_at + quiesce)
        if not row.is_over and now < ends:
            what = f"while attempt {row.holder} was reading" if reading else "before any claim"
            raise Violation(
                f"P freed the pages of {ticket_id} {what}: reader {reader} has them until {ends:g}, now is {now:g}"
            )
