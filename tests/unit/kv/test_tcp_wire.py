"""Frames of connector `tcp` however the network divides them, and requests that do not fit into a socket's buffer."""

import socket
import struct
import threading
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.clock import SystemClock
from kvferry.kv.connectors import tcp_wire as wire

MOST = 5
Cuts = st.lists(st.integers(1, 9), max_size=40)


class Arrivals:
    """A connection on which bytes have arrived in parts of given sizes; one call receives from one part."""

    def __init__(self, data: bytes, cuts: Sequence[int]) -> None:
        self.parts: list[bytes] = []
        for size in cuts:
            self.parts.append(data[:size])
            data = data[size:]
        self.parts = [part for part in (*self.parts, data) if part]

    def recv(self, size: int) -> bytes:
        if not self.parts:
            return b""
        part = self.parts.pop(0)
        if part[size:]:
            self.parts.insert(0, part[size:])
        return part[:size]

    def recvmsg_into(self, buffers: Sequence[memoryview], ancillary: int, flags: int) -> tuple[int]:
        found = self.recv(sum(map(len, buffers)))
        left = found
        for buffer in buffers:
            now = left[: len(buffer)]
            buffer[: len(now)] = now
            left = left[len(now) :]
        return (len(found),)

    def as_socket(self) -> socket.socket:
        return cast(socket.socket, self)


def receive_all(reply: wire.IncomingReply, link: socket.socket) -> None:
    while not reply.receive_some(link):
        pass


Asked = st.lists(st.tuples(st.sampled_from(wire.Op), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MOST)))


def frame(op: int, ids: Sequence[int]) -> bytes:
    return struct.pack(f"<BI{len(ids)}I", op, len(ids), *ids)


@given(Asked, Cuts)
def test_requests_are_received_alike_however_they_are_divided(
    sent: list[tuple[wire.Op, list[int]]], cuts: list[int]
) -> None:
    requests = wire.Requests(Arrivals(b"".join(frame(*each) for each in sent), cuts).as_socket(), MOST)
    assert [requests.receive() for _ in sent] == [(op, tuple(ids)) for op, ids in sent]
    assert requests.receive() is None


@given(Asked, st.integers(1, 5 + 4 * MOST - 1), Cuts)
def test_a_request_that_ends_early_is_an_error(
    sent: list[tuple[wire.Op, list[int]]], size: int, cuts: list[int]
) -> None:
    data = b"".join(frame(*each) for each in sent) + frame(1, range(MOST))[:size]
    requests = wire.Requests(Arrivals(data, cuts).as_socket(), MOST)
    for _ in sent:
        assert requests.receive() is not None
    with pytest.raises(wire.WireError, match="closed the connection"):
        requests.receive()


@given(st.sampled_from([(0, 1), (3, 1), (1, 0), (1, MOST + 1), (1, 2**32 - 1)]), Cuts)
def test_an_invalid_request_after_a_valid_one_is_an_error(head: tuple[int, int], cuts: list[int]) -> None:
    data = frame(1, [7]) + struct.pack("<BI", *head) + bytes(4 * MOST)
    requests = wire.Requests(Arrivals(data, cuts).as_socket(), MOST)
    assert requests.receive() == (wire.Op.PAGES, (7,))
    with pytest.raises(wire.WireError, match=f"request of kind {head[0]} for {head[1]} pages; expected"):
        requests.receive()


@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=6), Cuts)
def test_a_reply_is_received_alike_however_it_is_divided(content: list[bytes], cuts: list[int]) -> None:
    size = sum(map(len, content))
    link = Arrivals(struct.pack("<BQ55x", 0, size) + b"".join(content) + b"next", cuts)
    landed = [bytearray(len(part)) for part in content]
    reply = wire.IncomingReply([memoryview(part) for part in landed])
    receive_all(reply, link.as_socket())
    assert reply.num_received == 64 + size
    assert landed == content
    assert b"".join(link.parts) == b"next"


@given(st.sampled_from([(1, 0), (0, 3), (0, 5), (7, 4)]), Cuts)
def test_a_reply_with_a_wrong_head_is_an_error_and_stays_within_its_buffers(
    head: tuple[int, int], cuts: list[int]
) -> None:
    around = memoryview(bytearray(b"." * 12))
    reply = wire.IncomingReply([around[2:4], around[7:9]])
    link = Arrivals(struct.pack("<BQ55x", *head) + b"xxxxxxxxx", cuts).as_socket()
    with pytest.raises(wire.WireError, match=r"rejected|reply has .* bytes, not"):
        receive_all(reply, link)
    assert bytes(around[:2]) + bytes(around[4:7]) + bytes(around[9:]) == b"........"


def test_a_receive_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PIECE_BYTES", 32)
    link = Arrivals(struct.pack("<BQ55x", 0, 40) + bytes(range(40)), ()).as_socket()
    landed = bytearray(40)
    reply = wire.IncomingReply([memoryview(landed)[:20], memoryview(landed)[20:]])
    received = [reply.num_received for _ in range(3) if not reply.receive_some(link)]
    assert received == [32, 64, 96]
    assert reply.receive_some(link)
    assert landed == bytes(range(40))


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_messages_of_the_owner_keep_pages_aligned(count: int) -> None:
    ours, theirs = socket.socketpair()
    key, epochs = b"k" * 32, [2**64 - 1 - number for number in range(count)]
    with ours, theirs:
        reader = threading.Thread(target=wire.greet_as_reader, args=(theirs, key))
        reader.start()
        wire.greet_as_owner(ours, [key], SystemClock(), 60.0)
        reader.join()
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        wire.send_refusal(ours)
        assert len(theirs.recv(4096)) == 64
        wire.send_epochs(ours, epochs)
        reply = theirs.recv(4096)
    assert len(reply) == 64 + wire.padded(8 * count)
    assert len(reply) % 64 == 0
    assert list(struct.unpack_from(f"<{count}Q", reply, 64)) == epochs


def test_a_request_larger_than_the_sockets_buffer_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    ids = range(300_000)
    got = bytearray()

    def receive() -> None:
        while len(got) < 5 + 4 * len(ids):
            got.extend(theirs.recv(1 << 20))

    with ours, theirs:
        thread = threading.Thread(target=receive)
        thread.start()
        wire.send_request(ours, wire.Op.PAGES, ids, 60.0)
        thread.join()
        assert ours.gettimeout() is None
    assert got == frame(1, ids)


def test_a_request_to_a_peer_that_does_not_receive_ends_in_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        wire.send_request(ours, wire.Op.PAGES, range(300_000), 0.01)
