"""Connector `memory`: transport within one process; the reference implementation of `Transport`."""

import secrets
import threading
from collections.abc import Sequence

import msgspec

from kvferry.core.epochs import EpochTable
from kvferry.core.ids import BlockId, Incarnation
from kvferry.kv.connectors.checks import allocated, check_address
from kvferry.kv.connectors.page_files import OwnMemory
from kvferry.kv.connectors.windows import CompletedRead, Pages, as_pages, copy_pages, copy_raw, epochs_of
from kvferry.kv.interface.connector import PageMemory, Peer, Read, ReadError, TransportSetup
from kvferry.kv.interface.packed import unpacked

_exposed: dict[str, "MemoryTransport"] = {}
_guard = threading.Lock()  # guards _exposed; held only during dictionary accesses


class MemoryTransport:
    """Transport within one process; peers look up each other's pages by incarnation."""

    name = "memory"
    domain = secrets.token_hex(8)
    """Domain of this process, a random id."""

    def __init__(self, incarnation: Incarnation, setup: TransportSetup) -> None:
        self._incarnation = incarnation
        self._setup = setup
        self._memory: OwnMemory | None = None
        self._pages: Pages | None = None
        self._epochs: EpochTable | None = None
        self._connected: set[str] = set()

    def allocate(self, num_blocks: int, block_bytes: int) -> PageMemory:
        self._memory = OwnMemory(num_blocks * block_bytes, self._setup)
        memory = self._memory.memory
        epochs = memoryview(bytearray(num_blocks * 8)).cast("Q")
        self._pages, self._epochs = as_pages(memory, num_blocks, block_bytes), epochs
        with _guard:
            _exposed[self._incarnation] = self
        return PageMemory(memory, epochs, self._memory.place)

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._incarnation)

    def attend(self, busy: bool) -> None:
        """Do nothing, since peers copy pages without using CPU time of this process."""

    def connect(self, peer: Peer, address: bytes) -> None:
        try:
            named = unpacked(address, str)
        except msgspec.DecodeError as error:
            raise ReadError("the peer's address is malformed") from error
        check_address(peer, named)
        self._connected.add(peer.incarnation)
        self._find(peer)

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[BlockId]) -> Read:
        source = self._find(peer)._pages
        if source is None:
            raise ReadError(f"worker {peer.worker_id} has not allocated its pages")
        copy_pages(source, remote, allocated(self._pages), local)
        return CompletedRead()

    def staging(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def read_raw(self, peer: Peer, remote: Sequence[int], into: memoryview) -> Read:
        source = self._find(peer)._pages
        if source is None:
            raise ReadError(f"worker {peer.worker_id} has not allocated its pages")
        copy_raw(source, remote, into)
        return CompletedRead()

    def read_epochs(self, peer: Peer, remote: Sequence[int], timeout: float) -> list[int]:
        epochs = self._find(peer)._epochs
        if epochs is None:
            raise ReadError(f"worker {peer.worker_id} has not allocated its pages")
        return epochs_of(epochs, remote)

    def forget(self, peer: Peer) -> None:
        self._connected.discard(peer.incarnation)

    def close(self) -> None:
        with _guard:
            _exposed.pop(self._incarnation, None)
        self._pages = self._epochs = None

    def _find(self, peer: Peer) -> "MemoryTransport":
        with _guard:
            found = _exposed.get(peer.incarnation)
        if found is None or peer.incarnation not in self._connected:
            raise ReadError(
                f"worker {peer.worker_id} has no pages in this process; connector 'memory' needs one process"
            )
        return found


def open_transport(incarnation: Incarnation, setup: TransportSetup) -> MemoryTransport:
    """Create the transport of one incarnation in this process."""
    return MemoryTransport(incarnation, setup)
