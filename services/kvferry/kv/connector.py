"""The interface between an engine's pages and a transport, told as the life of one hand-off.

    who      on which side      calls                      then owns the pages
    -------  -----------------  -------------------------  ------------------------------------------------
    worker   both, at start     Transport.allocate         the transport owns the memory until `close`
    engine   both               BlockPool over `epochs`    the engine owns every page
    engine   prefill            Export                     the offer book, until claimed, released, expired
    worker   decode             Transport.connect          once per peer and incarnation; no page involved
    engine   decode             KvLoader.start             engine holds them, the transport may *write* them
    fetcher  decode             PeerControl.claim          the prefill side keeps its pages under a lease
    fetcher  decode             Transport.read             as before; nothing may be reused
                                (read_raw, where layouts differ: the transport writes `staging`, we write the pages)
    fetcher  decode             Transport.read_epochs      after the data; equal epochs prove it
    fetcher  decode             PeerControl.finish         the prefill side's pages are free
    engine   decode             LoadOutcome                writers end; the sequence runs, or computes

Two small protocols on purpose. The *scheduler side* (`KvLoader`) speaks of requests and pages and is called
on the engine's thread; it never blocks. The *worker side* (`Transport`) speaks of memory and peers and is
called on the fetcher's threads; it may block, within the deadlines it is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvferry.core.epochs import EpochTable
from kvferry.core.ids import BlockId, Incarnation, RequestId, TicketId, WorkerId
from kvferry.kv.layout import KvLayout
from kvferry.kv.ticket import Ticket


@dataclass(frozen=True, slots=True)
class PageMemory:
    """The memory that a transport gives an engine for its pages."""

    pages: memoryview
    """num_blocks x block_bytes bytes, writable."""
    epochs: EpochTable
    """One unsigned 64-bit number a page, readable by peers; written by the block pool alone."""


@dataclass(frozen=True, slots=True)
class TransportSetup:
    """What a transport may need to know of its worker."""

    listen_host: str = "127.0.0.1"
    advertise_host: str = ""
    """Under which peers reach the worker; empty: as `listen_host`."""
    secrets: tuple[bytes, ...] = ()
    """The pool's, newest first: whoever has one belongs to it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of one other worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    control_address: str


class ReadError(Exception):
    """A read will not complete: the peer is gone, or refuses. The cause is chained."""


class Read(Protocol):
    """One read in flight. Its owner polls it until it is over, whatever else happens."""

    def poll(self) -> bool:
        """Whether the data is here. Does not block.

        Raises:
            ReadError: it never will be. The transport may still write until `is_quiet`.
        """
        ...

    def is_quiet(self) -> bool:
        """Whether the transport is finished with our pages, for good or ill. Does not block."""
        ...

    def wait(self, seconds: float) -> None:
        """Come back when there is news, at the latest after so long. May come back early."""
        ...


@runtime_checkable
class MeasuredRead(Read, Protocol):
    """A read that can say how far it came; one that comes no further is given up long before its deadline."""

    def progress(self) -> int:
        """A number that grows while data arrives, in a unit of the transport's own. Does not block."""
        ...


class Transport(Protocol):
    """The worker side: moves pages between two engines' memory. Called from several threads."""

    @property
    def name(self) -> str:
        """The connector's name in tickets, flags and metrics."""
        ...

    @property
    def domain(self) -> str:
        """Only workers with equal domains can read each other's pages; empty: no such bound is known."""
        ...

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        """Memory for the engine's pages; called once, before anything else."""
        ...

    def address(self) -> bytes:
        """What a peer needs to reach these pages: plain numbers and strings, to be sent in an authenticated call."""
        ...

    def attend(self, busy: bool) -> None:
        """Whether peers may be reading from us now. A transport that serves reads only with this process's help
        gives it then; for others it means nothing."""
        ...

    def connect(self, peer: Peer, address: bytes) -> None:
        """Learn where a peer's pages are. Idempotent for one incarnation.

        Raises:
            ReadError: the address is malformed, or the peer cannot be reached this way.
        """
        ...

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        """Start copying the peer's pages into ours, pairwise. The pages of `local` must have a writer counted.

        Raises:
            ReadError: the peer is not connected, its pages have another size, or an id is out of its range.
        """
        ...

    def staging(self, num_bytes: int) -> memoryview:
        """Writable memory that `read_raw` can land in, for as long as the transport lives: ask once, use it again."""
        ...

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        """Start copying the peer's pages, of whatever size they are, side by side into `into`: the beginning of what
        `staging` gave, exactly as long as these pages. Nobody may use it until the read is quiet.

        Raises:
            ReadError: the peer is not connected, an id is out of its range, or `into` does not fit.
        """
        ...

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        """The peer's epochs of these pages, read now. Blocks up to `timeout` seconds.

        Raises:
            ReadError: the peer is gone, or did not answer in time.
        """
        ...

    def forget(self, peer: Peer) -> None:
        """The peer is gone, or has a new incarnation. Idempotent."""
        ...

    def close(self) -> None:
        """Give the memory back. Nothing may use the pages any more. Idempotent."""
        ...


class PeerControl(Protocol):
    """Control messages to the worker that made a ticket. Blocking, within `timeout` seconds each.

    All raise `KvferryError`: `TicketRejected` when the peer refuses, `Unavailable` or `DeadlinePassed` when it
    does not answer. `reader` says which of the ticket's readers asks.
    """

    def describe(self, peer: Peer, connector: str, layout: KvLayout, timeout: float) -> bytes:
        """The peer's transport address, if its pages are like ours, which `layout` describes, or can be converted."""
        ...

    def claim(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        """Start a lease; its seconds."""
        ...

    def renew(self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, reader: int = 0) -> float:
        """Extend the lease; its seconds."""
        ...

    def finish(
        self, peer: Peer, ticket_id: TicketId, attempt: int, timeout: float, *, done: bool, reader: int = 0
    ) -> None:
        """End the attempt."""
        ...


@dataclass(frozen=True, slots=True)
class FetchSource:
    """What a load job needs beside its pages: the opened ticket and which delivery of it this is."""

    ticket: Ticket
    attempt: int
    reader: int = 0
    """Which of the ticket's readers this is."""


@dataclass(frozen=True, slots=True)
class LoadPart:
    """What came from one source; for learning its rate."""

    source: str
    num_bytes: int
    seconds: float
    """From the load's start to the last byte from this source."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load ended. `failure` says why tokens must be computed instead; `None`: all of it is here and proven."""

    request_id: RequestId
    job: int
    failure: str | None
    num_blocks: int
    """With a failure of a tier: the leading blocks that are here and proven all the same; they are used."""
    num_bytes: int
    seconds: float
    parts: tuple[LoadPart, ...] = ()
    source: str = "peer"
    """Who was asked: a peer, or the tier that had the first piece."""


@dataclass(frozen=True, slots=True)
class PagesQuiet:
    """The transport is finished with a job's pages. Comes once per job, with or after its outcome."""

    job: int


class KvLoader(Protocol):
    """The scheduler side: what the engine calls. Never blocks."""

    def start(
        self,
        job: int,
        request_id: RequestId,
        source: object,
        first_block: int,
        targets: Sequence[BlockId],
    ) -> None:
        """Begin to fetch blocks first_block .. first_block+len(targets)-1 of the source into `targets`.

        The engine has counted a writer on the targets and keeps it until `PagesQuiet`.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Nobody waits for this request's load any more. Its outcome still comes. Idempotent."""
        ...

    @property
    def num_active(self) -> int:
        """Jobs whose `PagesQuiet` has not been sent."""
        ...


LoadListener = Callable[[object], None]
"""Called on a loader's thread with a `LoadOutcome`, a `PagesQuiet`, or what else a loader has to say (`kv.tiering`);
must only pass the message on."""
