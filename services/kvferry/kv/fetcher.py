"""Carries transfers out: the thin shell around `transfers.TRANSFER_MACHINE`.

Each load job runs on one thread of a small pool: connect, claim, read, verify, finish, each with its own
deadline, and a bound on the wait for a thread. The engine's thread only starts and cancels jobs and hears about
them through a listener. A job whose read stalls reports its failure at once, so that the request can go on; its
pages pass to one draining thread, which waits, for as long as it takes, until the transport is quiet. So stalled
reads hold pages, never the threads that healthy peers need.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvferry.core.clock import Clock
from kvferry.core.errors import InvariantBroken, KvferryError, TicketRejected
from kvferry.core.ids import BlockId, RequestId
from kvferry.kv.connector import (
    FetchSource,
    LoadListener,
    LoadOutcome,
    PagesQuiet,
    Peer,
    PeerControl,
    Read,
    ReadError,
    Transport,
)
from kvferry.kv.layout import KvLayout
from kvferry.kv.transfers import TRANSFER_MACHINE, TransferEvent, TransferState, TransferTimes

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.005
_DRAIN_PAUSE_SECONDS = 0.05


@dataclass(slots=True)
class _Job:
    number: int
    request_id: RequestId
    source: FetchSource
    remote: list[int]
    local: list[BlockId]
    epochs: list[int]
    started: float
    lease_seconds: float = 30.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: TransferState = TRANSFER_MACHINE.initial

    def move(self, event: TransferEvent) -> None:
        self.state = TRANSFER_MACHINE.next(self.state, event)


class _GivenUp(Exception):
    """This attempt ends here; the message says why."""


class Fetcher:
    """A `KvLoader` over one transport and one way to talk to peers."""

    def __init__(
        self,
        transport: Transport,
        control: PeerControl,
        layout: KvLayout,
        listener: LoadListener,
        *,
        clock: Clock,
        times: TransferTimes | None = None,
        max_parallel: int = 4,
    ) -> None:
        """
        Args:
            listener: hears outcomes, on a fetcher thread.
            max_parallel: transfers at a time; more only share the same link.
        """
        self._transport = transport
        self._control = control
        self._layout = layout
        self._listener = listener
        self._clock = clock
        self._times = times or TransferTimes()
        self._pool = ThreadPoolExecutor(max_parallel, thread_name_prefix="kv-fetch")
        self._jobs: dict[int, _Job] = {}
        self._connected: set[str] = set()
        """Incarnations of the peers whose address the transport knows."""
        self._lives: dict[str, Peer] = {}
        """The latest life of each worker that the transport knows."""
        self._draining: list[tuple[_Job, Peer, Read]] = []
        self._drainer: threading.Thread | None = None
        # Guards _jobs, _connected, _lives, _draining and _drainer; nothing that waits is called while it is held.
        self._lock = threading.Lock()
        self._closing = threading.Event()

    # ------------------------------------------------------------------ scheduler side

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        if not isinstance(source, FetchSource):
            raise InvariantBroken(f"a fetch needs a ticket, not {type(source).__name__}")
        ticket = source.ticket
        span = slice(first_block, first_block + len(targets))  # by position: block i of the prompt is block i there
        made = _Job(
            job,
            request_id,
            source,
            list(ticket.block_ids[span]),
            list(targets),
            list(ticket.epochs[span]),
            self._clock.monotonic(),
        )
        if len(made.remote) != len(made.local):
            raise InvariantBroken(f"ticket {ticket.ticket_id} has no blocks {span}")
        with self._lock:
            self._jobs[job] = made
        self._pool.submit(self._run, made)

    def cancel(self, request_id: RequestId) -> None:
        with self._lock:
            for job in self._jobs.values():
                if job.request_id == request_id:
                    job.cancelled.set()

    @property
    def num_active(self) -> int:
        with self._lock:
            return len(self._jobs)

    def close(self) -> None:
        """Tell every job to give up and begin no other; does not wait for them. Idempotent."""
        self._closing.set()
        with self._lock:
            for job in self._jobs.values():
                job.cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ one job, on its thread

    def _run(self, job: _Job) -> None:
        peer = Peer(*job.source.ticket.peer, job.source.ticket.control_address)
        failure: str | None = None
        read: Read | None = None
        try:
            self._claim(job, peer)
            read = self._transport.read(peer, job.remote, job.local)
            self._await(job, peer, read)
            self._verify(job, peer)
        except _GivenUp as error:
            failure = str(error)
        except ReadError as error:
            failure = str(error)
            if job.state in {TransferState.READING, TransferState.VERIFYING}:
                job.move(TransferEvent.READ_BROKE)
            self._forget(peer)
        except Exception:
            failure = "internal error while fetching"
            _log.exception("fetch failed", extra={"request_id": job.request_id})
            if TRANSFER_MACHINE.allows(job.state, TransferEvent.GIVE_UP):
                job.move(TransferEvent.GIVE_UP)
        self._listener(
            LoadOutcome(
                request_id=job.request_id,
                job=job.number,
                failure=failure,
                num_blocks=len(job.local),
                num_bytes=len(job.local) * self._layout.block_bytes,
                seconds=self._clock.monotonic() - job.started,
            )
        )
        if job.state is TransferState.DRAINING and read is not None and not read.is_quiet():
            self._drain_later(job, peer, read)
        else:
            self._end(job, peer)

    def _claim(self, job: _Job, peer: Peer) -> None:
        timeout = self._times.control_seconds
        ticket = job.source.ticket
        try:
            if job.cancelled.is_set():
                raise _GivenUp("cancelled")
            waited = self._clock.monotonic() - job.started
            if waited > self._times.queue_seconds:
                raise _GivenUp(f"waited {waited:.1f} s for other transfers")
            if ticket.connector != self._transport.name:
                raise _GivenUp(
                    f"the peer offers over {ticket.connector!r}, this worker reads over {self._transport.name!r}"
                )
            self._connect(peer, timeout)
            job.lease_seconds = self._control.claim(peer, ticket.id, job.source.attempt, timeout)
        except (_GivenUp, ReadError):
            job.move(TransferEvent.GIVE_UP)
            raise
        except KvferryError as error:
            job.move(TransferEvent.REFUSED)
            if not isinstance(error, TicketRejected) or error.reason == "TICKET_INCARNATION":
                self._forget(peer)  # gone, or another life by now: what the transport keeps of it is of no use
            raise _GivenUp(f"{error.reason}: {error.message}") from error
        job.move(TransferEvent.CLAIMED)

    def _connect(self, peer: Peer, timeout: float) -> None:
        with self._lock:
            if peer.incarnation in self._connected:
                return
            former = self._lives.get(peer.worker_id)
        if former is not None:  # it restarted; its old pages would stay mapped for ever
            self._forget(former)
        address = self._control.describe(peer, self._transport.name, self._layout.fingerprint, timeout)
        self._transport.connect(peer, address)
        # A first read may have to set up connections (tens to hundreds of ms over NIXL); it has a control message's
        # time here, where a transfer's own deadline would give it up.
        self._transport.read_epochs(peer, [0], timeout)
        with self._lock:
            self._connected.add(peer.incarnation)
            self._lives[peer.worker_id] = peer

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._connected.discard(peer.incarnation)
            if self._lives.get(peer.worker_id) == peer:
                del self._lives[peer.worker_id]
        self._transport.forget(peer)

    def _await(self, job: _Job, peer: Peer, read: Read) -> None:
        """Poll with growing pauses until the data is here; renew the lease meanwhile."""
        begun = self._clock.monotonic()
        deadline = begun + self._times.deadline_seconds(len(job.local) * self._layout.block_bytes)
        renew_at = begun + job.lease_seconds / 6
        pause = _FIRST_PAUSE_SECONDS
        while not read.poll():
            now = self._clock.monotonic()
            if now >= deadline:
                job.move(TransferEvent.GIVE_UP)
                raise _GivenUp(f"the transfer took longer than {deadline - begun:.2f} s")
            if now >= renew_at:
                self._renew(job, peer)
                renew_at = now + job.lease_seconds / 6
            if job.cancelled.wait(pause):
                job.move(TransferEvent.GIVE_UP)
                raise _GivenUp("cancelled")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        job.move(TransferEvent.READ_DONE)

    def _renew(self, job: _Job, peer: Peer) -> None:
        try:
            self._control.renew(peer, job.source.ticket.id, job.source.attempt, self._times.control_seconds)
        except KvferryError as error:
            # Not fatal: the epochs will tell whether the pages were still ours when the data arrived.
            _log.info("lease not renewed: %s", error.message, extra={"request_id": job.request_id})

    def _verify(self, job: _Job, peer: Peer) -> None:
        if self._transport.read_epochs(peer, job.remote, self._times.control_seconds) != job.epochs:
            job.move(TransferEvent.EPOCHS_DIFFER)
            raise _GivenUp("the peer reused the pages before they were read")
        job.move(TransferEvent.EPOCHS_EQUAL)

    def _drain_later(self, job: _Job, peer: Peer, read: Read) -> None:
        """Until the transport is quiet nobody may reuse the pages; wait for it on the draining thread."""
        with self._lock:
            self._draining.append((job, peer, read))
            if self._drainer is None:
                self._drainer = threading.Thread(target=self._drain, name="kv-drain", daemon=True)
                self._drainer.start()

    def _drain(self) -> None:
        while not self._closing.wait(_DRAIN_PAUSE_SECONDS):
            with self._lock:
                waiting = list(self._draining)
                if not waiting:
                    self._drainer = None
                    return
            for entry in waiting:
                job, peer, read = entry
                if read.is_quiet():
                    with self._lock:
                        self._draining.remove(entry)
                    self._end(job, peer)

    def _end(self, job: _Job, peer: Peer) -> None:
        """Nothing touches the job's pages any more."""
        if job.state is TransferState.DRAINING:
            job.move(TransferEvent.QUIET)
        with self._lock:
            del self._jobs[job.number]
        self._listener(PagesQuiet(job.number))
        self._finish(job, peer)

    def _finish(self, job: _Job, peer: Peer) -> None:
        """Tell the peer; best effort, its lease is the backstop."""
        try:
            self._control.finish(
                peer,
                job.source.ticket.id,
                job.source.attempt,
                self._times.control_seconds,
                done=job.state is TransferState.READY,
            )
        except KvferryError as error:
            _log.info("hand-off not confirmed: %s", error.message, extra={"request_id": job.request_id})
