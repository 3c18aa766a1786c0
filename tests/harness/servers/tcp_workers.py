"""Transports of connector `tcp` with a few pages of known content, for tests of their connections."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvferry.core.clock import SystemClock
from kvferry.core.ids import WorkerId, new_incarnation
from kvferry.kv.connectors.tcp import TcpTransport
from kvferry.kv.interface.connector import Peer, TransportSetup

POOL = TransportSetup(secrets=(b"the pool's secret, current one..", b"the pool's secret, former one..."))
BLOCK = 512
_SECONDS = 5.0


@contextmanager
def a_transport(setup: TransportSetup = POOL) -> Iterator[tuple[TcpTransport, Peer]]:
    """Yield a transport with the pages 0 to 3, each of bytes of its number + 1, and the peer that it is to others."""
    incarnation = new_incarnation()
    transport = TcpTransport(incarnation, setup, SystemClock())
    memory = transport.allocate(4, BLOCK)
    for block in range(4):
        memory.pages[block * BLOCK : (block + 1) * BLOCK] = bytes([block + 1]) * BLOCK
        memory.epochs[block] = 10 + block
    try:
        yield transport, Peer(WorkerId("w"), incarnation, "nowhere:0")
    finally:
        transport.close()


def port_of(transport: TcpTransport) -> int:
    """Return the port of a transport's page server."""
    port = msgspec.msgpack.decode(transport.address())[2]
    assert isinstance(port, int)
    return port


def dial(transport: TcpTransport) -> socket.socket:
    """Return a new connection to a transport's page server."""
    link = socket.create_connection(("127.0.0.1", port_of(transport)), _SECONDS)
    link.settimeout(_SECONDS)
    return link


def is_cut(link: socket.socket) -> bool:
    """Return whether the other side has closed a connection, without a further byte."""
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True
