"""What every transport must do; run it over yours. The peer is a real other process where the transport allows.

Each check takes a `Rig`: our transport with its memory, and a peer whose pages it can read.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kvferry.core.ids import BlockId, Incarnation, WorkerId, new_incarnation
from kvferry.kv.connector import PageMemory, Peer, Read, ReadError, Transport, TransportSetup
from kvferry.kv.registry import open_transport

NUM_BLOCKS = 32
BLOCK_BYTES = 4096
SETUP = TransportSetup(secrets=(b"of the pool" * 4,))
_DEADLINE_SECONDS = 20.0
_FROZEN_SECONDS = 4.0
"""Longer than the stall rule of any transport that has one."""


@dataclass(slots=True)
class Rig:
    """Our side and a peer."""

    transport: Transport
    memory: PageMemory
    peer: Peer
    address: bytes
    command: Callable[..., object]
    """`fill block byte`, `bump block`, `die`, `freeze`, `thaw`: what the peer does, or what is done to it."""
    can_freeze: bool = True
    """Whether the peer is another process."""

    def read(self, remote: list[int], local: list[int]) -> None:
        """Read and wait.

        Raises:
            ReadError: as the transport says.
        """
        read = self.transport.read(self.peer, remote, [BlockId(b) for b in local])
        pause = threading.Event()
        for _ in range(int(_DEADLINE_SECONDS / 0.001)):
            if read.poll():
                assert read.is_quiet()
                return
            pause.wait(0.001)
        raise AssertionError("the read neither completed nor failed")

    def page(self, block: int) -> bytes:
        """One of our pages."""
        return bytes(self.memory.pages[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])


def pattern(block: int) -> bytes:
    """What the peer's pages hold at first: every byte depends on its page and its place."""
    return bytes((block * 7 + i // 64 + i) % 251 for i in range(BLOCK_BYTES))


class _PeerSide:
    """The peer's transport and what the rig tells it to do."""

    def __init__(self, name: str) -> None:
        self.incarnation = new_incarnation()
        self.transport = open_transport(name, self.incarnation, SETUP)
        self.memory = self.transport.allocate(NUM_BLOCKS, BLOCK_BYTES)
        for block in range(NUM_BLOCKS):
            self.memory.pages[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = pattern(block)
            self.memory.epochs[block] = 100 + block

    def fill(self, block: int, byte: int) -> None:
        self.memory.epochs[block] += 1
        self.memory.pages[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([byte]) * BLOCK_BYTES

    def bump(self, block: int) -> None:
        self.memory.epochs[block] += 1

    def die(self) -> None:
        self.transport.close()


def _peer_process(name: str, pipe: Connection) -> None:
    side = _PeerSide(name)
    pipe.send((side.incarnation, side.transport.address()))
    with suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            getattr(side, method)(*arguments)
            pipe.send(None)


@contextmanager
def rig(name: str) -> Iterator[Rig]:
    """A rig over the transport `name`; `memory` has its peer in this process, all others in another."""
    ours = open_transport(name, new_incarnation(), SETUP)
    process: BaseProcess | None = None
    pipe: Connection | None = None
    if name == "memory":
        side = _PeerSide(name)
        incarnation, address = side.incarnation, side.transport.address()

        def command(method: str, *arguments: int) -> object:
            return getattr(side, method)(*arguments)
    else:
        spawn = multiprocessing.get_context("spawn")
        pipe, far_end = spawn.Pipe()
        process = spawn.Process(target=_peer_process, args=(name, far_end), daemon=True)
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
        memory = ours.allocate(NUM_BLOCKS, BLOCK_BYTES)
        peer = Peer(WorkerId("peer"), Incarnation(incarnation), "nowhere:0")
        yield Rig(ours, memory, peer, address, command, can_freeze=process is not None)
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
    raise AssertionError("a ReadError was due")


def check_pages_arrive_exactly(rig: Rig) -> None:
    """Scattered, neighbouring and reversed pages land where they belong, and no other page changes."""
    rig.transport.connect(rig.peer, rig.address)
    before = [rig.page(b) for b in range(NUM_BLOCKS)]
    remote, local = [3, 4, 5, 9, 31, 2, 1, 0], [10, 11, 12, 0, 31, 20, 22, 21]
    rig.read(remote, local)
    landed = dict(zip(local, remote, strict=True))
    for block in range(NUM_BLOCKS):
        assert rig.page(block) == (pattern(landed[block]) if block in landed else before[block]), f"page {block}"


def check_epochs_follow_the_peer(rig: Rig) -> None:
    """Epochs are the peer's of now, in the order asked for."""
    rig.transport.connect(rig.peer, rig.address)
    assert rig.transport.read_epochs(rig.peer, [7, 3, 31], 5.0) == [107, 103, 131]
    rig.command("bump", 3)
    assert rig.transport.read_epochs(rig.peer, [7, 3, 31], 5.0) == [107, 104, 131]


def check_a_reused_page_shows_in_its_epoch(rig: Rig) -> None:
    """Content changed after the promise: the data is new, and the epoch gives it away."""
    rig.transport.connect(rig.peer, rig.address)
    promised = rig.transport.read_epochs(rig.peer, [5], 5.0)
    rig.command("fill", 5, 0xEE)
    rig.read([5], [1])
    assert rig.page(1) == b"\xee" * BLOCK_BYTES
    assert rig.transport.read_epochs(rig.peer, [5], 5.0) != promised


def check_ids_out_of_range_are_refused(rig: Rig) -> None:
    """Before anything moves."""
    rig.transport.connect(rig.peer, rig.address)
    before = [rig.page(b) for b in range(NUM_BLOCKS)]
    _refused(lambda: rig.read([NUM_BLOCKS], [0]))
    _refused(lambda: rig.read([-1], [0]))
    _refused(lambda: rig.read([0], [NUM_BLOCKS]))
    _refused(lambda: rig.read([0, 1], [0]))
    _refused(lambda: rig.transport.read_epochs(rig.peer, [NUM_BLOCKS], 5.0))
    _refused(lambda: rig.transport.read_epochs(rig.peer, [-1], 5.0))
    assert [rig.page(b) for b in range(NUM_BLOCKS)] == before


def check_strangers_are_refused(rig: Rig) -> None:
    """A peer that was never connected, a malformed address, an address of another incarnation."""
    _refused(lambda: rig.read([0], [0]))
    _refused(lambda: rig.transport.connect(rig.peer, b""))
    _refused(lambda: rig.transport.connect(rig.peer, b"\xc1" + rig.address))
    _refused(lambda: rig.transport.connect(rig.peer, rig.address[:-1]))
    other = Peer(rig.peer.worker_id, new_incarnation(), rig.peer.control_address)
    _refused(lambda: rig.transport.connect(other, rig.address))


def check_connecting_twice_and_forgetting(rig: Rig) -> None:
    """Connecting is idempotent, forgetting too; after it, reads are refused until connected anew."""
    rig.transport.connect(rig.peer, rig.address)
    rig.transport.connect(rig.peer, rig.address)
    rig.read([1], [1])
    rig.transport.forget(rig.peer)
    rig.transport.forget(rig.peer)
    _refused(lambda: rig.read([1], [2]))
    rig.transport.connect(rig.peer, rig.address)
    rig.read([2], [2])
    assert rig.page(2) == pattern(2)


def check_a_dead_peer_gives_right_data_or_an_error(rig: Rig) -> None:
    """Never a hang, never other data; memory that outlives its process may still be read."""
    rig.transport.connect(rig.peer, rig.address)
    rig.read([1], [1])
    rig.command("die")
    try:
        rig.read([6], [6])
    except ReadError:
        return
    assert rig.page(6) == pattern(6)


def check_a_frozen_peer_gives_right_data_or_silence(rig: Rig) -> None:
    """A read from a peer that answers nothing is right or late, never wrong; once quiet, it never writes again, though
    the peer wakes up."""
    if not rig.can_freeze:
        return
    rig.transport.connect(rig.peer, rig.address)
    rig.read([1], [1])
    rig.command("freeze")
    read = rig.transport.read(rig.peer, [6], [BlockId(6)])
    failed = _settle(read, lambda: False, _FROZEN_SECONDS)
    if not failed and read.is_quiet():
        assert rig.page(6) == pattern(6)
    was_quiet, before = read.is_quiet(), rig.page(6)
    rig.command("thaw")
    _settle(read, read.is_quiet, _DEADLINE_SECONDS)
    assert read.is_quiet(), "a read ends when its peer lives"
    if was_quiet:
        pause = threading.Event()
        for _ in range(20):  # whatever was on its way has had time to land
            pause.wait(0.01)
            assert rig.page(6) == before
    rig.transport.connect(rig.peer, rig.address)
    rig.read([7], [7])
    assert rig.page(7) == pattern(7)


def _settle(read: Read, until: Callable[[], bool], seconds: float) -> bool:
    """Poll until it is over, `until` holds, or the time is up; whether it failed."""
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


def check_closing_twice(rig: Rig) -> None:
    """Closing is idempotent."""
    rig.transport.connect(rig.peer, rig.address)
    rig.transport.close()
    rig.transport.close()


CHECKS: tuple[Callable[[Rig], None], ...] = (
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
