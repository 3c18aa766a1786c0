"""State machine of one attempt to fetch a ticket's pages; it takes events and returns effects, without threads or
sockets.

    event, from the fetcher                 effects of the attempt
    a thread is available      begin ->     Connect
    the peer is connected  connected ->     Claim         (StartRead, if the pages are not held under an offer)
    the lease was granted    claimed ->     StartRead
    pages have arrived      progress ->
    all pages have arrived   arrived ->     ReadEpochs
    the epochs were read      epochs ->     Report, Quiet, Finish    (CheckDigests, if the ticket has digests)
    digests were compared    digests ->     Report, Quiet, Finish
    the transport is quiet     quiet ->     Quiet, Finish
    the time is `due`           tick ->     Renew, or the attempt fails by time-out

Every wait is bounded by `due`; a result that arrives after a time-out has no effect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken, KvferryError, TicketRejected
from kvferry.core.ids import BlockId
from kvferry.kv.handoff.transfers import TRANSFER_MACHINE, TransferEvent, TransferState, TransferTimes
from kvferry.kv.interface.connector import FetchSource

_RENEWALS_PER_LEASE = 6


@dataclass(frozen=True, slots=True)
class Connect:
    """Effect: connect to the peer; the result is `connected`, `refused` or `broken`."""

    timeout: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Effect: request a lease from the peer; the result is `claimed` or `refused`."""

    timeout: float


@dataclass(frozen=True, slots=True)
class StartRead:
    """Effect: copy the pages `Attempt.remote` into `Attempt.local`, with conversion if layouts differ; the results are
    calls of `progress`, then `arrived` or `broken`."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Effect: extend the lease, best effort, without a result. If the lease is lost, epochs show whether the pages
    changed."""

    timeout: float


@dataclass(frozen=True, slots=True)
class ReadEpochs:
    """Effect: read the peer's current epochs of the pages `Attempt.remote`; the result is `epochs` or `broken`."""

    timeout: float


@dataclass(frozen=True, slots=True)
class CheckDigests:
    """Effect: compare the digests of the data with `Attempt.expected_digests`; the result is `digests`."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Effect: drop the transport's state for the peer, since the peer failed or restarted."""


@dataclass(frozen=True, slots=True)
class Report:
    """Effect: report the outcome. After a failure the tokens are computed into other pages; the target pages stay
    reserved until `Quiet`."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class Quiet:
    """Effect: release the target pages, since the transport no longer accesses them."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: notify the peer that the attempt has ended, best effort; if the message is lost, the lease expires."""

    done: bool
    timeout: float


Effect = Connect | Claim | StartRead | Renew | ReadEpochs | CheckDigests | Forget | Report | Quiet | Finish
Effects = list[Effect]


class Attempt:
    """State and deadlines of one attempt. Each event is a method that returns the effects to execute, in order."""

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
        requires_digests: bool = False,
    ) -> None:
        """
        Args:
            source: the opened ticket, and the number of the attempt.
            first_block: position in the prompt of the block that goes into `targets[0]`.
            targets: pages of this worker to read into, in order of position.
            connector: name of this worker's connector.
            block_bytes: bytes of one page of the peer.
            times: time limits of the states.
            now: time of the attempt's beginning, monotonic seconds.
            blocks: positions of the peer's blocks to read if its layout differs; default: the positions of the target
                blocks.
            requires_digests: whether the attempt fails if the ticket has no digests.

        Raises:
            InvariantBroken: the ticket does not have the needed blocks.
        """
        ticket = source.ticket
        needed = range(first_block, first_block + len(targets)) if blocks is None else blocks
        # Block i of the prompt is entry i of the ticket; the blocks of windows follow.
        span = slice(needed.start, needed.stop)
        self.source = source
        self.remote = list(ticket.block_ids[span])
        self.local = list(targets)
        self.state = TRANSFER_MACHINE.initial
        self._promised = list(ticket.epochs[span])
        self.expected_digests = list(ticket.digests[span])
        """Digests of the pages in `remote`; empty if the ticket has no digests."""
        self._requires_digests = requires_digests
        if not len(self.remote) == len(needed) == len(self._promised):
            raise InvariantBroken(
                f"ticket {ticket.ticket_id} has {len(ticket.block_ids)} pages and {len(ticket.epochs)} epochs; blocks "
                f"{needed.start} to {needed.stop - 1} are needed"
            )
        self._connector = connector
        self._num_bytes = block_bytes * len(self.remote)
        self._times = times
        self._begun = now
        self._limit = now + times.queue_seconds
        """Time at which the current state times out."""
        self._stall_at = math.inf
        self._progress = -1
        self._renew_at = math.inf
        self._lease_seconds = math.inf

    @property
    def due(self) -> float:
        """Time at which `tick` has an effect; infinite if the attempt has no time limit."""
        return min(self._limit, self._stall_at, self._renew_at)

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended and the transport no longer accesses the target pages."""
        return self.state in TRANSFER_MACHINE.final

    # ------------------------------------------------------------------ events

    def begin(self, now: float) -> Effects:
        """Record that a fetch thread is available.

        Args:
            now: monotonic seconds.
        """
        if self.state is not TransferState.QUEUED:
            return []
        if now > self._limit:
            return self._give_up(f"waited {now - self._begun:.1f} s for other transfers")
        theirs = self.source.ticket.connector
        if theirs != self._connector:
            return self._give_up(
                f"the ticket's connector is {theirs!r}, but this worker reads over {self._connector!r}"
            )
        if self._requires_digests and not self.expected_digests:
            return self._give_up("the ticket has no digests, but this worker requires them (--verify-kv digest)")
        self._move(TransferEvent.BEGIN)
        self._limit = now + self._times.control_seconds
        return [Connect(self._times.control_seconds)]

    def connected(self, now: float) -> Effects:
        """Record that the transport is connected to the peer.

        Args:
            now: monotonic seconds.
        """
        if self.state is not TransferState.CONNECTING:
            return []
        if not self.source.ticket.held:
            self._move(TransferEvent.OPEN)
            return self._read(now)
        self._move(TransferEvent.CONNECTED)
        self._limit = now + self._times.control_seconds
        return [Claim(self._times.control_seconds)]

    def claimed(self, lease_seconds: float, now: float) -> Effects:
        """Record that the peer granted a lease of `lease_seconds` and holds the pages.

        Args:
            lease_seconds: duration of the lease.
            now: monotonic seconds.
        """
        if self.state is not TransferState.CLAIMING:
            return []
        self._move(TransferEvent.CLAIMED)
        self._lease_seconds = lease_seconds
        self._renew_at = now + lease_seconds / _RENEWALS_PER_LEASE
        return self._read(now)

    def refused(self, error: KvferryError) -> Effects:
        """Record that the peer rejected the connection or the claim, or did not answer."""
        if self.state not in {TransferState.CONNECTING, TransferState.CLAIMING}:
            return []
        gone = not isinstance(error, TicketRejected) or error.reason == "TICKET_INCARNATION"
        failure = f"{error.reason}: {error.message}"
        return [*([Forget()] if gone else []), *self._end(TransferEvent.REFUSED, failure)]

    def progress(self, count: int, now: float) -> Effects:
        """Record the read's progress, a `count` that grows while data arrives.

        Args:
            count: progress of the read (`MeasuredRead.progress`).
            now: monotonic seconds.
        """
        if self.state is TransferState.READING and count > self._progress:
            self._progress = count
            self._stall_at = now + self._times.stall_seconds
        return []

    def arrived(self, now: float) -> Effects:
        """Record that all data has arrived; the peer's epochs are read next, to verify it.

        Args:
            now: monotonic seconds.
        """
        if self.state is not TransferState.READING:
            return []
        self._move(TransferEvent.READ_DONE)
        self._limit = now + self._times.control_seconds
        return [ReadEpochs(self._times.control_seconds)]

    def epochs(self, found: Sequence[int]) -> Effects:
        """Compare the peer's epochs, which were read after the data, with the ticket's epochs."""
        if self.state is not TransferState.VERIFYING:
            return []
        if list(found) != self._promised:  # also unequal if `found` is too short
            return self._end(TransferEvent.EPOCHS_DIFFER, "the peer reused the pages before they were read")
        return [CheckDigests()] if self.expected_digests else self._end(TransferEvent.EPOCHS_EQUAL, None)

    def digests(self, *, equal: bool) -> Effects:
        """Record whether the digests of the data equal the expected digests."""
        if self.state is not TransferState.VERIFYING:
            return []
        if not equal:
            return self._end(TransferEvent.DIGESTS_DIFFER, "the data was corrupted in transit from the peer")
        return self._end(TransferEvent.EPOCHS_EQUAL, None)

    def broken(self, message: str) -> Effects:
        """Record that the transport failed to connect, to read pages or to read epochs."""
        if self.state in {TransferState.READING, TransferState.VERIFYING}:
            return [Forget(), *self._end(TransferEvent.READ_BROKE, message)]
        if self.state is TransferState.CONNECTING:
            return [Forget(), *self._give_up(message)]
        return []

    def cancel(self, why: str = "cancelled") -> Effects:
        """Abandon the attempt because the request was cancelled or an unexpected error occurred."""
        return self._give_up(why) if TRANSFER_MACHINE.allows(self.state, TransferEvent.GIVE_UP) else []

    def quiet(self) -> Effects:
        """Record that the transport no longer accesses the target pages, after success or failure."""
        if self.state is not TransferState.DRAINING:
            return []
        self._move(TransferEvent.QUIET)
        return self._farewell(done=False)

    def tick(self, now: float) -> Effects:
        """Apply the time `now`: renew the lease, or fail the attempt if a time limit has passed."""
        if now < self.due:
            return []
        if self.state is TransferState.READING:
            return self._tick_reading(now)
        if self.state is TransferState.VERIFYING:
            return self.broken(f"the peer's epochs were not read in {self._times.control_seconds:.2f} s")
        if self.state is TransferState.QUEUED:
            return self._give_up(f"waited {now - self._begun:.1f} s for other transfers")
        return [Forget(), *self._give_up(f"the peer did not answer in {self._times.control_seconds:.2f} s")]

    # ------------------------------------------------------------------ internals

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
        """Report the outcome now, even if the pages can be released only after `quiet`."""
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
