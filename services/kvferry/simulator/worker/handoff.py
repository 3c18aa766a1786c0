"""Hand-offs in virtual time: the production offers and attempts, over modeled links.

prefill replica   Export --> OfferBook                                      pages are held until the reader is done
decode replica    LoadJob --> Attempt --> effects: claim, read, epochs, finish   each takes its time on the links
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvferry.core.errors import TicketRejected, Unavailable
from kvferry.core.ids import BlockId, RequestId, TicketId
from kvferry.engine.schedule.step.kv_jobs import Export
from kvferry.engine.schedule.step.kv_progress import RemoteKv
from kvferry.kv.handoff.attempt import (
    Attempt,
    Claim,
    Connect,
    Effects,
    Finish,
    Quiet,
    ReadEpochs,
    Renew,
    Report,
    StartRead,
)
from kvferry.kv.handoff.offers import OfferBook, OfferTimes
from kvferry.kv.handoff.transfers import TransferState, TransferTimes
from kvferry.kv.interface.connector import FetchSource, LoadOutcome, PagesQuiet
from kvferry.kv.interface.ticket import Ticket
from kvferry.simulator.clock import VirtualClock
from kvferry.simulator.worker.device import LinkProfile
from kvferry.simulator.worker.replica import SimulatedReplica

CONNECTOR = "simulated"
_FINGERPRINT = bytes(16)


@dataclass(slots=True)
class TransferCounts:
    """Totals of the hand-offs of a simulation."""

    transfers: int = 0
    failures: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """Sum of the times from the start of a load to its outcome."""


class SimulatedLinks:
    """The links of all replicas. A link carries one transfer at a time, in the order of their starts."""

    def __init__(self, profile: LinkProfile) -> None:
        self.profile = profile
        self._free_at: dict[tuple[str, bool], float] = {}

    def arrival(self, source: str, target: str, num_bytes: int, now: float) -> float:
        """Schedule a transfer between two replicas.

        Args:
            source: name of the sender.
            target: name of the receiver.
            num_bytes: number of bytes to transfer.
            now: time in seconds at which the transfer is requested; it starts when both links are free.

        Returns:
            Time in seconds at which the last byte arrives.
        """
        sender, receiver = (source, True), (target, False)
        start = max(now, self._free_at.get(sender, 0.0), self._free_at.get(receiver, 0.0))
        end = start + num_bytes / self.profile.bytes_per_second
        self._free_at[sender] = self._free_at[receiver] = end
        return end + self.profile.latency


class SimulatedOfferDesk:
    """Offers of one prefill replica."""

    def __init__(self, clock: VirtualClock, name: str, replica: SimulatedReplica, times: OfferTimes) -> None:
        """
        Args:
            clock: clock of the simulation.
            name: name of the replica; it is also the worker id in tickets.
            replica: the replica, which frees the pages of ended offers.
            times: durations of offers.
        """
        self.name, self.replica = name, replica
        self._clock = clock
        self.book: OfferBook[tuple[BlockId, ...]] = OfferBook(times)
        self._number = 0
        self._expire_at = math.inf

    def offer(self, export: Export, tokens: int) -> Ticket:
        """Offer the pages of a finished prompt to one reader.

        Args:
            export: the pages and their epochs.
            tokens: number of tokens whose KV the pages hold.
        """
        self._number += 1
        now = self._clock.now
        ticket = Ticket(
            ticket_id=f"{self.name}/{self._number}",
            worker_id=self.name,
            incarnation=self.name,
            control_address=self.name,
            connector=CONNECTOR,
            fingerprint=_FINGERPRINT,
            scope="",
            tokens_digest=b"",
            num_tokens=tokens,
            block_ids=tuple(export.blocks),
            epochs=tuple(export.epochs),
            expires_wall=now + self.book.times.offer_seconds,
        )
        self._free(self.book.offer(ticket.id, tuple(export.blocks), now))
        if self._expire_at == math.inf:
            self._watch(now + self.book.times.offer_seconds)
        return ticket

    def release(self, ticket_id: TicketId) -> None:
        """Withdraw an offer."""
        self._free(self.book.release(ticket_id, self._clock.now))

    def finish(self, ticket_id: TicketId, attempt: int, *, done: bool) -> None:
        """Record the end of a reader's attempt.

        Args:
            ticket_id: id of the offer's ticket.
            attempt: number of the attempt.
            done: whether the pages were read.
        """
        self._free(self.book.finish(ticket_id, attempt, self._clock.now, done=done))

    def _watch(self, at: float) -> None:
        self._expire_at = at
        if at < math.inf:
            self._clock.at(at, self._expire)

    def _expire(self) -> None:
        self._free(self.book.expire(self._clock.now))
        self._watch(self.book.due)

    def _free(self, pages: Sequence[tuple[BlockId, ...]]) -> None:
        if self.replica.is_stopped:
            return
        for blocks in pages:
            self.replica.release(blocks)


@dataclass(slots=True, eq=False)
class _Load:
    """A load in progress."""

    number: int
    request_id: RequestId
    attempt: Attempt
    desk: SimulatedOfferDesk
    begun: float
    num_blocks: int
    is_reading: bool = False
    tick_at: float = math.inf
    """Time for which the next call of `Attempt.tick` is scheduled."""


class SimulatedLoader:
    """Loads of one decode replica. Implements `kv.interface.connector.KvLoader`."""

    def __init__(
        self,
        clock: VirtualClock,
        name: str,
        links: SimulatedLinks,
        desks: dict[str, SimulatedOfferDesk],
        times: TransferTimes,
        block_bytes: int,
        counts: TransferCounts,
    ) -> None:
        """
        Args:
            clock: clock of the simulation.
            name: name of the replica.
            links: links of all replicas.
            desks: offer desks of the prefill replicas, by worker id.
            times: timeouts of transfers.
            block_bytes: bytes of KV per block.
            counts: totals to which hand-offs are added.
        """
        self._clock, self._name, self._links, self._desks = clock, name, links, desks
        self._times, self._block_bytes, self._counts = times, block_bytes, counts
        self._loads: dict[RequestId, _Load] = {}
        self.replica: SimulatedReplica | None = None
        """Receiver of the outcomes; set as soon as it exists."""

    @property
    def num_active(self) -> int:
        """Number of loads that have not ended."""
        return len(self._loads)

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        """Start a load; see `KvLoader.start`."""
        assert isinstance(source, FetchSource)
        now = self._clock.now
        attempt = Attempt(
            source, first_block, targets, connector=CONNECTOR, block_bytes=self._block_bytes, times=self._times, now=now
        )
        load = _Load(job, request_id, attempt, self._desks[source.ticket.worker_id], now, len(targets))
        self._loads[request_id] = load
        # Deferred, because the engine may still be planning the step that starts this load.
        self._clock.at(now, lambda: self._run(load, attempt.begin(self._clock.now)))

    def cancel(self, request_id: RequestId) -> None:
        """Cancel the load of a request. Idempotent."""
        load = self._loads.get(request_id)
        if load is not None:
            self._run(load, load.attempt.cancel())

    # ------------------------------------------------------------------ effects

    def _run(self, load: _Load, effects: Effects) -> None:
        latency, attempt = self._links.profile.latency, load.attempt
        for effect in effects:
            match effect:
                case Connect():
                    self._clock.after(2 * latency, partial(self._connected, load))
                case Claim():
                    self._clock.after(latency, partial(self._claim, load))
                case StartRead():
                    load.is_reading = True
                    size = self._block_bytes * load.num_blocks
                    at = self._links.arrival(load.desk.name, self._name, size, self._clock.now + latency)
                    self._clock.at(at, partial(self._arrived, load))
                case Renew():
                    self._clock.after(latency, partial(self._renew, load))
                case ReadEpochs():
                    self._clock.after(2 * latency, partial(self._epochs, load))
                case Report(failure):
                    self._report(load, failure)
                case Quiet():
                    self._loads.pop(load.request_id, None)
                    self._post(PagesQuiet(load.number))
                case Finish(done):
                    ticket, number = attempt.source.ticket, attempt.source.attempt
                    self._clock.after(latency, partial(load.desk.finish, ticket.id, number, done=done))
                case _:
                    pass  # Forget: no peer state is kept; CheckDigests: simulated tickets have no digests
        if not attempt.is_over and attempt.due < load.tick_at:
            load.tick_at = attempt.due
            self._clock.at(attempt.due, partial(self._tick, load, attempt.due))

    def _tick(self, load: _Load, at: float) -> None:
        if at == load.tick_at and not load.attempt.is_over:
            load.tick_at = math.inf
            self._run(load, load.attempt.tick(self._clock.now))
            self._settle(load)

    def _connected(self, load: _Load) -> None:
        if load.desk.replica.is_stopped:
            self._run(load, load.attempt.refused(Unavailable("the peer does not answer")))
        else:
            self._run(load, load.attempt.connected(self._clock.now))

    def _claim(self, load: _Load) -> None:
        source = load.attempt.source
        try:
            if load.desk.replica.is_stopped:
                raise TicketRejected("the peer restarted", reason="TICKET_INCARNATION", field="incarnation")
            lease = load.desk.book.claim(source.ticket.id, source.attempt, self._clock.now)
        except TicketRejected as error:
            refused = error  # the name of an `except` clause is deleted at its end
            self._clock.after(self._links.profile.latency, lambda: self._run(load, load.attempt.refused(refused)))
            return
        self._clock.after(
            self._links.profile.latency, lambda: self._run(load, load.attempt.claimed(lease, self._clock.now))
        )

    def _renew(self, load: _Load) -> None:
        source = load.attempt.source
        with suppress(TicketRejected):  # the epochs show whether the pages changed
            load.desk.book.renew(source.ticket.id, source.attempt, self._clock.now)

    def _arrived(self, load: _Load) -> None:
        load.is_reading = False
        if load.desk.replica.is_stopped:
            self._run(load, load.attempt.broken("the peer does not answer"))
        else:
            self._run(load, load.attempt.arrived(self._clock.now))
        self._settle(load)

    def _epochs(self, load: _Load) -> None:
        if load.desk.replica.is_stopped:
            self._run(load, load.attempt.broken("the peer does not answer"))
        else:
            found = load.desk.replica.allocator.pool.epochs
            self._run(load, load.attempt.epochs([found[block] for block in load.attempt.remote]))
        self._settle(load)

    def _settle(self, load: _Load) -> None:
        """Report that the transport is quiet once the data of an abandoned read has arrived."""
        if load.attempt.state is TransferState.DRAINING and not load.is_reading:
            self._run(load, load.attempt.quiet())

    def _report(self, load: _Load, failure: str | None) -> None:
        seconds = self._clock.now - load.begun
        size = self._block_bytes * load.num_blocks if failure is None else 0
        self._counts.transfers += 1
        self._counts.failures += failure is not None
        self._counts.num_bytes += size
        self._counts.seconds += seconds
        self._post(
            LoadOutcome(load.request_id, load.number, failure, load.num_blocks if failure is None else 0, size, seconds)
        )

    def _post(self, message: LoadOutcome | PagesQuiet) -> None:
        if self.replica is not None and not self.replica.is_stopped:
            self.replica.post(message)


def remote_of(ticket: Ticket, attempt: int) -> RemoteKv:
    """Return the KV of a ticket as the source of a load."""
    return RemoteKv(ticket.num_tokens, FetchSource(ticket, attempt), place=ticket.worker_id)
