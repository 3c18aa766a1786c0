"""Documents of other workers are decoded, or refused with one error."""

import tracemalloc

import msgspec
import pytest

from kvferry.core.errors import TicketRejected
from kvferry.core.ids import Incarnation, WorkerId
from kvferry.kv.connectors import shm, tcp
from kvferry.kv.connectors.address_proof import checked, proved
from kvferry.kv.interface.connector import Peer, ReadError, TransportSetup
from kvferry.kv.interface.packed import unpacked
from kvferry.kv.interface.ticket import Keyring, Ticket

SECRET = b"a secret of 16 bytes"
NOT_TEXT = b"\x95\xa2\xff\xfe"
DEEP = b"\x91" * 100_000


@pytest.mark.parametrize("data", [b"", NOT_TEXT, DEEP, b"\xc1", b"\x01"])
def test_invalid_documents_raise_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        unpacked(data, Ticket)
    with pytest.raises(msgspec.DecodeError):
        unpacked(data, str)


@pytest.mark.parametrize("body", [NOT_TEXT, DEEP])
def test_a_sealed_body_that_is_no_ticket_is_refused(body: bytes) -> None:
    ring = Keyring([SECRET])
    sealed = b"kvt1" + ring._current + ring._mac(ring._current, body) + body
    with pytest.raises(TicketRejected):
        ring.open(sealed)


@pytest.mark.parametrize("open_transport", [shm.open_transport, tcp.open_transport], ids=["shm", "tcp"])
def test_an_address_that_is_no_address_is_a_failed_read(open_transport) -> None:
    transport = open_transport(Incarnation("i"), TransportSetup(secrets=(SECRET,)))
    peer = Peer(WorkerId("w"), Incarnation("p"), "")
    addresses = [NOT_TEXT, DEEP]
    addresses += [msgspec.msgpack.encode(("p", host, port, 1, 64)) for host, port in [("\x00", 1), ("x" * 300, 1)]]
    addresses += [msgspec.msgpack.encode(("p", "127.0.0.1", 1 << 40, 1, 64))]
    try:
        transport.allocate(1, 64)
        for address in addresses:
            with pytest.raises(ReadError):
                transport.connect(peer, address)
    finally:
        transport.close()


@pytest.mark.parametrize(
    "change", [(2, -1), (3, 1 << 63), (4, 0), (4, 1 << 24), (4, 1 << 40), (4, 1 << 63), (5, 1 << 50)]
)
def test_an_address_with_more_pages_than_a_worker_has_takes_no_memory(change: tuple[int, int]) -> None:
    nixl = pytest.importorskip("kvferry.kv.connectors.nixl")
    owner, reader = (nixl.open_transport(Incarnation(name), TransportSetup()) for name in "or")
    peer = Peer(WorkerId("w"), Incarnation("o"), "")
    try:
        for transport in (owner, reader):
            transport.allocate(1, 64)
        address = list(msgspec.msgpack.decode(checked((), owner.address())))
        address[change[0]] = change[1]
        tracemalloc.start()
        with pytest.raises(ReadError):
            reader.connect(peer, proved((), msgspec.msgpack.encode(address)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        owner.close()
        reader.close()
