"""One attempt to fetch one ticket's pages, without threads or sockets: what happened goes in, what to do comes out.

    shell                                   Attempt
    its turn has come          begin ->     Connect
    the peer is known      connected ->     Claim         (StartRead, if nothing is held under the ticket)
    the lease has begun      claimed ->     StartRead
    some pages are here     progress ->
    all pages are here       arrived ->     ReadEpochs
    the epochs now            epochs ->     Report, Quiet, Finish
    the transport is done      quiet ->     Quiet, Finish
    `due` has come              tick ->     whatever is overdue: a renewal, or giving up

Every wait ends at a time that is in `due`; an answer that comes after it finds another state and does nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken, KvferryError, TicketRejected
from kvferry.core.ids import BlockId
from kvferry.kv.connector import FetchSource
from kvferry.kv.transfers import TRANSFER_MACHINE, TransferEvent, TransferState, TransferTimes

_RENEWALS_PER_LEASE = 6


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the peer's pages reachable; answer `connected`, `refused` or `broken`."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask the peer for a lease; answer `claimed` or `refused`."""

    timeout: float


@dataclass(frozen=True, slots=True)
class StartRead:
    """Let the transport copy `Attempt.remote` into `Attempt.local`, converting if need be; answer `progress`, `arrived`
    or `broken`."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Extend the lease; needs no answer. Not vital: the epochs tell whether the pages were still ours."""

    timeout: float


@dataclass(frozen=True, slots=True)
class ReadEpochs:
    """Read the peer's epochs of `Attempt.remote`, now; answer `epochs` or `broken`."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Forget:
    """The peer is gone, or lives another life: what the transport keeps of it is of no use."""


@dataclass(frozen=True, slots=True)
class Report:
    """Say how it ended; a failure means that the tokens are to be computed, in other pages until `Quiet`."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing touches the target pages any more."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the peer; best effort, its lease is the backstop."""

    done: bool
    timeout: float


Effect = Connect | Claim | StartRead | Renew | ReadEpochs | Forget | Report | Quiet | Finish
Effects = list[Effect]


class Attempt:
    """One attempt's state and deadlines. Every input takes the time and returns what to do, in order."""

    def __init__(
        self,
        source: FetchSource,
        first_block: int,
        targets: Sequence[BlockId],
        *,
        connector: str,
        block_bytes: int,
        times: TransferTimes,
        now: float,
        blocks: range | None = None,
    ) -> None:
        """
        Args:
            first_block: position in the prompt of the block that goes into `targets[0]`.
            connector: what this side reads over.
            block_bytes: of one of the peer's pages.
            blocks: positions of the peer's blocks that are needed, where its layout is not ours; `None`: the targets'.

        Raises:
            InvariantBroken: the ticket has no such blocks.
        """
        ticket = source.ticket
        needed = range(first_block, first_block + len(targets)) if blocks is None else blocks
        span = slice(needed.start, needed.stop)  # by position: block i of the prompt is block i there
        self.source = source
        self.remote = list(ticket.block_ids[span])
        self.local = list(targets)
        self.state = TRANSFER_MACHINE.initial
        self._promised = list(ticket.epochs[span])
        if not len(self.remote) == len(needed) == len(self._promised):
            raise InvariantBroken(f"ticket {ticket.ticket_id} has no blocks {span}")
        self._connector = connector
        self._num_bytes = block_bytes * len(self.remote)
        self._times = times
        self._begun = now
        self._limit = now + times.queue_seconds
        """When the state that it is in has lasted too long."""
        self._stall_at = math.inf
        self._progress = -1
        self._renew_at = math.inf
        self._lease_seconds = math.inf

    @property
    def due(self) -> float:
        """When `tick` will have something to do; infinite when only an input can move it."""
        return min(self._limit, self._stall_at, self._renew_at)

    @property
    def is_over(self) -> bool:
        """Whether nothing touches the pages any more."""
        return self.state in TRANSFER_MACHINE.final

    # ------------------------------------------------------------------ inputs

    def begin(self, now: float) -> Effects:
        """Its turn has come."""
        if self.state is not TransferState.QUEUED:
            return []
        if now > self._limit:
            return self._give_up(f"waited {now - self._begun:.1f} s for other transfers")
        theirs = self.source.ticket.connector
        if theirs != self._connector:
            return self._give_up(f"the peer offers over {theirs!r}, this worker reads over {self._connector!r}")
        self._move(TransferEvent.BEGIN)
        self._limit = now + self._times.control_seconds
        return [Connect(self._times.control_seconds)]

    def connected(self, now: float) -> Effects:
        """The transport can reach the peer's pages."""
        if self.state is not TransferState.CONNECTING:
            return []
        if not self.source.ticket.held:
            self._move(TransferEvent.OPEN)
            return self._read(now)
        self._move(TransferEvent.CONNECTED)
        self._limit = now + self._times.control_seconds
        return [Claim(self._times.control_seconds)]

    def claimed(self, lease_seconds: float, now: float) -> Effects:
        """The peer holds the pages for us."""
        if self.state is not TransferState.CLAIMING:
            return []
        self._move(TransferEvent.CLAIMED)
        self._lease_seconds = lease_seconds
        self._renew_at = now + lease_seconds / _RENEWALS_PER_LEASE
        return self._read(now)

    def refused(self, error: KvferryError) -> Effects:
        """The peer said no to the connection or the claim, or did not answer."""
        if self.state not in {TransferState.CONNECTING, TransferState.CLAIMING}:
            return []
        gone = not isinstance(error, TicketRejected) or error.reason == "TICKET_INCARNATION"
        failure = f"{error.reason}: {error.message}"
        return [*([Forget()] if gone else []), *self._end(TransferEvent.REFUSED, failure)]

    def progress(self, count: int, now: float) -> Effects:
        """The read says how far it came, in a unit of its own that only grows."""
        if self.state is TransferState.READING and count > self._progress:
            self._progress = count
            self._stall_at = now + self._times.stall_seconds
        return []

    def arrived(self, now: float) -> Effects:
        """All data is here; whether it is what was promised, the epochs will tell."""
        if self.state is not TransferState.READING:
            return []
        self._move(TransferEvent.READ_DONE)
        self._limit = now + self._times.control_seconds
        return [ReadEpochs(self._times.control_seconds)]

    def epochs(self, found: Sequence[int]) -> Effects:
        """The epochs that the peer's pages had after the data was read."""
        if self.state is not TransferState.VERIFYING:
            return []
        if list(found) != self._promised:  # a short or empty answer differs too
            return self._end(TransferEvent.EPOCHS_DIFFER, "the peer reused the pages before they were read")
        return self._end(TransferEvent.EPOCHS_EQUAL, None)

    def broken(self, message: str) -> Effects:
        """The transport will not complete what was asked of it."""
        if self.state in {TransferState.READING, TransferState.VERIFYING}:
            return [Forget(), *self._end(TransferEvent.READ_BROKE, message)]
        if self.state is TransferState.CONNECTING:
            return [Forget(), *self._give_up(message)]
        return []

    def cancel(self, why: str = "cancelled") -> Effects:
        """Nobody wants the pages any more, or something unforeseen happened."""
        return self._give_up(why) if TRANSFER_MACHINE.allows(self.state, TransferEvent.GIVE_UP) else []

    def quiet(self) -> Effects:
        """The transport is finished with our pages, for good or ill."""
        if self.state is not TransferState.DRAINING:
            return []
        self._move(TransferEvent.QUIET)
        return self._farewell(done=False)

    def tick(self, now: float) -> Effects:
        """Let time act."""
        if now < self.due:
            return []
        if self.state is TransferState.READING:
            return self._tick_reading(now)
        if self.state is TransferState.VERIFYING:
            return self.broken(f"the peer's epochs were not read in {self._times.control_seconds:.2f} s")
        if self.state is TransferState.QUEUED:
            return self._give_up(f"waited {now - self._begun:.1f} s for other transfers")
        return [Forget(), *self._give_up(f"the peer did not answer in {self._times.control_seconds:.2f} s")]

    # ------------------------------------------------------------------ inside

    def _tick_reading(self, now: float) -> Effects:
        if now >= self._limit:
            return self._give_up(f"the transfer took longer than {self._times.deadline_seconds(self._num_bytes):.2f} s")
        if now >= self._stall_at:
            return self._give_up(f"the transfer made no progress for {self._times.stall_seconds:.2f} s")
        self._renew_at = now + self._lease_seconds / _RENEWALS_PER_LEASE
        return [Renew(self._times.control_seconds)]

    def _read(self, now: float) -> Effects:
        self._limit = now + self._times.deadline_seconds(self._num_bytes)
        return [StartRead()]

    def _give_up(self, failure: str) -> Effects:
        return self._end(TransferEvent.GIVE_UP, failure)

    def _end(self, event: TransferEvent, failure: str | None) -> Effects:
        """The outcome is known: it is said at once, even where the pages must still wait for `quiet`."""
        self._move(event)
        self._limit = math.inf
        report = Report(failure)
        return [report, *self._farewell(done=failure is None)] if self.is_over else [report]

    def _farewell(self, *, done: bool) -> Effects:
        if not self.source.ticket.held:
            return [Quiet()]
        return [Quiet(), Finish(done, self._times.control_seconds)]

    def _move(self, event: TransferEvent) -> None:
        self.state = TRANSFER_MACHINE.next(self.state, event)
        if self.state is not TransferState.READING:
            self._stall_at = self._renew_at = math.inf
