"""Connector `tcp`: transport over plain TCP, for clusters without RDMA and NIXL; needs no extra package.

The reader requests pages over one connection per read, or two for a large one, and receives them directly into its own
pages; adjacent pages are one buffer on both sides. Both sides authenticate as members of the pool (`tcp_wire`), and
encrypt if both are configured to (`tcp_seal`). Only the thread that polls a read writes to the target pages
(`tcp_read`), so a read that has ended is quiet.
"""

import mmap
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockId, Incarnation
from kvferry.core.process.struct_types import describe
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.checks import allocated, check_address, check_page_ids
from kvferry.kv.connectors.page_files import OwnMemory
from kvferry.kv.connectors.tcp_framing import PLAIN, ByteLink, Framing
from kvferry.kv.connectors.tcp_read import ParallelRead, TcpRead, split_buffers
from kvferry.kv.connectors.tcp_seal import EncryptedFraming, is_spent
from kvferry.kv.connectors.tcp_server import PageServer, runs
from kvferry.kv.connectors.windows import CompletedRead
from kvferry.kv.interface.connector import PageMemory, Peer, Read, ReadError, TransportSetup
from kvferry.kv.interface.packed import unpacked

_STALL_SECONDS = 2.0
_CONNECT_SECONDS = 2.0
_LEAST_BYTES_PER_SECOND = 1e6
"""Minimum average rate of a read in bytes per second; a slower read is abandoned even if it never stalls."""
_PART_BYTES = 8 << 20
"""Minimum size in bytes of a part of a read that is split over two connections."""
_MAX_THREADS = 16
_MAX_IDLE_LINKS = 2
"""Number of idle connections per peer that are kept."""


_OTHER_MODE = {
    False: "worker {} does not encrypt KV, and this worker requires it; set kv_encryption alike for all workers",
    True: "worker {} requires encrypted KV, and this worker does not encrypt; set kv_encryption alike for all workers",
}
"""Errors of a reader, by whether the owner encrypts, if this worker does not do the same."""


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """Address of a worker's page server."""

    incarnation: str
    host: str
    port: int
    num_blocks: int
    block_bytes: int
    is_sealed: bool = False
    """Whether its connections are encrypted."""


describe(_Address)


class _Owner:
    """A connected peer that owns pages: its address and its idle connections."""

    def __init__(self, where: _Address, key: bytes, framing: Framing) -> None:
        self.where = where
        self._key = key
        self._framing = framing
        self._idle: list[ByteLink] = []
        self._lock = threading.Lock()  # guards _idle and _forgotten
        self._forgotten = False

    def take(self, timeout: float) -> ByteLink:
        """Take a connection for one exchange. The caller must return it with `give_back` or close it.

        Raises:
            OSError: no connection is idle and a new connection cannot be opened.
        """
        with self._lock:
            if self._idle:
                return self._idle.pop()
        link = socket.create_connection((self.where.host, self.where.port), timeout)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened = wire.greet_as_reader(link, self._key, self._framing)
            link.settimeout(None)
        except BaseException:
            link.close()
            raise
        return opened

    def give_back(self, link: ByteLink) -> None:
        """Return a connection after a complete exchange."""
        with self._lock:
            keep = not self._forgotten and len(self._idle) < _MAX_IDLE_LINKS and not is_spent(link)
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()

    def forget(self) -> None:
        """Close idle connections; connections in use are closed when they are returned."""
        with self._lock:
            self._forgotten = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


class TcpTransport:
    """Transport over TCP; pages are in this process's memory and are sent to authenticated members of the pool."""

    name = "tcp"

    def __init__(self, incarnation: Incarnation, setup: TransportSetup, clock: Clock) -> None:
        """
        Raises:
            UsageError: `setup` has no secret with which to authenticate readers, or the package for encryption is not
                installed.
        """
        if not setup.secrets:
            raise UsageError("connector 'tcp' needs the pool's ticket key to authenticate readers", field="ticket_key")
        self._incarnation = incarnation
        self._setup = setup
        self._clock = clock
        self._framing: Framing = EncryptedFraming() if setup.encrypts else PLAIN
        self.domain = "encrypted" if setup.encrypts else ""
        """Gateways pair only workers that agree about encryption; the others would refuse each other."""
        self._memory: PageMemory | None = None
        self._pages: OwnMemory | None = None
        self._where: _Address | None = None
        self._server: PageServer | None = None
        self._owners: dict[str, _Owner] = {}
        self._connecting = threading.Lock()  # guards additions to _owners
        self._readers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="kv-tcp-read")

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        self._pages = OwnMemory(num_blocks * block_bytes, self._setup)
        pages = self._pages.memory
        memory = PageMemory(pages, memoryview(bytearray(num_blocks * 8)).cast("Q"), self._pages.place)
        keys = [wire.connection_key(secret, self._incarnation, self._framing) for secret in self._setup.secrets]
        self._server = PageServer(
            self._setup.listen_host, pages, memory.epochs, block_bytes, keys, self._clock, self._framing
        )
        host, is_sealed = self._setup.advertise_host or self._setup.listen_host, self._setup.encrypts
        self._where = _Address(self._incarnation, host, self._server.port, num_blocks, block_bytes, is_sealed)
        self._memory = memory
        return memory

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._where)

    def attend(self, busy: bool) -> None:
        """Do nothing: the page server's threads are always listening for requests."""

    def connect(self, peer: Peer, address: bytes) -> None:
        if peer.incarnation in self._owners:
            return
        try:
            where = unpacked(address, _Address)
        except msgspec.DecodeError as error:
            raise ReadError("the peer's address is malformed") from error
        allocated(self._where)
        check_address(peer, where.incarnation, where.num_blocks, where.block_bytes)
        if where.is_sealed != self._setup.encrypts:
            raise ReadError(_OTHER_MODE[where.is_sealed].format(peer.worker_id))
        key = wire.connection_key(self._setup.secrets[0], Incarnation(where.incarnation), self._framing)
        owner = _Owner(where, key, self._framing)
        try:
            owner.give_back(owner.take(_CONNECT_SECONDS))
        except (OSError, ValueError, OverflowError) as error:  # ValueError, OverflowError: an invalid host name or port
            raise ReadError(f"worker {peer.worker_id} cannot be reached over tcp ({error})") from error
        with self._connecting:
            kept = self._owners.setdefault(peer.incarnation, owner)
        if kept is not owner:  # another thread connected first
            owner.forget()

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        owner = self._find(peer)
        own, memory = allocated(self._where), allocated(self._memory)
        if len(remote) != len(local):
            raise ReadError(f"cannot read {len(remote)} pages into {len(local)}")
        size = own.block_bytes
        if owner.where.block_bytes != size:
            raise ReadError(f"the peer's pages have {owner.where.block_bytes} bytes, this worker's {size}")
        check_page_ids(local, own.num_blocks, "this worker")
        pages = memory.pages
        return self._start(owner, remote, [pages[a * size : b * size] for a, b in runs(local)])

    def staging(self, num_bytes: int) -> memoryview:
        return memoryview(mmap.mmap(-1, num_bytes))

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        owner = self._find(peer)
        size = owner.where.block_bytes
        if len(into) != len(remote) * size:
            raise ReadError(f"cannot read {len(remote)} pages of {size} B into {len(into)} B")
        return self._start(owner, remote, [into])

    def _start(self, owner: _Owner, remote: Sequence[int], into: Sequence[memoryview]) -> Read:
        """Start a read of the pages `remote` into the buffers `into`."""
        check_page_ids(remote, owner.where.num_blocks, "the peer")
        if not remote:
            return CompletedRead()
        num_bytes = len(remote) * owner.where.block_bytes
        if num_bytes < 2 * _PART_BYTES or len(remote) < 2:
            return self._part(owner, remote, into)
        # The copies from two connections run in parallel, on two threads.
        middle = len(remote) // 2
        first, second = split_buffers(into, middle * owner.where.block_bytes)
        parts = [self._part(owner, remote[:middle], first), self._part(owner, remote[middle:], second)]
        return ParallelRead(parts, self._readers)

    def _part(self, owner: _Owner, remote: Sequence[int], into: Sequence[memoryview]) -> TcpRead:
        return TcpRead(
            owner,
            wire.Op.PAGES,
            remote,
            into,
            connect_seconds=_CONNECT_SECONDS,
            stall_seconds=_STALL_SECONDS,
            total_seconds=_STALL_SECONDS + len(remote) * owner.where.block_bytes / _LEAST_BYTES_PER_SECOND,
            clock=self._clock,
        )

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        owner = self._find(peer)
        check_page_ids(remote, owner.where.num_blocks, "the peer")
        if not remote:
            return []
        landing = memoryview(bytearray(wire.padded(8 * len(remote))))
        patience = min(timeout, _CONNECT_SECONDS)
        try:
            read = TcpRead(
                owner,
                wire.Op.EPOCHS,
                remote,
                [landing],
                connect_seconds=patience,
                stall_seconds=timeout,
                total_seconds=timeout,
                clock=self._clock,
            )
            while not read.poll():
                read.wait(patience)
        except ReadError as error:
            raise ReadError(f"the epochs of worker {peer.worker_id} did not arrive ({error})") from error
        return wire.epochs_of(landing, len(remote))

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


def open_transport(incarnation: Incarnation, setup: TransportSetup) -> TcpTransport:
    """Create the transport of one incarnation.

    Raises:
        UsageError: `setup` has no secret, or the package for encryption is not installed.
    """
    return TcpTransport(incarnation, setup, SystemClock())
