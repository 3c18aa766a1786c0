"""Conformance suite for transports. The peer is a separate process, except for `memory`.

Each check takes a `ConnectorRig`: the tested transport with its memory, and a peer whose pages it can read. CHECKS
require a peer with the same page size; RAW_CHECKS require a peer with one of PAGE_SIZES and more pages than
FEWER_BLOCKS, the reader's number of pages.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kvferry.core.ids import BlockId, Incarnation, WorkerId, new_incarnation
from kvferry.kv.interface.connector import PageMemory, Peer, Read, ReadError, Transport, TransportSetup
from kvferry.kv.registry import open_transport

NUM_BLOCKS = 32
BLOCK_BYTES = 4096
PAGE_SIZES = (BLOCK_BYTES, 1536, 6144)
FEWER_BLOCKS = 12
SETUP = TransportSetup(secrets=(b"of the pool" * 4,))
ENCRYPTED = replace(SETUP, encrypts=True)
"""Setup for transports that encrypt, with the extra `encryption`."""
_DEADLINE_SECONDS = 20.0
_FROZEN_SECONDS = 4.0
"""Seconds for which the peer is suspended; longer than the stall timeout of any transport."""


@dataclass(slots=True)
class ConnectorRig:
    """A transport under test, its memory, and a peer to read from."""

    transport: Transport
    memory: PageMemory
    peer: Peer
    address: bytes
    command: Callable[..., object]
    """Function that executes `fill block byte`, `bump block`, `die`, `freeze` or `thaw` on the peer."""
    can_freeze: bool = True
    """Whether the peer is a separate process, which can be suspended."""
    peer_bytes: int = BLOCK_BYTES
    """Page size of the peer in bytes."""

    def read(self, remote: list[int], local: list[int]) -> None:
        """Read the peer's pages `remote` into the local pages `local`, and wait.

        Raises:
            ReadError: the transport failed.
        """
        _complete(self.transport.read(self.peer, remote, [BlockId(b) for b in local]))

    def read_raw(self, remote: list[int], staging: memoryview) -> None:
        """Read the peer's pages contiguously into the start of `staging`, and wait.

        Raises:
            ReadError: the transport failed.
        """
        _complete(self.transport.read_raw(self.peer, remote, staging[: len(remote) * self.peer_bytes]))

    def page(self, block: int) -> bytes:
        """Return the content of a local page."""
        return bytes(self.memory.pages[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])


def pattern(block: int, size: int = BLOCK_BYTES) -> bytes:
    """Return the initial content of the peer's pages: every byte depends on its page and its offset.

    Args:
        block: page id.
        size: bytes of a page.
    """
    return bytes((block * 7 + i // 64 + i) % 251 for i in range(size))


def _complete(read: Read) -> None:
    pause = threading.Event()
    for _ in range(int(_DEADLINE_SECONDS / 0.001)):
        if read.poll():
            assert read.is_quiet()
            return
        pause.wait(0.001)
    raise AssertionError("the read neither completed nor failed")


class _PeerSide:
    """The peer's transport and memory, and the commands that `ConnectorRig.command` runs on it."""

    def __init__(self, name: str, block_bytes: int, setup: TransportSetup) -> None:
        self.incarnation = new_incarnation()
        self.transport = open_transport(name, self.incarnation, setup)
        self.size = block_bytes
        self.memory = self.transport.allocate(NUM_BLOCKS, block_bytes)
        for block in range(NUM_BLOCKS):
            self.memory.pages[block * block_bytes : (block + 1) * block_bytes] = pattern(block, block_bytes)
            self.memory.epochs[block] = 100 + block

    def fill(self, block: int, byte: int) -> None:
        self.memory.epochs[block] += 1
        self.memory.pages[block * self.size : (block + 1) * self.size] = bytes([byte]) * self.size

    def bump(self, block: int) -> None:
        self.memory.epochs[block] += 1

    def die(self) -> None:
        self.transport.close()


def _peer_process(name: str, block_bytes: int, setup: TransportSetup, pipe: Connection) -> None:
    side = _PeerSide(name, block_bytes, setup)
    pipe.send((side.incarnation, side.transport.address()))
    with suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            getattr(side, method)(*arguments)
            pipe.send(None)


@contextmanager
def rig(
    name: str, peer_bytes: int = BLOCK_BYTES, own_blocks: int = NUM_BLOCKS, setup: TransportSetup = SETUP
) -> Iterator[ConnectorRig]:
    """Yield a rig for the transport `name`; the peer is a separate process, except for `memory`."""
    ours = open_transport(name, new_incarnation(), setup)
    process: BaseProcess | None = None
    pipe: Connection | None = None
    if name == "memory":
        side = _PeerSide(name, peer_bytes, setup)
        incarnation, address = side.incarnation, side.transport.address()

        def command(method: str, *arguments: int) -> object:
            return getattr(side, method)(*arguments)
    else:
        spawn = multiprocessing.get_context("spawn")
        pipe, far_end = spawn.Pipe()
        process = spawn.Process(target=_peer_process, args=(name, peer_bytes, setup, far_end), daemon=True)
        process.start()
        far_end.close()
        assert pipe.poll(_DEADLINE_SECONDS), "the peer did not start"
        incarnation, address = pipe.recv()

        def command(method: str, *arguments: int) -> object:
            assert process is not None
            assert pipe is not None
            assert process.pid is not None
            if method == "die":
                process.kill()
                process.join(_DEADLINE_SECONDS)
                return None
            if method in {"freeze", "thaw"}:
                os.kill(process.pid, signal.SIGSTOP if method == "freeze" else signal.SIGCONT)
                return None
            pipe.send((method, arguments))
            assert pipe.poll(_DEADLINE_SECONDS), "the peer hangs"
            return pipe.recv()

    try:
        memory = ours.allocate(own_blocks, BLOCK_BYTES)
        peer = Peer(WorkerId("peer"), Incarnation(incarnation), "nowhere:0")
        yield ConnectorRig(ours, memory, peer, address, command, process is not None, peer_bytes)
    finally:
        ours.close()
        if process is not None and pipe is not None:
            process.kill()
            process.join(_DEADLINE_SECONDS)
            process.close()
            pipe.close()


def _refused(action: Callable[[], object]) -> None:
    try:
        action()
    except ReadError:
        return
    raise AssertionError("expected a ReadError")


def check_pages_arrive_exactly(rig: ConnectorRig) -> None:
    """Check that scattered, contiguous and reversed pages are read to their targets, and no other page changes."""
    rig.transport.connect(rig.peer, rig.address)
    before = [rig.page(b) for b in range(NUM_BLOCKS)]
    remote, local = [3, 4, 5, 9, 31, 2, 1, 0], [10, 11, 12, 0, 31, 20, 22, 21]
    rig.read(remote, local)
    landed = dict(zip(local, remote, strict=True))
    for block in range(NUM_BLOCKS):
        assert rig.page(block) == (pattern(landed[block]) if block in landed else before[block]), f"page {block}"


def check_epochs_follow_the_peer(rig: ConnectorRig) -> None:
    """Check that epochs are the peer's current ones, in the requested order."""
    rig.transport.connect(rig.peer, rig.address)
    assert rig.transport.read_epochs(rig.peer, [7, 3, 31], 5.0) == [107, 103, 131]
    rig.command("bump", 3)
    assert rig.transport.read_epochs(rig.peer, [7, 3, 31], 5.0) == [107, 104, 131]


def check_a_reused_page_shows_in_its_epoch(rig: ConnectorRig) -> None:
    """Check that reading a page that was reused after its epoch was read returns the new content and a different
    epoch."""
    rig.transport.connect(rig.peer, rig.address)
    promised = rig.transport.read_epochs(rig.peer, [5], 5.0)
    rig.command("fill", 5, 0xEE)
    rig.read([5], [1])
    assert rig.page(1) == b"\xee" * BLOCK_BYTES
    assert rig.transport.read_epochs(rig.peer, [5], 5.0) != promised


def check_ids_out_of_range_are_refused(rig: ConnectorRig) -> None:
    """Check that out-of-range page ids raise an error before any data is transferred."""
    rig.transport.connect(rig.peer, rig.address)
    before = [rig.page(b) for b in range(NUM_BLOCKS)]
    _refused(lambda: rig.read([NUM_BLOCKS], [0]))
    _refused(lambda: rig.read([-1], [0]))
    _refused(lambda: rig.read([0], [NUM_BLOCKS]))
    _refused(lambda: rig.read([0, 1], [0]))
    _refused(lambda: rig.transport.read_epochs(rig.peer, [NUM_BLOCKS], 5.0))
    _refused(lambda: rig.transport.read_epochs(rig.peer, [-1], 5.0))
    assert [rig.page(b) for b in range(NUM_BLOCKS)] == before


def check_strangers_are_refused(rig: ConnectorRig) -> None:
    """Check that a peer that was never connected, a malformed address, and an address of a different incarnation are
    rejected."""
    _refused(lambda: rig.read([0], [0]))
    _refused(lambda: rig.transport.connect(rig.peer, b""))
    _refused(lambda: rig.transport.connect(rig.peer, b"\xc1" + rig.address))
    _refused(lambda: rig.transport.connect(rig.peer, rig.address[:-1]))
    other = Peer(rig.peer.worker_id, new_incarnation(), rig.peer.control_address)
    _refused(lambda: rig.transport.connect(other, rig.address))


def check_connecting_twice_and_forgetting(rig: ConnectorRig) -> None:
    """Check that `connect` and `forget` are idempotent, and that after `forget` reads are rejected until the next
    `connect`."""
    rig.transport.connect(rig.peer, rig.address)
    rig.transport.connect(rig.peer, rig.address)
    rig.read([1], [1])
    rig.transport.forget(rig.peer)
    rig.transport.forget(rig.peer)
    _refused(lambda: rig.read([1], [2]))
    rig.transport.connect(rig.peer, rig.address)
    rig.read([2], [2])
    assert rig.page(2) == pattern(2)


def check_a_dead_peer_gives_right_data_or_an_error(rig: ConnectorRig) -> None:
    """Check that, after the peer has exited, a read returns correct data (shared memory may survive) or raises, but
    never hangs."""
    _survives_death(rig, lambda b: rig.read([b], [b]), rig.page)


def check_a_frozen_peer_gives_right_data_or_silence(rig: ConnectorRig) -> None:
    """Check that a read from a suspended peer is correct or late, never wrong, and that once it is reported quiet, it
    writes nothing when the peer resumes."""
    _survives_frost(rig, lambda b: rig.transport.read(rig.peer, [b], [BlockId(b)]), rig.page)


def _survives_death(rig: ConnectorRig, read: Callable[[int], None], landed: Callable[[int], bytes]) -> None:
    rig.transport.connect(rig.peer, rig.address)
    read(1)
    rig.command("die")
    try:
        read(6)
    except ReadError:
        return
    assert landed(6) == pattern(6, rig.peer_bytes)


def _survives_frost(rig: ConnectorRig, start: Callable[[int], Read], landed: Callable[[int], bytes]) -> None:
    if not rig.can_freeze:
        return
    rig.transport.connect(rig.peer, rig.address)
    _complete(start(1))
    rig.command("freeze")
    read = start(6)
    failed = _settle(read, lambda: False, _FROZEN_SECONDS)
    if not failed and read.is_quiet():
        assert landed(6) == pattern(6, rig.peer_bytes)
    was_quiet, before = read.is_quiet(), landed(6)
    rig.command("thaw")
    _settle(read, read.is_quiet, _DEADLINE_SECONDS)
    assert read.is_quiet(), "a read ends after its peer resumes"
    if was_quiet:
        pause = threading.Event()
        for _ in range(20):  # late writes would have arrived by now
            pause.wait(0.01)
            assert landed(6) == before
    rig.transport.connect(rig.peer, rig.address)
    _complete(start(7))
    assert landed(7) == pattern(7, rig.peer_bytes)


def _settle(read: Read, until: Callable[[], bool], seconds: float) -> bool:
    """Poll until the read has ended, `until` holds, or the time is up; return whether the read failed."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        try:
            if read.poll() or until():
                return False
        except ReadError:
            if until() or read.is_quiet():
                return True
        pause.wait(0.005)
    return False


def check_closing_twice(rig: ConnectorRig) -> None:
    """Check that closing is idempotent."""
    rig.transport.connect(rig.peer, rig.address)
    rig.transport.close()
    rig.transport.close()


def check_raw_pages_arrive_side_by_side(rig: ConnectorRig) -> None:
    """Check that pages are written contiguously in the requested order and nothing else is written, and that staging is
    reusable."""
    rig.transport.connect(rig.peer, rig.address)
    size = rig.peer_bytes
    staging = rig.transport.staging(8 * size + 7)
    ours = bytes(rig.memory.pages)
    for remote in ([3, 4, 5, 9, 31, 2, 1, 0], [30], [7, 7, 6]):
        staging[:] = b"\xaa" * len(staging)
        rig.read_raw(remote, staging)
        assert bytes(staging[: len(remote) * size]) == b"".join(pattern(b, size) for b in remote)
        assert set(staging[len(remote) * size :]) == {0xAA}
    assert bytes(rig.memory.pages) == ours


def check_raw_reads_have_places_of_their_own(rig: ConnectorRig) -> None:
    """Check that two concurrent raw reads into separate staging memory do not interfere."""
    rig.transport.connect(rig.peer, rig.address)
    places = [rig.transport.staging(2 * rig.peer_bytes) for _ in range(2)]
    reads = [rig.transport.read_raw(rig.peer, [4 + i, 8 + i], place) for i, place in enumerate(places)]
    for i, read in enumerate(reads):
        _complete(read)
        assert bytes(places[i]) == pattern(4 + i, rig.peer_bytes) + pattern(8 + i, rig.peer_bytes)


def check_raw_reads_that_do_not_fit_are_refused(rig: ConnectorRig) -> None:
    """Check that wrong lengths, and page-to-page reads between different page sizes, raise an error before any data is
    transferred."""
    size = rig.peer_bytes
    staging = rig.transport.staging(2 * size)
    _refused(lambda: rig.read_raw([0], staging))
    rig.transport.connect(rig.peer, rig.address)
    staging[:] = b"\xaa" * len(staging)
    ours = bytes(rig.memory.pages)
    for remote, length in (([NUM_BLOCKS], size), ([-1], size), ([0], 2 * size), ([0, 1], size), ([0], size - 1)):
        _refused(lambda remote=remote, length=length: rig.transport.read_raw(rig.peer, remote, staging[:length]))  # type: ignore[misc]
    if size != BLOCK_BYTES:
        _refused(lambda: rig.read([0], [0]))
    assert set(staging) == {0xAA}
    assert bytes(rig.memory.pages) == ours


def check_more_epochs_than_pages_of_our_own(rig: ConnectorRig) -> None:
    """Check that epochs can be read from a peer that has more pages than the reader."""
    rig.transport.connect(rig.peer, rig.address)
    remote = [*range(NUM_BLOCKS - 1, -1, -1)]
    assert rig.transport.read_epochs(rig.peer, remote, 5.0) == [100 + block for block in remote]


def check_a_dead_peer_gives_right_raw_data_or_an_error(rig: ConnectorRig) -> None:
    """Check that, after the peer has exited, a raw read returns correct data or raises, but never hangs."""
    staging = rig.transport.staging(rig.peer_bytes)
    _survives_death(rig, lambda b: rig.read_raw([b], staging), lambda _: bytes(staging))


def check_a_frozen_peer_gives_right_raw_data_or_silence(rig: ConnectorRig) -> None:
    """Check that a raw read from a suspended peer is correct or fails, but is never wrong. Each read has its own
    staging, since a late read may still write."""
    size = rig.peer_bytes
    places = {block: rig.transport.staging(size) for block in (1, 6, 7)}
    _survives_frost(rig, lambda b: rig.transport.read_raw(rig.peer, [b], places[b]), lambda b: bytes(places[b]))


CHECKS: tuple[Callable[[ConnectorRig], None], ...] = (
    check_pages_arrive_exactly,
    check_epochs_follow_the_peer,
    check_a_reused_page_shows_in_its_epoch,
    check_ids_out_of_range_are_refused,
    check_strangers_are_refused,
    check_connecting_twice_and_forgetting,
    check_a_dead_peer_gives_right_data_or_an_error,
    check_a_frozen_peer_gives_right_data_or_silence,
    check_closing_twice,
)

RAW_CHECKS: tuple[Callable[[ConnectorRig], None], ...] = (
    check_raw_pages_arrive_side_by_side,
    check_raw_reads_have_places_of_their_own,
    check_raw_reads_that_do_not_fit_are_refused,
    check_more_epochs_than_pages_of_our_own,
    check_a_dead_peer_gives_right_raw_data_or_an_error,
    check_a_frozen_peer_gives_right_raw_data_or_silence,
)
