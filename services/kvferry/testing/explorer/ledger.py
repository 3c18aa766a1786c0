"""A second opinion on when a prefill worker may give an offer's pages back, from the messages it saw alone."""

from typing import NamedTuple

from kvferry.testing.explorer.scenario import OFFER_TIMES
from kvferry.testing.explorer.violation import Violation


class Row(NamedTuple):
    """What one reader of one offer was told and said."""

    until: float
    """The pages were promised to it until then."""
    holder: int = -1
    """The attempt that was given the lease."""
    is_over: bool = False
    failures: int = 0
    ended: int = -1
    """The latest attempt that said it was over."""


class Account(NamedTuple):
    """One offer."""

    rows: tuple[Row, ...]
    released_at: float | None = None

    def with_row(self, reader: int, row: Row) -> "Account":
        rows = list(self.rows)
        rows[reader] = row
        return self._replace(rows=tuple(rows))


def opened(readers: int, now: float, was_released: bool) -> Account:
    """A new offer."""
    return Account((Row(now + OFFER_TIMES.offer_seconds),) * readers, now if was_released else None)


def leased(account: Account, reader: int, attempt: int, now: float) -> Account:
    """A claim or a renewal was granted.

    Raises:
        Violation: to an attempt that was over.
    """
    row = account.rows[reader]
    if attempt <= row.ended:
        raise Violation(f"P gave a lease to attempt {attempt}, which had said that it was over")
    return account.with_row(reader, row._replace(until=now + OFFER_TIMES.lease_seconds, holder=attempt))


def finished(account: Account, reader: int, attempt: int, now: float, *, done: bool) -> Account:
    """An attempt said that it is over."""
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
    """Nobody wants the offer any more."""
    return account if account.released_at is not None else account._replace(released_at=now)


def check_given_back(account: Account, ticket_id: str, now: float) -> None:
    """Whether every reader was out of the pages, or out of time.

    Raises:
        Violation: one was not.
    """
    for reader, row in enumerate(account.rows):
        reading = row.holder >= 0
        quiesce = OFFER_TIMES.quiesce_seconds if reading else 0.0
        ends = row.until + quiesce
        if account.released_at is not None:
            ends = min(ends, account.released_at + quiesce)
        if not row.is_over and now < ends:
            what = f"while attempt {row.holder} was reading" if reading else "before anybody came"
            raise Violation(
                f"P gave the pages of {ticket_id} back {what}: reader {reader} had them until {ends:g}, it is {now:g}"
            )
