"""Fetcher: loads KV pages from peers by executing the effects of `attempt.Attempt` on threads.

Each load job runs on one thread of a small pool. The thread executes the attempt's effects in order and reports each
result back to the attempt. The engine's thread only starts and cancels jobs; it receives outcomes through a listener. A
job whose read stalls reports its failure immediately, so that the request can continue; a separate draining thread then
waits, without a time limit, until the transport is quiet. A stalled read thus occupies pages, but no thread of the
pool. A job that is cancelled before its read releases its pages immediately, also while it waits for a thread or for
the peer's answer.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kvferry.core.clock import Clock
from kvferry.core.dtypes import FLOAT32
from kvferry.core.errors import InvariantBroken, KvferryError, TicketRejected
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.process.exit_threads import start_thread
from kvferry.kv.handoff import attempt as effects
from kvferry.kv.handoff.attempt import Attempt, Effect, Effects
from kvferry.kv.handoff.transfers import TransferState, TransferTimes
from kvferry.kv.interface.connector import (
    FetchSource,
    LoadListener,
    LoadOutcome,
    MeasuredRead,
    PagesQuiet,
    Peer,
    PeerControl,
    Read,
    ReadError,
    Transport,
)
from kvferry.kv.interface.mirror import SAME_PAGES, CopyError, PageMirror
from kvferry.kv.interface.ticket import plan_for
from kvferry.kv.pages.digests import page_digests
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.pages.relayout import Relayout
from kvferry.kv.staged import StagedRead, StagingSlots, raw_reader

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.005
_DRAIN_PAUSE_SECONDS = 0.05
_SLOT_BYTES = 8 << 20
"""Minimum size of a job's staging slot in bytes; slots are larger if four of this worker's pages would not fit."""


@dataclass(slots=True)
class _Job:
    number: int
    request_id: RequestId
    attempt: Attempt
    peer: Peer
    started: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    may_write: bool = False
    """Whether the transport was allowed to write to the target pages."""
    first_block: int = 0
    relayout: Relayout | None = None
    """Conversion from the peer's page layout to this worker's layout; `None` if the layouts are equal."""
    place: memoryview | None = None
    """Staging slot of the job, held until the transport is quiet; `None` at other times."""
    read: Read | None = None
    pause: float = _FIRST_PAUSE_SECONDS


class Fetcher:
    """`KvLoader` that reads pages over one transport and sends control messages through one `PeerControl`."""

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
        pages: memoryview | None = None,
        mirror: PageMirror = SAME_PAGES,
        requires_digests: bool = False,
    ) -> None:
        """
        Args:
            transport: reads the pages.
            control: sends control messages to peers.
            layout: this worker's layout.
            listener: called with the loader's messages, on a fetcher thread.
            clock: clock of all time limits.
            times: time limits of a transfer; default: `TransferTimes()`.
            max_parallel: maximum number of concurrent transfers.
            pages: the engine's pages, for conversions and digests; without them, only pages with an equal layout are
                read.
            mirror: mapping between the memory that the transport writes and the engine's pages.
            requires_digests: whether to reject tickets without digests. If a ticket has digests, they are always
                verified.
        """
        self._transport = transport
        self._control = control
        self._layout = layout
        self._listener = listener
        self._clock = clock
        self._times = times or TransferTimes()
        self._pages = pages
        self._mirror = mirror
        self._requires_digests = requires_digests
        # Space for four pages of this layout, or two pages in float32, the largest dtype that a peer can have.
        slot_bytes = max(_SLOT_BYTES, 4 * layout.block_bytes, 2 * replace(layout, dtype=FLOAT32).block_bytes)
        self._staging = StagingSlots(lambda size: transport.staging(size), slot_bytes, 2 * max_parallel)
        self._pool = ThreadPoolExecutor(max_parallel, thread_name_prefix="kv-fetch")
        self._jobs: dict[int, _Job] = {}
        self._connected: set[str] = set()
        """Incarnations of the peers that are registered with the transport."""
        self._lives: dict[str, Peer] = {}
        """Latest registered incarnation of each worker, by worker id."""
        self._draining: list[_Job] = []
        self._drainer: threading.Thread | None = None
        # Guards _jobs, _connected, _lives, _draining and _drainer; not held during blocking calls.
        self._lock = threading.Lock()
        self._closing = threading.Event()

    # ------------------------------------------------------------------ scheduler side

    def use_layout(self, layout: KvLayout) -> None:
        """Fetch only what fits another layout from now on, which differs in the model's digest; no fetch is in flight.
        Called on the scheduler's thread."""
        self._layout = layout

    def start(
        self, job: int, request_id: RequestId, source: object, first_block: int, targets: Sequence[BlockId]
    ) -> None:
        if not isinstance(source, FetchSource):
            raise InvariantBroken(f"a fetch needs a ticket, not {type(source).__name__}")
        ticket, now = source.ticket, self._clock.monotonic()
        try:
            relayout = plan_for(ticket.fingerprint, ticket.layout, self._layout)
        except TicketRejected as error:  # the weights have changed since the ticket was checked
            self._listener(LoadOutcome(request_id, job, error.message, 0, 0, 0.0))
            self._listener(PagesQuiet(job))
            return
        attempt = Attempt(
            source,
            first_block,
            targets,
            connector=self._transport.name,
            block_bytes=(relayout.source if relayout else self._layout).block_bytes,
            times=self._times,
            now=now,
            blocks=relayout.source_blocks(first_block, len(targets), ticket.num_tokens) if relayout else None,
            requires_digests=self._requires_digests,
        )
        peer = Peer(*ticket.peer, ticket.control_address)
        made = _Job(job, request_id, attempt, peer, now, first_block=first_block, relayout=relayout)
        with self._lock:
            self._jobs[job] = made
        self._pool.submit(self._run, made)

    def cancel(self, request_id: RequestId) -> None:
        with self._lock:
            found = [job for job in self._jobs.values() if job.request_id == request_id]
            for job in found:
                job.cancelled.set()
            unread = [job for job in found if not job.may_write]
            for job in unread:
                del self._jobs[job.number]
        for job in unread:  # its thread only tells the peer, since it will not be allowed to start the read
            self._report(job, "cancelled")
            self._listener(PagesQuiet(job.number))

    @property
    def num_active(self) -> int:
        with self._lock:
            return len(self._jobs)

    def close(self) -> None:
        """Cancel all jobs and accept no more jobs, without waiting for running jobs. Idempotent."""
        self._closing.set()
        with self._lock:
            for job in self._jobs.values():
                job.cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ one job, on its thread

    def _run(self, job: _Job) -> None:
        attempt = job.attempt
        todo: deque[Effect] = deque(attempt.cancel() if job.cancelled.is_set() else [])
        todo.extend(attempt.begin(self._clock.monotonic()))
        while todo or attempt.state is TransferState.READING:
            try:
                todo.extend(self._perform(job, todo.popleft()) if todo else self._poll(job))
            except ReadError as error:
                todo.extend(attempt.broken(str(error)))
            except Exception:
                _log.exception("fetch failed", extra={"request_id": job.request_id})
                todo.extend(attempt.cancel("internal error while fetching"))
        if attempt.state is TransferState.DRAINING:
            if job.read is None or job.read.is_quiet():
                self._on_transport_quiet(job)
            else:
                self._drain_later(job)

    def _is_ended(self, job: _Job) -> bool:
        """Return whether `cancel` has reported the job's outcome and released its pages."""
        with self._lock:
            return job.number not in self._jobs

    def _may_read(self, job: _Job) -> bool:
        """Allow the transport to write to the job's pages, unless the job was cancelled."""
        with self._lock:
            job.may_write = not job.cancelled.is_set()
            return job.may_write

    def _perform(self, job: _Job, effect: Effect) -> Effects:
        """Execute one effect and report the result to the attempt; return the attempt's next effects."""
        attempt, peer = job.attempt, job.peer
        ticket = attempt.source.ticket
        match effect:
            case effects.Report() | effects.Quiet() if self._is_ended(job):
                return []
            case effects.Connect() | effects.Claim() if job.cancelled.is_set():
                return attempt.cancel()
            case effects.Connect(timeout):
                try:
                    self._connect(peer, timeout)
                except KvferryError as error:
                    return attempt.refused(error)
                return attempt.connected(self._clock.monotonic())
            case effects.Claim(timeout):
                try:
                    source = attempt.source
                    lease = self._control.claim(peer, ticket.id, source.attempt, timeout, reader=source.reader)
                except KvferryError as error:
                    return attempt.refused(error)
                return attempt.claimed(lease, self._clock.monotonic())
            case effects.StartRead():
                if not self._may_read(job):
                    return attempt.cancel()
                job.read = self._start_read(job)
            case effects.ReadEpochs(timeout):
                return attempt.epochs(self._transport.read_epochs(peer, attempt.remote, timeout))
            case effects.CheckDigests():
                return attempt.digests(equal=self._has_digests(job))
            case effects.Renew(timeout):
                self._tell(job, "lease not renewed", lambda: self._renew(job, timeout))
            case effects.Forget():
                self._forget(peer)
            case effects.Report(failure):
                self._report(job, failure or self._why_not_copied(job))
            case effects.Quiet():
                if job.place is not None:
                    self._staging.give_back(job.place)
                    job.place = None
                with self._lock:
                    del self._jobs[job.number]
                self._listener(PagesQuiet(job.number))
            case effects.Finish(done, timeout):
                self._tell(job, "hand-off not confirmed", lambda: self._finish(job, timeout, done=done))
        return []

    def _start_read(self, job: _Job) -> Read:
        attempt, relayout = job.attempt, job.relayout
        try:
            self._mirror.settle()
        except CopyError as error:
            raise ReadError(str(error)) from error
        if relayout is None:
            return self._transport.read(job.peer, attempt.remote, attempt.local)
        if self._pages is None:
            raise ReadError("this worker cannot convert pages of a different layout")
        num_tokens = attempt.source.ticket.num_tokens
        blocks = relayout.source_blocks(job.first_block, len(attempt.local), num_tokens)
        job.place = self._staging.take()
        return StagedRead(
            relayout,
            blocks,
            num_tokens,
            start=raw_reader(self._transport, job.peer, blocks, attempt.remote),
            place=job.place,
            pages=self._pages,
            first=job.first_block,
            local=attempt.local,
            digests=attempt.expected_digests,
        )

    def _has_digests(self, job: _Job) -> bool:
        """Return whether the pages have the digests in the ticket. A read with conversion has verified the data before
        converting."""
        if job.relayout is not None:
            return True
        if self._pages is None:
            return False
        attempt = job.attempt
        found = page_digests(self._pages, self._layout.block_bytes, attempt.local)
        return list(found) == attempt.expected_digests

    def _poll(self, job: _Job) -> Effects:
        """Poll the read once and wait for progress, longer after each poll; return the attempt's effects."""
        attempt, read = job.attempt, job.read
        if read is None:
            raise InvariantBroken("the attempt is in state READING, but its read was never started")
        if read.poll():
            return attempt.arrived(self._clock.monotonic())
        now = self._clock.monotonic()
        if isinstance(read, MeasuredRead):
            attempt.progress(read.progress(), now)
        due = attempt.tick(now)
        if due:
            return due
        if job.cancelled.is_set():
            return attempt.cancel()
        read.wait(job.pause)
        job.pause = min(2 * job.pause, _LONGEST_PAUSE_SECONDS)
        return []

    def _why_not_copied(self, job: _Job) -> str | None:
        """Copy the verified pages to the engine's device; return the reason for a failure."""
        try:
            self._mirror.to_device(job.attempt.local)
        except CopyError as error:
            return str(error)
        return None

    def _report(self, job: _Job, failure: str | None) -> None:
        num_blocks = 0 if failure else len(job.attempt.local)
        self._listener(
            LoadOutcome(
                request_id=job.request_id,
                job=job.number,
                failure=failure,
                num_blocks=num_blocks,
                num_bytes=num_blocks * self._layout.block_bytes,
                seconds=self._clock.monotonic() - job.started,
            )
        )

    def _renew(self, job: _Job, timeout: float) -> None:
        source = job.attempt.source
        self._control.renew(job.peer, source.ticket.id, source.attempt, timeout, reader=source.reader)

    def _finish(self, job: _Job, timeout: float, *, done: bool) -> None:
        source = job.attempt.source
        self._control.finish(job.peer, source.ticket.id, source.attempt, timeout, done=done, reader=source.reader)

    def _tell(self, job: _Job, otherwise: str, message: Callable[[], None]) -> None:
        """Send a best-effort control message; log a failure with the text `otherwise`. Correctness does not depend on
        the message: epochs verify the data, and the peer's timers free the pages."""
        try:
            message()
        except KvferryError as error:
            _log.info("%s: %s", otherwise, error.message, extra={"request_id": job.request_id})

    def _connect(self, peer: Peer, timeout: float) -> None:
        with self._lock:
            if peer.incarnation in self._connected:
                return
            former = self._lives.get(peer.worker_id)
        if former is not None:  # the worker restarted; without `forget`, its old pages would stay mapped
            self._forget(former)
        address = self._control.describe(peer, self._transport.name, self._layout, timeout)
        self._transport.connect(peer, address)
        # The first read may set up connections, which takes tens to hundreds of milliseconds with NIXL. Read epochs
        # now, with the time-out of a control message, since the deadline of a transfer can be shorter.
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

    # ------------------------------------------------------------------ stalled reads

    def _drain_later(self, job: _Job) -> None:
        """Let the draining thread wait until the transport no longer writes to the job's pages; they must not be reused
        until then."""
        with self._lock:
            self._draining.append(job)
            if self._drainer is None:
                self._drainer = start_thread(self._drain, "kv-drain", stop=self._closing.set)

    def _drain(self) -> None:
        while not self._closing.wait(_DRAIN_PAUSE_SECONDS):
            with self._lock:
                waiting = list(self._draining)
                if not waiting:
                    self._drainer = None
                    return
            for job in waiting:
                if job.read is None or job.read.is_quiet():
                    with self._lock:
                        self._draining.remove(job)
                    self._on_transport_quiet(job)

    def _on_transport_quiet(self, job: _Job) -> None:
        for effect in job.attempt.quiet():
            self._perform(job, effect)
