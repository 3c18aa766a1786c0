"""Connector `shm`: transport between processes on one host through sealed anonymous memory files.

The pages are in a `memfd_create` file: it has no name in any file system, so the kernel frees it when the last process
that maps it exits, even by SIGKILL. A peer opens it read-only through /proc/<pid>/fd/<n>, which the kernel allows only
to the same user, and checks it: inode and size must match the address that the peer received, and the file must be
sealed. The seals forbid resizing, so an access to the mapping can never fault.

    [ pages: num_blocks x block_bytes ][ epochs: num_blocks x u64 ]
"""

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvferry.core.ids import BlockId, Incarnation
from kvferry.core.process.memory_file import MemoryPlace
from kvferry.core.process.struct_types import describe
from kvferry.kv.connectors.checks import allocated, check_address
from kvferry.kv.connectors.windows import CompletedRead, Pages, as_pages, copy_pages, copy_raw, epochs_of
from kvferry.kv.interface.connector import PageMemory, Peer, Read, ReadError, TransportSetup
from kvferry.kv.interface.packed import unpacked

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_EPOCH_BYTES = 8


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """Address of a worker's memory file."""

    incarnation: str
    pid: int
    fd: int
    inode: int
    num_blocks: int
    block_bytes: int

    @property
    def size(self) -> int:
        return self.num_blocks * (self.block_bytes + _EPOCH_BYTES)


describe(_Address)


class _Window:
    """Mapping of a memory file: writable for this worker's file, read-only for a peer's file."""

    def __init__(self, fd: int, where: _Address, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, where.size, flags=mmap.MAP_SHARED, prot=access)
        whole = memoryview(self._map)
        split = where.num_blocks * where.block_bytes
        self.memory = whole[:split]
        self.epochs = whole[split:].cast("Q")
        self.pages: Pages = as_pages(self.memory, where.num_blocks, where.block_bytes)


class ShmTransport:
    """Transport through sealed memory files; each worker's pages are in one file."""

    name = "shm"

    @property
    def domain(self) -> str:
        """Boot id, PID namespace and user; within these, /proc/<pid>/fd/<n> refers to the same file."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
        except OSError:  # unknown domain: workers are paired anyway, and `connect` fails if the file cannot be opened
            return ""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._fd = -1
        self._where: _Address | None = None
        self._own: _Window | None = None
        self._peers: dict[str, _Window] = {}

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        self._fd = os.memfd_create(f"kvferry-{self._incarnation}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_blocks * (block_bytes + _EPOCH_BYTES))
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        inode = os.fstat(self._fd).st_ino
        self._where = _Address(self._incarnation, os.getpid(), self._fd, inode, num_blocks, block_bytes)
        self._own = _Window(self._fd, self._where, writable=True)
        place = MemoryPlace(os.getpid(), self._fd, inode, self._where.size)
        return PageMemory(self._own.memory, self._own.epochs, place)

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._where)

    def attend(self, busy: bool) -> None:
        """Do nothing, since peers copy pages without using CPU time of this process."""

    def connect(self, peer: Peer, address: bytes) -> None:
        if peer.incarnation in self._peers:
            return
        try:
            where = unpacked(address, _Address)
        except msgspec.DecodeError as error:
            raise ReadError("the peer's address is malformed") from error
        check_address(peer, where.incarnation, where.num_blocks, where.block_bytes)
        self._peers[peer.incarnation] = _open_peer(where)

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        own = allocated(self._own)
        copy_pages(self._find(peer).pages, remote, own.pages, local)
        return CompletedRead()

    def staging(self, num_bytes: int) -> memoryview:
        return memoryview(mmap.mmap(-1, num_bytes))

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        copy_raw(self._find(peer).pages, remote, into)
        return CompletedRead()

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        return epochs_of(self._find(peer).epochs, remote)

    def forget(self, peer: Peer) -> None:
        # The memory is unmapped when the last read drops its reference to the window.
        self._peers.pop(peer.incarnation, None)

    def close(self) -> None:
        self._peers.clear()
        self._own = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _find(self, peer: Peer) -> _Window:
        window = self._peers.get(peer.incarnation)
        if window is None:
            raise ReadError(f"worker {peer.worker_id} is not connected")
        return window


def _open_peer(where: _Address) -> _Window:
    path = f"/proc/{where.pid}/fd/{where.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a named pipe must not block
    except OSError as error:
        raise ReadError(
            f"cannot open the peer's memory at {path}; connector 'shm' needs one host and one user"
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_ino != where.inode or status.st_size != where.size:
            raise ReadError(f"{path} is not the memory in the peer's address; the peer may have restarted")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ReadError(f"{path} is not sealed against resizing")
        return _Window(fd, where, writable=False)
    except OSError as error:
        raise ReadError(f"cannot map the peer's memory at {path}") from error
    finally:
        os.close(fd)


def open_transport(incarnation: Incarnation, _setup: TransportSetup) -> ShmTransport:
    """Create the transport of one incarnation."""
    return ShmTransport(incarnation)
