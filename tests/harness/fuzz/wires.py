"""Targets: tickets, replies of a Redis server, addresses and frames of connectors."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from random import Random

import msgspec

from harness.fuzz.mutation import bytes_at_random, packed_at_random
from harness.fuzz.target import Run, Target
from kvferry.core.clock import ManualClock, SystemClock
from kvferry.core.errors import TicketRejected
from kvferry.core.ids import BlockHash, Incarnation, WorkerId
from kvferry.kv.connectors import nixl, shm, tcp, tcp_framing, tcp_seal, tcp_wire
from kvferry.kv.interface.connector import Peer, ReadError, Transport, TransportSetup
from kvferry.kv.interface.ticket import Keyring, Ticket, check_ticket, digest_tokens
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.tiers.interface.frame import FrameDamaged, Frames
from kvferry.kv.tiers.interface.tier import ObjectKey
from kvferry.kv.tiers.redis.object_reader import KeyMissing, ObjectRead
from kvferry.kv.tiers.redis.redis_client import ConnectionLost, ServerError, Wire
from kvferry.model import tiny

SECRET = b"a secret of the fuzzers"
TOKENS = tuple(range(40))
LAYOUT = KvLayout.of(tiny.config(), block_tokens=16, dtype="float32")
OTHER = KvLayout.of(tiny.config(), block_tokens=8, dtype="float32")
OWNER = Incarnation("owner")
PEER = Peer(WorkerId("w"), OWNER, "127.0.0.1:1")
_READ_SECONDS = 2.0

# ---------------------------------------------------------------------- tickets: the body, sealed with the pool's key


def _ticket_seeds() -> list[bytes]:
    tickets = [
        Ticket(
            ticket_id="t",
            worker_id="w",
            incarnation="i",
            control_address="127.0.0.1:1",
            connector="tcp",
            fingerprint=layout.fingerprint,
            scope="",
            tokens_digest=digest_tokens(TOKENS[:32]),
            num_tokens=32,
            block_ids=tuple(range(32 // layout.block_tokens)),
            epochs=tuple(range(32 // layout.block_tokens)),
            expires_wall=2e9,
            layout=layout.description,
            digests=(bytes(16),) * (32 // layout.block_tokens),
        )
        for layout in (LAYOUT, OTHER)
    ]
    return [b"\x00" + msgspec.msgpack.encode(ticket) for ticket in tickets]


def _prefixed(mutate: Callable[[bytes, Random], bytes], data: bytes, random: Random) -> bytes:
    """Keep the first byte, which selects the use of the rest, most of the time."""
    kind = data[:1] if random.random() < 0.9 else bytes([random.randrange(8)])
    return kind + mutate(data[1:], random)


@contextmanager
def _ticket() -> Iterator[Run]:
    ring = Keyring([SECRET])

    def run(data: bytes) -> None:
        kind, body = data[:1], data[1:]
        sealed = body if kind == b"\x01" else b"kvt1" + ring._current + ring._mac(ring._current, body) + body
        try:
            ticket = ring.open(sealed)
            check_ticket(
                ticket,
                fingerprint=LAYOUT.fingerprint,
                block_tokens=LAYOUT.block_tokens,
                scope="",
                tokens=TOKENS,
                now_wall=1e9,
                layout=LAYOUT,
            )
        except TicketRejected:
            pass

    yield run


# ---------------------------------------------------------------------- replies of a Redis server

KEY = ObjectKey(BlockHash(bytes(range(32))), "tenant")
FRAMES = Frames(SECRET, 1000)
_RESP_WORDS = [
    b"\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*2\r\n",
    b":1\r\n",
    b"+OK\r\n",
    b"-ERR x\r\n",
    b"$9999999999\r\n",
    b"-MOVED 1 h:1",
]


def _resp_seeds() -> list[bytes]:
    header, stored = FRAMES.frame(KEY, [memoryview(bytes(1000))])
    value = header + b"".join(stored)
    return [
        b"\x00" + b"$%d\r\n%b\r\n" % (len(value), value),
        b"\x00$-1\r\n",
        b"\x01*3\r\n:1\r\n$2\r\nab\r\n*2\r\n+OK\r\n$-1\r\n",
        b"\x01-MOVED 1 127.0.0.1:1\r\n",
    ]


@contextmanager
def _resp() -> Iterator[Run]:
    def run(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[1:])
            theirs.shutdown(socket.SHUT_WR)
            clock = SystemClock()
            wire = Wire(ours, clock)
            deadline = clock.monotonic() + _READ_SECONDS
            try:
                if data[:1] == b"\x00":
                    into = [memoryview(bytearray(400)), memoryview(bytearray(600))]
                    ObjectRead(wire, into, 1000, lambda header: FRAMES.open(header, KEY)).advance(deadline)
                else:
                    for _ in range(10):
                        wire.reply(deadline)
            except (ConnectionLost, ServerError, FrameDamaged, KeyMissing):
                pass

    yield run


# ---------------------------------------------------------------------- connectors

_TRANSPORTS = (shm.open_transport, tcp.open_transport, nixl.open_transport)
_PAGES, _PAGE_BYTES = 4, 64


@cache
def _owner(number: int) -> Transport:
    """Return a worker's transport, in this process, whose pages can be read."""
    transport = _TRANSPORTS[number](OWNER, TransportSetup(secrets=(SECRET,)))
    transport.allocate(_PAGES, _PAGE_BYTES)
    return transport


def _address_seeds() -> list[bytes]:
    return [bytes([number]) + _owner(number).address() for number in range(len(_TRANSPORTS))]


@contextmanager
def _addresses() -> Iterator[Run]:
    """Yield a run in which a worker of each transport gets the address of a peer and reads its pages."""
    setup = TransportSetup(secrets=(SECRET,))
    transports = [open_transport(Incarnation("reader"), setup) for open_transport in _TRANSPORTS]
    for transport in transports:
        transport.allocate(_PAGES, _PAGE_BYTES)
    lookup = socket.getaddrinfo
    socket.getaddrinfo = partial(lookup, flags=socket.AI_NUMERICHOST)  # host names in the input are not resolved

    def run(data: bytes) -> None:
        transport = transports[data[0] % len(transports)] if data else transports[0]
        try:
            transport.connect(PEER, data[1:])
            transport.read_epochs(PEER, [0, _PAGES - 1], 0.5)
            read = transport.read(PEER, [0], [0])  # type: ignore[list-item]
            while not read.poll():  # ends at the stall timeout at the latest
                read.wait(0.5)
        except ReadError:
            pass
        finally:
            transport.forget(PEER)

    try:
        yield run
    finally:
        socket.getaddrinfo = lookup
        for transport in transports:
            transport.close()


def _frame_seeds() -> list[bytes]:
    request = tcp_wire._REQUEST.pack(tcp_wire.Op.PAGES, 2) + bytes(8)
    reply = tcp_wire._REPLY.pack(tcp_wire.Status.OK, 64) + bytes(64)
    greeting, sealed = tcp_framing.PLAIN.magic + bytes(120), tcp_framing.SEALED_MAGIC + bytes(184)
    record = (9).to_bytes(4, "little") + bytes(44 + 9 + 16)
    parts = (bytes(64), request + request, greeting, reply, bytes(96), sealed, record)
    return [bytes([number]) + part for number, part in enumerate(parts)]


@contextmanager
def _frames() -> Iterator[Run]:
    key = tcp_wire.connection_key(SECRET, OWNER)
    clock, encrypted = ManualClock(), tcp_seal.EncryptedFraming()

    def run(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(_READ_SECONDS)
            theirs.sendall(data[1:])
            theirs.shutdown(socket.SHUT_WR)
            try:
                match data[0] % 7 if data else 0:
                    case 0:
                        tcp_wire.greet_as_owner(ours, [key], clock, _READ_SECONDS)
                    case 1:
                        requests = tcp_wire.Requests(ours, 1000)
                        while requests.receive():
                            pass
                    case 2:
                        tcp_wire.greet_as_reader(ours, key)
                    case 4:
                        tcp_wire.greet_as_owner(ours, [key], clock, _READ_SECONDS, encrypted)
                    case 5:
                        tcp_wire.greet_as_reader(ours, key, encrypted)
                    case 6:
                        link = tcp_seal.SealedLink(ours, bytes(32), bytes(32))
                        while link.recv(1000):
                            pass
                    case _:
                        reply = tcp_wire.IncomingReply([memoryview(bytearray(64))])
                        while not reply.receive_some(ours):
                            pass
            except (tcp_wire.WireError, tcp_framing.SealError, TimeoutError):
                pass

    yield run


TARGETS = (
    Target("ticket", _ticket_seeds, _ticket, partial(_prefixed, packed_at_random)),
    Target("resp", _resp_seeds, _resp, partial(_prefixed, partial(bytes_at_random, words=_RESP_WORDS))),
    Target("addresses", _address_seeds, _addresses, partial(_prefixed, packed_at_random)),
    Target("frames", _frame_seeds, _frames, partial(_prefixed, bytes_at_random)),
)
