"""Reads of connector `tcp` by the thread that polls them: arrivals, stalls, deadlines, repeated requests."""

import socket
import struct
import threading
from collections import deque

import pytest

from kvferry.core.clock import ManualClock
from kvferry.kv.connectors.tcp_read import TcpRead, split_buffers
from kvferry.kv.connectors.tcp_wire import Op
from kvferry.kv.interface.connector import ReadError

SIZE = 64
HEAD = struct.pack("<BQ55x", 0, 2 * SIZE)
REQUEST = struct.pack("<BIII", 1, 2, 5, 7)


class Connections:
    """Connections to a peer whose side the test plays."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.idle = deque(ours for ours, _ in pairs)
        self.peers = [theirs for _, theirs in pairs]
        self.given_back: list[socket.socket] = []

    def take(self, timeout: float) -> socket.socket:
        if not self.idle:
            raise ConnectionRefusedError("no more connections")
        return self.idle.popleft()

    def give_back(self, link: socket.socket) -> None:
        self.given_back.append(link)


class Scene:
    def __init__(self, connections: int = 1) -> None:
        self.clock = ManualClock()
        self.links = Connections(connections)
        self.landed = bytearray(2 * SIZE)

    def read(self) -> TcpRead:
        pages = memoryview(self.landed)
        into = [pages[SIZE:], pages[:SIZE]]
        return TcpRead(
            self.links,
            Op.PAGES,
            [5, 7],
            into,
            connect_seconds=2.0,
            stall_seconds=2.0,
            total_seconds=10.0,
            clock=self.clock,
        )

    def close(self) -> None:
        for link in (*self.links.idle, *self.links.peers, *self.links.given_back):
            link.close()


def test_a_read_lands_as_it_arrives_and_returns_its_connection() -> None:
    scene = Scene()
    read, peer = scene.read(), scene.links.peers[0]
    assert peer.recv(100) == REQUEST
    assert not read.poll()
    for number, part in enumerate((HEAD[:4], HEAD[4:] + b"a" * 10, b"a" * 54 + b"b" * 63)):
        peer.sendall(part)
        assert not read.poll()
        assert not read.is_quiet()
        assert read.progress() == sum((4, 70, 117)[: number + 1])
    peer.sendall(b"b")
    read.wait(60.0)
    assert read.is_quiet()
    assert read.poll()
    assert scene.landed == b"b" * SIZE + b"a" * SIZE
    assert len(scene.links.given_back) == 1
    read.wait(60.0)
    scene.close()


def test_a_wait_receives_the_whole_reply() -> None:
    scene = Scene()
    read, peer = scene.read(), scene.links.peers[0]
    sender = threading.Thread(target=lambda: [peer.sendall(part) for part in (HEAD, b"a" * SIZE, b"b" * SIZE)])
    sender.start()
    read.wait(60.0)
    sender.join()
    assert scene.landed == b"b" * SIZE + b"a" * SIZE
    assert len(scene.links.given_back) == 1
    assert read.poll()
    scene.close()


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_a_wait_ends_without_the_rest_of_a_reply(seconds: float) -> None:
    scene = Scene()
    read, peer = scene.read(), scene.links.peers[0]
    for _ in range(2):
        read.wait(seconds)
        assert read.progress() == 0
    peer.sendall(HEAD + b"a")
    read.wait(seconds)
    assert read.progress() == len(HEAD) + 1
    assert not read.is_quiet()
    peer.sendall(b"a" * (2 * SIZE - 1))
    assert read.poll()
    scene.close()


def test_a_failure_during_a_wait_is_raised_by_the_next_poll() -> None:
    scene = Scene()
    read, peer = scene.read(), scene.links.peers[0]
    peer.sendall(struct.pack("<BQ55x", 1, 0))
    peer.shutdown(socket.SHUT_WR)
    read.wait(60.0)
    assert read.is_quiet()
    with pytest.raises(ReadError, match="rejected"):
        read.poll()
    scene.close()


def test_a_read_without_data_for_two_seconds_fails_and_is_quiet() -> None:
    scene = Scene()
    read, peer = scene.read(), scene.links.peers[0]
    scene.clock.advance(1.9)
    peer.sendall(HEAD)
    assert not read.poll()
    scene.clock.advance(1.9)
    assert not read.poll()
    scene.clock.advance(0.2)
    with pytest.raises(ReadError, match="no data arrived for 2 s"):
        read.poll()
    assert_ended(scene, read)


def test_a_read_that_trickles_fails_at_its_deadline() -> None:
    scene = Scene()
    read, peer = scene.read(), scene.links.peers[0]
    peer.sendall(HEAD)
    for _ in range(10):
        assert not read.poll()
        scene.clock.advance(1.0)
        peer.sendall(b"a")
    assert not read.poll()
    scene.clock.advance(0.1)
    with pytest.raises(ReadError, match="longer than 10 s"):
        read.poll()
    assert_ended(scene, read)


def assert_ended(scene: Scene, read: TcpRead) -> None:
    """Check that no data can arrive any more, because the connection is closed."""
    assert read.is_quiet()
    peer = scene.links.peers[0]
    assert peer.recv(100) == REQUEST
    assert peer.recv(1) == b""
    scene.close()


def test_a_request_on_a_connection_that_was_closed_while_idle_is_sent_again() -> None:
    scene = Scene(connections=2)
    scene.links.peers[0].close()
    read, peer = scene.read(), scene.links.peers[1]
    assert not read.poll()
    assert peer.recv(100) == REQUEST
    peer.sendall(HEAD + b"c" * 2 * SIZE)
    assert read.poll()
    scene.close()


def test_a_request_is_sent_at_most_twice() -> None:
    scene = Scene(connections=3)
    for peer in scene.links.peers[:2]:
        peer.close()
    with pytest.raises(ReadError):
        scene.read().poll()
    assert len(scene.links.idle) == 1
    scene.close()


def test_an_answer_that_ended_early_is_not_requested_again() -> None:
    scene = Scene(connections=2)
    read, peer = scene.read(), scene.links.peers[0]
    peer.sendall(HEAD + b"a")
    peer.shutdown(socket.SHUT_WR)
    assert not read.poll()
    with pytest.raises(ReadError, match="closed the connection"):
        read.poll()
    assert read.is_quiet()
    assert len(scene.links.idle) == 1
    scene.close()


def test_a_peer_that_cannot_be_reached_is_an_error() -> None:
    with pytest.raises(ReadError, match="no more connections"):
        Scene(connections=0).read()


@pytest.mark.parametrize("size", range(7))
def test_buffers_are_split_anywhere(size: int) -> None:
    first, second = split_buffers([memoryview(b"ab"), memoryview(b"cd"), memoryview(b"ef")], size)
    assert (b"".join(first), b"".join(second)) == (b"abcdef"[:size], b"abcdef"[size:])
    assert all(map(len, (*first, *second)))
