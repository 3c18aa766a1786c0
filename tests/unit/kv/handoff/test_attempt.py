"""The state machine of one attempt to fetch pages: its actions after each event, and a deadline for each wait."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvariantBroken, TicketRejected, Unavailable
from kvferry.core.ids import BlockId
from kvferry.kv.handoff.attempt import (
    Attempt,
    Claim,
    Connect,
    Effects,
    Finish,
    Forget,
    Quiet,
    ReadEpochs,
    Renew,
    Report,
    StartRead,
)
from kvferry.kv.handoff.transfers import TRANSFER_MACHINE, TransferState, TransferTimes
from kvferry.kv.interface.connector import FetchSource
from kvferry.kv.interface.ticket import Ticket

TICKET = Ticket("t", "w", "i", "peer:1", "memory", b"f", "", b"", 12, (5, 6, 7), (50, 60, 70), 0.0)
TIMES = TransferTimes(control_seconds=2, min_seconds=40, stall_seconds=3, queue_seconds=5)
LEASE = 30.0


def an_attempt(ticket: Ticket = TICKET, first_block: int = 0, count: int = 3) -> Attempt:
    targets = [BlockId(20 + i) for i in range(count)]
    source = FetchSource(ticket, 1)
    return Attempt(source, first_block, targets, connector="memory", block_bytes=1, times=TIMES, now=0.0)


def reading(ticket: Ticket = TICKET) -> Attempt:
    attempt = an_attempt(ticket)
    attempt.begin(0.0)
    attempt.connected(0.0)
    attempt.claimed(LEASE, 0.0)
    return attempt


def test_a_fetch_without_faults() -> None:
    attempt = an_attempt(first_block=1, count=2)
    assert (attempt.remote, attempt.local) == ([6, 7], [20, 21])
    assert attempt.begin(0.0) == [Connect(2)]
    assert attempt.connected(0.5) == [Claim(2)]
    assert attempt.claimed(LEASE, 1.0) == [StartRead()]
    assert attempt.arrived(2.0) == [ReadEpochs(2)]
    assert attempt.epochs([60, 70]) == [Report(None), Quiet(), Finish(True, 2)]
    assert attempt.is_over
    assert attempt.due == math.inf


def test_a_ticket_without_held_pages_is_neither_claimed_nor_finished() -> None:
    attempt = an_attempt(msgspec.structs.replace(TICKET, held=False))
    attempt.begin(0.0)
    assert attempt.connected(0.0) == [StartRead()]
    attempt.arrived(0.0)
    assert attempt.epochs([50, 60, 71]) == [Report("the peer reused the pages before they were read")]
    assert attempt.quiet() == [Quiet()]


@pytest.mark.parametrize("found", [[], [50], [50, 60], [50, 60, 71], [50, 60, 70, 80]])
def test_epochs_other_than_the_offered_ones_are_a_failure(found: list[int]) -> None:
    attempt = reading()
    attempt.arrived(1.0)
    (report,) = attempt.epochs(found)
    assert isinstance(report, Report)
    assert report.failure is not None
    assert not attempt.is_over, "the attempt lasts until the transport is quiet"
    assert attempt.quiet() == [Quiet(), Finish(False, 2)]


def test_a_ticket_without_the_blocks_is_refused() -> None:
    with pytest.raises(InvariantBroken, match=r"blocks .* are needed"):
        an_attempt(first_block=2, count=2)


@pytest.mark.parametrize(
    ("error", "forgets"),
    [
        (Unavailable("dead"), True),
        (TicketRejected("other life", reason="TICKET_INCARNATION"), True),
        (TicketRejected("taken", reason="TICKET_TAKEN"), False),
    ],
)
def test_a_refusal_ends_the_attempt_and_a_lost_peer_is_forgotten(error: Unavailable, forgets: bool) -> None:
    attempt = an_attempt()
    attempt.begin(0.0)
    effects = attempt.refused(error)
    assert (Forget() in effects) == forgets
    assert [type(e) for e in effects if e != Forget()] == [Report, Quiet, Finish]
    assert attempt.state is TransferState.FAILED


def test_another_connector_or_a_long_wait_ends_the_attempt_before_any_message() -> None:
    other = an_attempt(msgspec.structs.replace(TICKET, connector="nixl"))
    assert "reads over 'memory'" in str(other.begin(0.0)[0])
    late = an_attempt()
    assert late.tick(4.9) == []
    assert "for other transfers" in str(late.begin(5.1)[0])
    waiting = an_attempt()
    assert "for other transfers" in str(waiting.tick(5.0)[0])


def test_every_control_message_has_a_deadline() -> None:
    attempt = an_attempt()
    attempt.begin(1.0)
    assert attempt.due == 3.0
    assert attempt.tick(2.9) == []
    forget, report, *_ = attempt.tick(3.0)
    assert forget == Forget()
    assert "did not answer" in str(report)
    assert attempt.claimed(LEASE, 3.1) == [], "an answer after the deadline has no effect"
    verifying = reading()
    verifying.arrived(1.0)
    assert verifying.due == 3.0
    assert "epochs were not read" in str(verifying.tick(3.0)[1])
    assert verifying.epochs([50, 60, 70]) == []


def test_a_transfer_has_a_deadline_and_renews_until_then() -> None:
    attempt = reading()
    renewals = 0
    while (effects := attempt.tick(attempt.due)) == [Renew(2)]:
        renewals += 1
    assert renewals == 7, "a renewal every 5 s of a lease of 30 s, for 40 s"
    assert "longer than 40.00 s" in str(effects[0])
    assert attempt.due == math.inf, "draining ends when the transport reports it, without a deadline"


def test_a_read_without_progress_is_given_up() -> None:
    attempt = reading()
    for now, count in ((0.0, 0), (2.0, 1), (4.0, 1), (4.5, 1)):
        assert attempt.progress(count, now) == []
        attempt.tick(now)
    assert "no progress for 3.00 s" in str(attempt.tick(5.0)[0])


def test_a_read_that_reports_no_progress_has_its_deadline_only() -> None:
    attempt = reading()
    assert attempt.tick(39.0) == [Renew(2)]


def test_a_broken_read_drains_and_a_broken_connection_ends_at_once() -> None:
    attempt = an_attempt()
    attempt.begin(0.0)
    assert attempt.broken("no way") == [Forget(), Report("no way"), Quiet(), Finish(False, 2)]
    attempt = reading()
    assert attempt.broken("cut") == [Forget(), Report("cut")]
    assert attempt.cancel() == []
    assert attempt.quiet() == [Quiet(), Finish(False, 2)]
    assert attempt.quiet() == []


INPUTS = {
    "begin": lambda a, now: a.begin(now),
    "connected": lambda a, now: a.connected(now),
    "claimed": lambda a, now: a.claimed(LEASE, now),
    "refused": lambda a, now: a.refused(Unavailable("no")),
    "progress": lambda a, now: a.progress(int(now), now),
    "arrived": lambda a, now: a.arrived(now),
    "equal": lambda a, now: a.epochs([50, 60, 70]),
    "differ": lambda a, now: a.epochs([50, 61, 70]),
    "broken": lambda a, now: a.broken("cut"),
    "cancel": lambda a, now: a.cancel(),
    "quiet": lambda a, now: a.quiet(),
    "tick": lambda a, now: a.tick(now),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(INPUTS)), st.floats(0, 3)), max_size=40), st.booleans())
def test_for_any_order_of_inputs_an_attempt_is_reported_once_and_then_quiet_once(
    inputs: list[tuple[str, float]], held: bool
) -> None:
    attempt, now, seen = an_attempt(msgspec.structs.replace(TICKET, held=held)), 0.0, Effects()
    for name, pause in inputs:
        now += pause
        seen += INPUTS[name](attempt, now)
    for _ in range(20):  # timers end every state except the wait for the transport
        if attempt.due < math.inf:
            now = max(now, attempt.due)
            seen += attempt.tick(now)
    assert attempt.is_over or attempt.state is TransferState.DRAINING
    seen += attempt.quiet()
    ends = [type(e) for e in seen if isinstance(e, Report | Quiet | Finish)]
    assert ends == ([Report, Quiet, Finish] if held else [Report, Quiet])
    assert attempt.state in TRANSFER_MACHINE.final
