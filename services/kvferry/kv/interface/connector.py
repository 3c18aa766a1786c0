"""Connector interface between an engine's pages and a transport, in the order of calls during a hand-off.

    caller   side               call                       owner of the pages afterwards
    -------  -----------------  -------------------------  ------------------------------------------------
    worker   both, at start     Transport.allocate         the transport owns the memory until `close`
    engine   both               BlockPool over `epochs`    the engine owns every page
    engine   prefill            Export                     the offer, until finished, released or expired
    worker   decode             Transport.connect          once per peer and incarnation; no page involved
    engine   decode             KvLoader.start             the engine; the transport may *write* to them
    fetcher  decode             PeerControl.claim          the prefill side keeps its pages under a lease
    fetcher  decode             Transport.read             unchanged; the pages must not be reused
                                (read_raw, if layouts differ: the transport writes `staging`, the fetcher the pages)
    fetcher  decode             Transport.read_epochs      after the data; equal epochs prove the content
    fetcher  decode             PeerControl.finish         the prefill side's pages are free
    engine   decode             LoadOutcome                no writer; the sequence runs, or computes

The interface consists of two protocols. The *scheduler side* (`KvLoader`) handles requests and pages and is called on
the engine's thread; it never blocks. The *worker side* (`Transport`) handles memory and peers and is called on the
fetcher's threads; it may block, within the given deadlines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvferry.core.epochs import EpochTable
from kvferry.core.ids import BlockId, Incarnation, RequestId, TicketId, WorkerId
from kvferry.core.process.memory_file import MemoryPlace
from kvferry.kv.interface.ticket import Ticket
from kvferry.kv.pages.layout import KvLayout


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Memory that a transport allocated for an engine's pages."""

    pages: memoryview
    """Writable memory of num_blocks x block_bytes bytes."""
    epochs: EpochTable
    """Epoch of each page, an unsigned 64-bit number; readable by peers, written only by the block pool."""
    place: MemoryPlace | None = None
    """Memory file that begins with the pages, for other processes of this worker; `None` if the memory is private."""


@dataclass(frozen=True, slots=True)
class TransportSetup:
    """Configuration of a transport."""

    listen_host: str = "127.0.0.1"
    advertise_host: str = ""
    """Host name under which peers reach the worker; if empty, `listen_host`."""
    secrets: tuple[bytes, ...] = ()
    """Shared secrets of the pool, newest first; a peer authenticates with any of them."""
    encrypts: bool = False
    """Whether KV is encrypted on its way to another host; a peer of the other mode is refused. No effect on transports
    whose bytes never leave the host."""
    has_ranks: bool = False
    """Whether other processes of this worker compute with the pages, which must then be in a memory file."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation of a remote worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    control_address: str


class ReadError(Exception):
    """A read cannot complete, because the peer is unreachable or rejects it. The cause is chained."""


class Read(Protocol):
    """One read in flight. Its owner polls it until it has ended, even after the request was cancelled."""

    def poll(self) -> bool:
        """Return whether all data has arrived, without blocking.

        Raises:
            ReadError: the read failed. The transport may still write until `is_quiet`.
        """
        ...

    def is_quiet(self) -> bool:
        """Return, without blocking, whether the transport no longer accesses the target pages, after success or
        failure."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for progress for at most `seconds`; may return early."""
        ...


@runtime_checkable
class MeasuredRead(Read, Protocol):
    """A read that reports its progress, so that a stalled read is abandoned long before its deadline."""

    def progress(self) -> int:
        """Return the progress, without blocking: a number in a transport-specific unit that grows while data
        arrives."""
        ...


class Transport(Protocol):
    """Worker side of a connector: copies pages between the memory of two engines. Called from several threads."""

    @property
    def name(self) -> str:
        """Name of the connector in tickets, flags and metrics."""
        ...

    @property
    def domain(self) -> str:
        """Domain of the worker; only workers in the same domain can read each other's pages. Empty if unrestricted."""
        ...

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        """Allocate memory for the engine's pages; called once, before any other method.

        Args:
            num_blocks: number of pages.
            block_bytes: size of a page in bytes.
        """
        ...

    def address(self) -> bytes:
        """Return the encoded address of this worker's pages. It consists of plain values and is sent to a peer in an
        authenticated call."""
        ...

    def attend(self, busy: bool) -> None:
        """Set whether peers may currently be reading this worker's pages (`busy`). A transport that needs CPU time of
        this process to serve reads polls for progress while `busy`; one-sided transports ignore the call.
        """
        ...

    def connect(self, peer: Peer, address: bytes) -> None:
        """Register the address of a peer's pages. Idempotent for one incarnation.

        Args:
            peer: the worker whose pages will be read.
            address: result of the peer's `address`.

        Raises:
            ReadError: the address is malformed, or the peer cannot be reached over this transport.
        """
        ...

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        """Start copying the peer's pages `remote` into this worker's pages `local`, pairwise.

        Args:
            peer: a connected peer.
            remote: page ids of the peer.
            local: page ids of this worker, as many as `remote`; each must have a writer counted
                (`BlockPool.begin_write`).

        Raises:
            ReadError: the peer is not connected, its page size differs, or a page id is out of range.
        """
        ...

    def staging(self, num_bytes: int) -> memoryview:
        """Allocate memory as a target of `read_raw`. Only `close` frees it, so callers should reuse it."""
        ...

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        """Start copying the peer's pages, of any page size, contiguously into `into`. Do not use `into` until the
        read is quiet.

        Args:
            peer: a connected peer.
            remote: page ids of the peer.
            into: the start of a buffer from `staging`, exactly as long as the pages.

        Raises:
            ReadError: the peer is not connected, a page id is out of range, or `into` has a wrong size.
        """
        ...

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        """Read the current epochs of the peer's pages `remote`; block for at most `timeout` seconds.

        Args:
            peer: a connected peer.
            remote: page ids of the peer.
            timeout: time limit in seconds.

        Raises:
            ReadError: the peer is unreachable, or did not answer in time.
        """
        ...

    def forget(self, peer: Peer) -> None:
        """Drop all state for a peer that no longer exists or has a new incarnation. Idempotent."""
        ...

    def close(self) -> None:
        """Release the memory. The pages must not be used afterwards. Idempotent."""
        ...


class PeerControl(Protocol):
    """Control messages to the worker that issued a ticket. Each call blocks for at most `timeout` seconds. All calls
    raise `KvferryError`: `TicketRejected` if the peer rejects the message, `Unavailable` or `DeadlinePassed` if it does
    not answer. `reader` is the index of the caller among the ticket's readers.
    """

    def describe(self, peer: Peer, connector: str, layout: KvLayout, timeout: float) -> bytes:
        """Return the peer's transport address.

        Args:
            peer: the worker that issued the ticket.
            connector: name of the connector that both sides use.
            layout: the caller's layout; the peer's must be equal or convertible to it.
            timeout: time limit in seconds.
        """
        ...

    def claim(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        """Start a lease; return its duration in seconds.

        Args:
            peer: the worker that issued the ticket.
            ticket_id: id of the ticket.
            attempt: number of the attempt; a later attempt takes the lease over.
            timeout: time limit in seconds.
            reader: index of the caller among the ticket's readers.
        """
        ...

    def renew(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        """Extend the lease; return its duration in seconds. Arguments as in `claim`."""
        ...

    def finish(
        self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, done: bool, reader: int = 0
    ) -> None:
        """Report the end of the attempt; other arguments as in `claim`.

        Args:
            done: whether the caller has every block; otherwise the offer stays open for a later attempt.
        """
        ...


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Source of a load from a peer: an opened ticket, and the number of the attempt to read it."""

    ticket: Ticket
    attempt: int
    reader: int = 0
    """Index of this worker among the ticket's readers."""


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Part of a load that was read from one source; used as an observation for the source's cost estimate."""

    source: str
    num_bytes: int
    seconds: float
    """Seconds from the load's start to the last byte from this source."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Outcome of a load. `failure` is the reason why the tokens must be computed, or `None` if all blocks are
    verified."""

    request_id: RequestId
    job: int
    failure: str | None
    num_blocks: int
    """Number of loaded and verified blocks; after the failure of a tier, number of leading blocks that can be used."""
    num_bytes: int
    seconds: float
    parts: tuple[LoadPart, ...] = ()
    source: str = "peer"
    """Source of the KV: `peer`, or the tier of the first storage object."""


@dataclass(frozen=True, slots=True)
class PagesQuiet:
    """Message: the transport no longer accesses a job's pages. Sent once per job, together with or after its
    outcome."""

    job: int


class KvLoader(Protocol):
    """Scheduler side of a connector, called by the engine. No call blocks."""

    def start(
        self,
        job: int,
        request_id: RequestId,
        source: object,
        first_block: int,
        targets: Sequence[BlockId],
    ) -> None:
        """Start loading blocks of a source into pages.

        The engine counts a writer for the targets until `PagesQuiet`.

        Args:
            job: number of the job, which its messages repeat.
            request_id: request that waits for the blocks.
            source: source of the blocks, a `FetchSource` for a peer.
            first_block: index of the first block to load.
            targets: pages of the blocks `first_block` to `first_block + len(targets) - 1`.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Cancel the loads of a request; their outcomes are still reported. Idempotent."""
        ...

    @property
    def num_active(self) -> int:
        """Number of jobs whose `PagesQuiet` has not been sent."""
        ...


LoaderMessage = LoadOutcome | PagesQuiet
"""Messages of a loader about its jobs."""
LoadListener = Callable[[LoaderMessage], None]
"""Listener for messages of a loader. Called on a loader's thread; must only enqueue the message."""
