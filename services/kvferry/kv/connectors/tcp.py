"""Hand-off over plain TCP: for clusters without RDMA and without NIXL, with nothing to install.

The reader asks for pages over a few connections to their owner and receives straight into its own pages; neighbouring
pages are one piece on both sides. Both prove that they belong to the pool (`tcp_wire`). Only our own threads ever write
our pages, so a read that is given up is quiet as soon as its thread has noticed; a peer that sends nothing for a while
is cut off, which is what makes it notice.
"""

import mmap
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import msgspec

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockId, Incarnation
from kvferry.kv.connector import PageMemory, Peer, Read, ReadError, TransportSetup
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.tcp_server import PageServer, runs

_STALL_SECONDS = 2.0
_CONNECT_SECONDS = 2.0
_LEAST_BYTES_PER_SECOND = 1e6
"""What is slower than this altogether is given up, though it never stalls."""
_LINKS_PER_PEER = 2
_SPLIT_BYTES = 8 << 20
"""A read of less is not worth a second connection."""
_MAX_THREADS = 16


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker serves its pages."""

    incarnation: str
    host: str
    port: int
    num_blocks: int
    block_bytes: int


class _Owner:
    """One connected peer: its address and the connections that nobody uses just now."""

    def __init__(self, where: _Address, key: bytes) -> None:
        self.where = where
        self._key = key
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()  # guards _idle and _forgotten
        self._forgotten = False

    def take(self, timeout: float) -> socket.socket:
        """A connection for one exchange; the caller gives it back or closes it.

        Raises:
            OSError: there is none and none can be made.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
        link = socket.create_connection((self.where.host, self.where.port), timeout)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.greet_as_reader(link, self._key)
        except BaseException:
            link.close()
            raise
        return link

    def give_back(self, link: socket.socket) -> None:
        """The exchange is over, and the connection is at the beginning of another."""
        with self._lock:
            keep = not self._forgotten and len(self._idle) < _LINKS_PER_PEER
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()

    def forget(self) -> None:
        """Close what is idle; what is in use closes when it comes back."""
        with self._lock:
            self._forgotten = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


class _TcpRead:
    """One read in flight, over one or more connections."""

    def __init__(self, parts: Sequence["Future[None]"]) -> None:
        self._parts = parts

    def poll(self) -> bool:
        for part in self._parts:
            if part.done() and (error := part.exception()) is not None:
                raise ReadError(f"the read broke off ({error})") from error
        return self.is_quiet()

    def is_quiet(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, seconds: float) -> None:
        wait(self._parts, seconds)


class TcpTransport:
    """Pages in this process's own memory, served to whoever belongs to the pool."""

    name = "tcp"
    domain = ""

    def __init__(self, incarnation: Incarnation, setup: TransportSetup, clock: Clock) -> None:
        """
        Raises:
            UsageError: there is no secret; without one anybody could read the pages.
        """
        if not setup.secrets:
            raise UsageError("connector 'tcp' needs the pool's ticket key: it proves who may read", field="ticket_key")
        self._incarnation = incarnation
        self._setup = setup
        self._clock = clock
        self._memory: PageMemory | None = None
        self._where: _Address | None = None
        self._server: PageServer | None = None
        self._owners: dict[str, _Owner] = {}
        self._connecting = threading.Lock()  # guards additions to _owners
        self._readers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="kv-tcp-read")

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        pages = memoryview(mmap.mmap(-1, num_blocks * block_bytes))
        memory = PageMemory(pages, memoryview(bytearray(num_blocks * 8)).cast("Q"))
        keys = [wire.connection_key(secret, self._incarnation) for secret in self._setup.secrets]
        self._server = PageServer(self._setup.listen_host, pages, memory.epochs, block_bytes, keys, self._clock)
        host = self._setup.advertise_host or self._setup.listen_host
        self._where = _Address(self._incarnation, host, self._server.port, num_blocks, block_bytes)
        self._memory = memory
        return memory

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._where)

    def attend(self, busy: bool) -> None:
        """The server's threads wait for whoever comes."""

    def connect(self, peer: Peer, address: bytes) -> None:
        if peer.incarnation in self._owners:
            return
        try:
            where = msgspec.msgpack.decode(address, type=_Address)
        except msgspec.DecodeError as error:
            raise ReadError("the peer's address is malformed") from error
        own = self._where
        if own is None or where.incarnation != peer.incarnation or min(where.num_blocks, where.block_bytes) < 1:
            raise ReadError("the peer's address contradicts what is known of the peer")
        owner = _Owner(where, wire.connection_key(self._setup.secrets[0], Incarnation(where.incarnation)))
        try:
            owner.give_back(owner.take(_CONNECT_SECONDS))
        except OSError as error:
            raise ReadError(f"worker {peer.worker_id} cannot be reached over tcp ({error})") from error
        with self._connecting:
            kept = self._owners.setdefault(peer.incarnation, owner)
        if kept is not owner:  # another thread was quicker
            owner.forget()

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        owner = self._find(peer)
        if self._memory is None or self._where is None or len(remote) != len(local):
            raise ReadError(f"{len(remote)} pages into {len(local)}")
        size = self._where.block_bytes
        if owner.where.block_bytes != size:
            raise ReadError(f"the peer's pages have {owner.where.block_bytes} bytes, ours {size}")
        if local and (min(local) < 0 or max(local) >= self._where.num_blocks):
            raise ReadError(f"a page id is outside our {self._where.num_blocks} pages")
        pages = self._memory.pages
        return self._start(owner, remote, lambda i, j: [pages[a * size : b * size] for a, b in runs(local[i:j])])

    def staging(self, num_bytes: int) -> memoryview:
        return memoryview(mmap.mmap(-1, num_bytes))

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        owner = self._find(peer)
        size = owner.where.block_bytes
        if len(into) != len(remote) * size:
            raise ReadError(f"{len(remote)} pages of {size} B into {len(into)} B")
        return self._start(owner, remote, lambda i, j: [into[i * size : j * size]])

    def _start(self, owner: _Owner, remote: Sequence[int], places: Callable[[int, int], list[memoryview]]) -> _TcpRead:
        """Ask for pages; `places(i, j)` says where those that were asked for i-th to before j-th go."""
        if remote and (min(remote) < 0 or max(remote) >= owner.where.num_blocks):
            raise ReadError(f"a page id is outside the peer's {owner.where.num_blocks} pages")
        num_parts = max(1, min(_LINKS_PER_PEER, len(remote) * owner.where.block_bytes // _SPLIT_BYTES))
        step = -(-len(remote) // num_parts)
        parts = [
            self._readers.submit(
                _fetch,
                owner,
                wire.Op.PAGES,
                list(remote[i : i + step]),
                places(i, min(i + step, len(remote))),
                _STALL_SECONDS,
                self._clock,
            )
            for i in range(0, len(remote), step or 1)
        ]
        return _TcpRead(parts)

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        owner = self._find(peer)
        if remote and (min(remote) < 0 or max(remote) >= owner.where.num_blocks):
            raise ReadError(f"a page id is outside the peer's {owner.where.num_blocks} pages")
        landing = memoryview(bytearray(8 * len(remote)))
        try:
            _fetch(owner, wire.Op.EPOCHS, remote, [landing], timeout, self._clock)
        except OSError as error:
            raise ReadError(f"the epochs of worker {peer.worker_id} did not come ({error})") from error
        return [int.from_bytes(landing[i : i + 8], "little") for i in range(0, len(landing), 8)]

    def forget(self, peer: Peer) -> None:
        owner = self._owners.pop(peer.incarnation, None)
        if owner is not None:
            owner.forget()

    def close(self) -> None:
        for owner in self._owners.values():
            owner.forget()
        self._owners.clear()
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._server is not None:
            self._server.close()

    def _find(self, peer: Peer) -> _Owner:
        owner = self._owners.get(peer.incarnation)
        if owner is None:
            raise ReadError(f"worker {peer.worker_id} is not connected")
        return owner


def _fetch(
    owner: _Owner, op: wire.Op, ids: Sequence[int], into: Sequence[memoryview], patience: float, clock: Clock
) -> None:
    """One exchange. A connection that was idle may have been cut long ago: then once more over a new one.

    Raises:
        OSError: it failed; nothing writes `into` any more.
    """
    if not ids:
        return
    for attempt in (1, 2):
        link = owner.take(min(patience, _CONNECT_SECONDS))
        try:
            link.settimeout(patience)
            wire.send_request(link, op, ids)
            wire.receive_reply(link, into, clock, patience + sum(map(len, into)) / _LEAST_BYTES_PER_SECOND)
        except TimeoutError:
            link.close()
            raise
        except OSError:
            link.close()
            if attempt == 2:
                raise
        except BaseException:
            link.close()
            raise
        else:
            owner.give_back(link)
            return


def open_transport(incarnation: Incarnation, setup: TransportSetup) -> TcpTransport:
    """A transport for one worker's life.

    Raises:
        UsageError: the pool has no secret.
    """
    return TcpTransport(incarnation, setup, SystemClock())
