"""The tcp connector under invalid input: unknown clients, malformed frames, and peers that send other data than
announced."""

import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import pytest
from harness.servers.tcp_workers import BLOCK, POOL, a_transport, dial, is_cut

from kvferry.core.clock import ManualClock, SystemClock
from kvferry.core.errors import UsageError
from kvferry.core.ids import BlockId, Incarnation, WorkerId, new_incarnation
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.tcp import TcpTransport
from kvferry.kv.connectors.tcp_server import runs
from kvferry.kv.interface.connector import Peer, ReadError, TransportSetup


def test_a_worker_of_another_pool_cannot_read() -> None:
    others = TransportSetup(secrets=(b"x" * 32,))
    with (
        a_transport() as (owner, peer),
        a_transport(others) as (reader, _),
        pytest.raises(ReadError, match="cannot be reached"),
    ):
        reader.connect(peer, owner.address())


def test_a_reader_with_the_former_secret_is_let_in() -> None:
    with a_transport() as (owner, peer), a_transport(TransportSetup(secrets=(POOL.secrets[1],))) as (reader, _):
        reader.connect(peer, owner.address())
        assert reader.read_epochs(peer, [2], 5.0) == [12]


def test_without_a_secret_there_is_no_transport() -> None:
    with pytest.raises(UsageError, match="ticket key"):
        TcpTransport(new_incarnation(), TransportSetup(), SystemClock())


def test_a_mac_of_another_incarnation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_transport() as (owner, _), dial(owner) as link:
        with pytest.raises((wire.WireError, ConnectionResetError)):
            wire.greet_as_reader(link, wire.connection_key(POOL.secrets[0], Incarnation("0" * 16)))
        with dial(owner) as second:
            wire.greet_as_reader(second, wire.connection_key(POOL.secrets[0], owner._incarnation))


def test_an_impostor_gets_no_secret_and_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, a_transport() as (reader, _):

        def impostor() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(b"kvtcp-2\n" + bytes(56))
                wire.receive(link, 64)
                link.sendall(bytes(64))
                link.recv(1)

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        peer = Peer(WorkerId("w"), new_incarnation(), "nowhere:0")
        address = [peer.incarnation, "127.0.0.1", listener.getsockname()[1], 4, BLOCK]
        with pytest.raises(ReadError, match="pool's key"):
            reader.connect(peer, msgspec.msgpack.encode(address))
        thread.join(5)


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<BI", 9, 1) + bytes(4),
        struct.pack("<BI", 1, 0),
        struct.pack("<BI", 1, 0xFFFFFFFF),
        struct.pack("<BI", 1, 5) + bytes(20),
    ],
    ids=["unknown op", "no pages", "four billion pages", "more pages than there are"],
)
def test_an_invalid_frame_closes_only_its_connection(request_bytes: bytes) -> None:
    with a_transport() as (owner, peer), a_transport() as (reader, _), dial(owner) as link:
        wire.greet_as_reader(link, wire.connection_key(POOL.secrets[0], owner._incarnation))
        link.sendall(request_bytes)
        assert is_cut(link)
        reader.connect(peer, owner.address())
        assert reader.read_epochs(peer, [0], 5.0) == [10]


def test_a_connection_without_a_valid_greeting_is_closed() -> None:
    with a_transport() as (owner, _), dial(owner) as link:
        link.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        wire.receive(link, 64)
        assert is_cut(link)


def test_a_connection_cut_while_idle_is_opened_again() -> None:
    with a_transport() as (owner, peer), a_transport() as (reader, _):
        reader.connect(peer, owner.address())
        reader.read_epochs(peer, [0], 5.0)
        assert owner._server is not None
        with owner._server._lock:
            for link in owner._server._links:
                link.shutdown(socket.SHUT_RDWR)
        assert reader.read_epochs(peer, [1], 5.0) == [11]


def receive_all(link: socket.socket, size: int) -> None:
    reply = wire.IncomingReply([memoryview(bytearray(size))])
    while not reply.receive_some(link):
        pass


def a_reply(status: int, length: int, content: bytes) -> bytes:
    return struct.pack("<BQ55x", status, length) + content


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (a_reply(1, 0, b""), "rejected"),
        (a_reply(0, 1 << 40, b""), "reply has 1099511627776 bytes, not"),
        (a_reply(0, 7, b"1234567"), "reply has 7 bytes, not"),
        (a_reply(0, 8, b"123"), "closed the connection"),
    ],
    ids=["refusal", "a terabyte", "short", "cut"],
)
def test_an_owner_that_answers_wrongly_is_an_error(reply: bytes, says: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.WireError, match=says):
            receive_all(ours, 8)


@pytest.mark.parametrize("part_bytes", [BLOCK, 8 << 20])
def test_a_read_of_scattered_pages_lands_in_place(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kv.connectors.tcp._PART_BYTES", part_bytes)
    with a_transport() as (owner, peer), a_transport() as (reader, _):
        reader.connect(peer, owner.address())
        assert reader._memory is not None
        read = reader.read(peer, [3, 0, 1, 2], [BlockId(b) for b in (0, 1, 2, 3)])
        wait(read.poll)
        assert [reader._memory.pages[b * BLOCK] for b in range(4)] == [4, 1, 2, 3]


def test_pages_of_another_size_are_read_into_staging_only() -> None:
    with a_transport() as (owner, peer):
        other = TcpTransport(new_incarnation(), POOL, SystemClock())
        other.allocate(2, 2 * BLOCK)
        try:
            other.connect(peer, owner.address())
            with pytest.raises(ReadError, match="512 bytes, this worker's 1024"):
                other.read(peer, [0], [BlockId(0)])
            read = other.read_raw(peer, [1, 0], other.staging(2 * BLOCK))
            wait(read.poll)
        finally:
            other.close()


def test_adjacent_pages_are_read_as_one_piece() -> None:
    assert runs([3, 4, 5, 9, 2, 3]) == [(3, 6), (9, 10), (2, 4)]
    assert runs([]) == []


def wait(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(5000):
        if holds():
            return
        pause.wait(0.001)
    raise AssertionError("the condition was not met within 5 s")


def test_a_connection_that_sends_slowly_is_closed_at_a_deadline() -> None:
    ours, theirs = socket.socketpair()

    class Trickle(ManualClock):
        """A clock that advances by a second at each reading, in which the peer sends one more byte."""

        def monotonic(self) -> float:
            self.advance(1.0)
            theirs.sendall(b"1")
            return self.now

    with ours, theirs, pytest.raises(TimeoutError, match="handshake"):
        wire.greet_as_owner(ours, [b"k" * 32], Trickle(), 2.0)


def test_a_server_continues_after_a_failing_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Listener:
        """A listener whose first two accepts fail because no file descriptor is free."""

        def __init__(self, inner: socket.socket) -> None:
            self.inner, self.failures = inner, 2
            made.append(self)

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return self.inner.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    create = socket.create_server
    monkeypatch.setattr(
        "kvferry.kv.connectors.tcp_server.socket.create_server", lambda *a, **k: Listener(create(*a, **k))
    )
    with a_transport() as (owner, peer):
        monkeypatch.undo()
        with a_transport() as (reader, _):
            reader.connect(peer, owner.address())
            assert reader.read_epochs(peer, [1], 5.0) == [11]
    assert made
