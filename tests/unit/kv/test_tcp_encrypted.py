"""Encrypted reads of connector `tcp` through a relay that records and edits every byte between the two workers."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
from harness.servers.tcp_relay import Edit, TcpRelay, as_they_are, cut, flip, tcp_relay
from harness.servers.tcp_workers import BLOCK, POOL, a_transport, dial, is_cut, port_of

from kvferry.core.clock import SystemClock
from kvferry.core.ids import BlockId, Incarnation, WorkerId, new_incarnation
from kvferry.kv.connectors import tcp_seal
from kvferry.kv.connectors import tcp_wire as wire
from kvferry.kv.connectors.tcp import TcpTransport
from kvferry.kv.interface.connector import Peer, ReadError, TransportSetup

ENCRYPTED = replace(POOL, encrypts=True)
HELLO, PROOF = 128, 64
"""Bytes of the owner's two messages of a handshake."""
ANSWER = 96
"""Bytes of the reader's message of a handshake."""
HEAD = HELLO + PROOF
"""Offset of the owner's first record, the head of a reply; it has 64 bytes of content."""
PAGES = HEAD + 128
"""Offset of the owner's second record, with the pages."""


@contextmanager
def a_pair(
    setup: TransportSetup = ENCRYPTED, *, to_client: Edit = as_they_are, to_server: Edit = as_they_are
) -> Iterator[tuple[TcpTransport, Peer, bytes, TcpRelay]]:
    """Yield a reader, the owner of the pages, the address of the relay between them, and the relay."""
    with (
        a_transport(setup) as (owner, peer),
        a_transport(setup) as (reader, _),
        tcp_relay(("127.0.0.1", port_of(owner)), to_client=to_client, to_server=to_server) as relay,
    ):
        address = msgspec.msgpack.decode(owner.address())
        address[2] = relay.port
        wipe(reader)
        yield reader, peer, msgspec.msgpack.encode(address), relay


def wipe(reader: TcpTransport) -> None:
    assert reader._memory is not None
    reader._memory.pages[:] = b"." * len(reader._memory.pages)


def pages_of(reader: TcpTransport) -> bytes:
    assert reader._memory is not None
    return bytes(reader._memory.pages)


def read(reader: TcpTransport, peer: Peer, remote: list[int]) -> None:
    """Read pages into the pages 0, 1, ... and wait.

    Raises:
        ReadError: the read failed.
    """
    running = reader.read(peer, remote, [BlockId(i) for i in range(len(remote))])
    try:
        while not running.poll():
            running.wait(10.0)
    finally:
        assert running.is_quiet(), "a read that has ended has no connection that could write"


def connect_and_read(reader: TcpTransport, peer: Peer, address: bytes) -> None:
    reader.connect(peer, address)
    read(reader, peer, [3])


@pytest.mark.parametrize("setup", [POOL, ENCRYPTED], ids=["plain", "encrypted"])
def test_pages_are_on_the_wire_exactly_if_they_are_not_encrypted(setup: TransportSetup) -> None:
    with a_pair(setup) as (reader, peer, address, relay):
        reader.connect(peer, address)
        assert reader.read_epochs(peer, [1, 3], 10.0) == [11, 13]
        read(reader, peer, [2, 0])
        assert pages_of(reader) == b"\x03" * BLOCK + b"\x01" * BLOCK + b"." * 2 * BLOCK
        visible = [pattern in relay.seen for pattern in (b"\x03" * 16, b"\x01" * 16, b"\x01\x02\x00\x00\x00\x02\x00")]
        assert visible == [not setup.encrypts] * 3, "pages, and the request for two pages from page 2 on"
        epochs = b"".join(epoch.to_bytes(8, "little") for epoch in (11, 13))
        assert (epochs in relay.seen) is not setup.encrypts


def test_a_changed_bit_goes_unnoticed_without_encryption() -> None:
    at = 64 + 64 + 64 + 5  # behind the handshake and the head of the reply
    with a_pair(POOL, to_client=flip(at)) as (reader, peer, address, _):
        reader.connect(peer, address)
        read(reader, peer, [0])
        assert pages_of(reader)[5] == 0


OWNERS = {
    "version": (0, "does not speak this protocol"),
    "nonce": (8, "pool's key|closed the connection|reset"),
    "public key": (8 + 32, "pool's key|closed the connection|reset"),
    "proof": (HELLO, "pool's key"),
    "length of the head": (HEAD, "altered"),
    "high bits of that length": (HEAD + 3, "a record has [0-9]+ bytes"),
    "padding of the head": (HEAD + 20, "altered"),
    "content of the head": (HEAD + 48, "altered"),
    "tag of the head": (HEAD + 112, "altered"),
    "length of the pages": (PAGES + 1, "a record has 0 bytes"),
    "padding of the pages": (PAGES + 47, "altered"),
    "first byte of the pages": (PAGES + 48, "altered"),
    "last byte of the pages": (PAGES + 48 + BLOCK - 1, "altered"),
    "tag of the pages": (PAGES + 48 + BLOCK + 15, "altered"),
}


@pytest.mark.parametrize("part", OWNERS)
def test_a_changed_bit_of_the_owner_is_a_failed_read(part: str) -> None:
    at, says = OWNERS[part]
    bit = 1 if part == "length of the pages" else 0  # a shorter record, for which no more bytes are awaited
    with a_pair(to_client=flip(at, bit)) as (reader, peer, address, relay):
        with pytest.raises(ReadError, match=says):
            connect_and_read(reader, peer, address)
        assert len(relay.to_client) == 1, "the read was not repeated, which would conceal the cause"
        assert set(pages_of(reader)) <= {0, ord(".")}, "no byte of a page was delivered"


READERS = {
    "nonce": 0, "public key": 32, "proof": 64, "length": ANSWER, "padding": ANSWER + 9, "request": ANSWER + 48,
    "tag": ANSWER + 48 + 9 + 15,
}  # fmt: skip


@pytest.mark.parametrize("part", READERS)
def test_a_changed_bit_of_the_reader_is_refused_by_the_owner(part: str) -> None:
    with a_pair(to_server=flip(READERS[part])) as (reader, peer, address, _):
        with pytest.raises(ReadError, match=r"closed the connection|reset|pool's key"):
            connect_and_read(reader, peer, address)
        assert set(pages_of(reader)) == {ord(".")}


@pytest.mark.parametrize("at", [HEAD, HEAD + 30, PAGES, PAGES + 100, PAGES + 48 + BLOCK])
def test_a_reply_that_is_cut_off_is_a_failed_read(at: int) -> None:
    with a_pair(to_client=cut(at)) as (reader, peer, address, _):
        with pytest.raises(ReadError, match=r"closed the connection|reset"):
            connect_and_read(reader, peer, address)
        assert set(pages_of(reader)) == {ord(".")}


def test_a_failed_read_leaves_the_next_one_alone() -> None:
    with a_pair(to_client=flip(PAGES + 48)) as (reader, peer, address, _):
        reader.connect(peer, address)
        with pytest.raises(ReadError):
            read(reader, peer, [3])
        with a_transport(ENCRYPTED) as (owner, other):
            reader.connect(other, owner.address())
            read(reader, other, [3])
        assert pages_of(reader)[:BLOCK] == b"\x04" * BLOCK


def test_a_recorded_conversation_is_not_answered_again() -> None:
    with a_pair() as (reader, peer, address, relay):
        reader.connect(peer, address)
        read(reader, peer, [1])
        recorded = bytes(relay.to_server[0])
        with socket.create_connection(("127.0.0.1", relay.port), 10) as link:
            link.settimeout(10)
            wire.receive(link, HELLO)
            link.sendall(recorded)
            assert is_cut(link)


def test_a_recorded_owner_is_not_believed() -> None:
    with a_pair() as (reader, peer, address, relay):
        reader.connect(peer, address)
        read(reader, peer, [1])
        recorded = bytes(relay.to_client[0])
    with socket.create_server(("127.0.0.1", 0)) as listener, a_transport(ENCRYPTED) as (reader, _):

        def replay() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(recorded)
                wire.receive(link, ANSWER)

        thread = threading.Thread(target=replay, daemon=True)
        thread.start()
        again = msgspec.msgpack.decode(address)
        again[2] = listener.getsockname()[1]
        with pytest.raises(ReadError, match="pool's key"):
            reader.connect(peer, msgspec.msgpack.encode(again))
        thread.join(10)


@pytest.mark.parametrize(
    ("owners", "readers", "says"),
    [
        (POOL, ENCRYPTED, "worker w does not encrypt KV, and this worker requires it"),
        (ENCRYPTED, POOL, "worker w requires encrypted KV, and this worker does not encrypt"),
    ],
    ids=["plain owner", "encrypting owner"],
)
def test_workers_of_different_modes_refuse_each_other(
    owners: TransportSetup, readers: TransportSetup, says: str
) -> None:
    with a_transport(owners) as (owner, peer), a_transport(readers) as (reader, _):
        with pytest.raises(ReadError, match=says):
            reader.connect(peer, owner.address())
        assert owner.domain != reader.domain, "gateways do not pair them"


@pytest.mark.parametrize(
    ("owners", "readers", "says"),
    [(POOL, ENCRYPTED, "listener does not encrypt"), (ENCRYPTED, POOL, "listener requires encryption")],
    ids=["plain owner", "encrypting owner"],
)
def test_a_changed_mode_in_an_address_changes_no_mode(
    owners: TransportSetup, readers: TransportSetup, says: str
) -> None:
    with a_transport(owners) as (owner, peer), a_transport(readers) as (reader, _):
        address = msgspec.msgpack.decode(owner.address())
        address[-1] = not address[-1]
        with pytest.raises(ReadError, match=says):
            reader.connect(peer, msgspec.msgpack.encode(address))


def test_a_relay_that_translates_the_greeting_gets_no_plain_connection() -> None:
    """A party in the middle shows a plain reader a plain greeting of an encrypting owner, and fills up the answer."""
    with a_transport(ENCRYPTED) as (owner, _), dial(owner) as link:
        hello = wire.receive(link, HELLO)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            key = wire.connection_key(POOL.secrets[0], owner._incarnation)
            failures: list[Exception] = []

            def plain_reader() -> None:
                try:
                    wire.greet_as_reader(theirs, key)
                except OSError as error:
                    failures.append(error)

            thread = threading.Thread(target=plain_reader)
            thread.start()
            ours.sendall(b"kvtcp-2\n" + hello[8:40] + bytes(24))
            answer = wire.receive(ours, 64)
            link.sendall(answer[:32] + hello[40:72] + answer[32:])
            assert is_cut(link)
            ours.close()
            thread.join(10)
            assert failures, "the reader got no proof either"


def test_a_reader_with_the_former_secret_is_let_in_and_no_other() -> None:
    former, foreign = (replace(ENCRYPTED, secrets=(secret,)) for secret in (POOL.secrets[1], b"x" * 32))
    with a_transport(ENCRYPTED) as (owner, peer):
        with a_transport(former) as (reader, _):
            reader.connect(peer, owner.address())
            assert reader.read_epochs(peer, [2], 10.0) == [12]
        with a_transport(foreign) as (reader, _), pytest.raises(ReadError, match="cannot be reached"):
            reader.connect(peer, owner.address())


def test_a_public_key_whose_result_is_known_is_refused() -> None:
    """A member of the pool could otherwise make the keys of a connection independent of the other side's."""
    with a_transport(ENCRYPTED) as (owner, _), dial(owner) as link:
        framing = tcp_seal.EncryptedFraming()
        key = wire.connection_key(POOL.secrets[0], owner._incarnation, framing)
        theirs = wire.receive(link, HELLO)[8:72]
        mine = bytes(64)
        link.sendall(mine + wire._mac(key, b"reader", theirs, mine))
        assert is_cut(link)


def test_each_connection_has_keys_of_its_own() -> None:
    framing, key = (
        tcp_seal.EncryptedFraming(),
        wire.connection_key(b"s" * 32, Incarnation("o"), tcp_seal.EncryptedFraming()),
    )
    seen = set()
    for _ in range(2):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            reader = threading.Thread(
                target=lambda link=theirs: wire.greet_as_reader(link, key, framing).sendall(b"a" * 64)  # type: ignore[misc]
            )
            reader.start()
            opened = wire.greet_as_owner(ours, [key], SystemClock(), 60.0, framing)
            reader.join()
            seen.add(ours.recv(4096, socket.MSG_PEEK)[48:112])
            assert opened.recv(64) == b"a" * 64
    assert len(seen) == 2


def test_a_connection_is_replaced_before_its_key_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_seal, "_MAX_RECORDS", 8)
    with a_pair() as (reader, peer, address, relay):
        reader.connect(peer, address)
        for _ in range(4):
            read(reader, peer, [1])
        assert len(relay.to_client) == 2, "two replies of two records are half of what a key may encrypt"


def test_a_connection_cut_while_idle_is_opened_again() -> None:
    with a_transport(ENCRYPTED) as (owner, peer), a_transport(ENCRYPTED) as (reader, _):
        reader.connect(peer, owner.address())
        assert owner._server is not None
        with owner._server._lock:
            for link in owner._server._links:
                link.shutdown(socket.SHUT_RDWR)
        assert reader.read_epochs(peer, [1], 10.0) == [11]


def test_a_large_read_over_two_connections_lands_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kv.connectors.tcp._PART_BYTES", 1 << 20)
    blocks, size = 32, 96 << 10  # records cross the borders of pages
    owner, reader = (TcpTransport(new_incarnation(), ENCRYPTED, SystemClock()) for _ in range(2))
    try:
        theirs, ours = (transport.allocate(blocks, size) for transport in (owner, reader))
        for block in range(blocks):
            theirs.pages[block * size : (block + 1) * size] = bytes((block + i // 64) % 251 for i in range(size))
        peer = Peer(WorkerId("w"), owner._incarnation, "nowhere:0")
        reader.connect(peer, owner.address())
        remote = [*range(1, blocks, 2), *range(0, blocks, 2)]
        running = reader.read(peer, remote, [BlockId(i) for i in reversed(range(blocks))])
        while not running.poll():
            running.wait(1.0)
        for place, source in zip(reversed(range(blocks)), remote, strict=True):
            assert ours.pages[place * size : (place + 1) * size] == theirs.pages[source * size : (source + 1) * size]
    finally:
        owner.close()
        reader.close()
