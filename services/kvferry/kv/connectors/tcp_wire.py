"""Wire protocol of connector `tcp`: mutual authentication of two workers of one pool, requests and replies.

    owner  -> reader   "kvtcp-1\\n"  owner's nonce 32 B
    reader -> owner    reader's nonce 32 B   MAC(key, "reader" | both nonces) 32 B
    owner  -> reader   MAC(key, "owner" | both nonces) 32 B

    reader -> owner    op u8   count u32   page ids u32 x count           all numbers little endian
    owner  -> reader   status u8   length u64   content                   contiguous pages, or epochs u64 x count

The MAC is keyed BLAKE3; its key is derived from the pool's secret and the owner's incarnation, so a valid MAC proves
knowledge of the secret and is bound to this incarnation. Content is neither encrypted nor authenticated: epochs prove
its version, and the network is trusted not to alter it. If the network is not trusted, use network-level encryption.
"""

import secrets
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from hmac import compare_digest

from blake3 import blake3

from kvferry.core.clock import Clock
from kvferry.core.ids import Incarnation

_MAGIC = b"kvtcp-1\n"
_NONCE = 32
_MAC = 32
_CONTEXT = "kvferry 2026-11 tcp connector"
_REQUEST = struct.Struct("<BI")
_REPLY = struct.Struct("<BQ")
_MAX_BUFFERS = 256
_PIECE_BYTES = 1 << 20


class Op(IntEnum):
    """Kind of request."""

    PAGES = 1
    EPOCHS = 2


class Status(IntEnum):
    """Status of a reply."""

    OK = 0
    REFUSED = 1


class WireError(OSError):
    """The other side violated the protocol, closed the connection, or has no key of this pool."""


def connection_key(secret: bytes, owner: Incarnation) -> bytes:
    """Derive the key with which both sides of a connection to `owner` authenticate."""
    return blake3(secret + b"\x1f" + owner.encode(), derive_key_context=_CONTEXT).digest()


def greet_as_owner(link: socket.socket, keys: Sequence[bytes], clock: Clock, seconds: float) -> None:
    """Run the owner's side of the handshake, within `seconds` in total. Any of `keys` is accepted, so that secrets can
    be rotated.

    Raises:
        WireError, TimeoutError: the reader has none of the keys, or does not answer in time.
    """
    mine = secrets.token_bytes(_NONCE)
    link.sendall(_MAGIC + mine)
    deadline = clock.monotonic() + seconds
    answer = b""
    while len(answer) < _NONCE + _MAC:
        answer += receive(link, 1)  # byte by byte, so that an unauthenticated reader cannot exceed the deadline
        if clock.monotonic() > deadline:
            raise TimeoutError("the handshake took too long")
    theirs, mac = answer[:_NONCE], answer[_NONCE:]
    for key in keys:
        if compare_digest(mac, _mac(key, b"reader", mine, theirs)):
            link.sendall(_mac(key, b"owner", mine, theirs))
            return
    raise WireError("the reader does not have this pool's key")


def greet_as_reader(link: socket.socket, key: bytes) -> None:
    """Run the reader's side of the handshake.

    Raises:
        WireError, TimeoutError: the listener is not the expected owner, or does not answer in time.
    """
    if receive(link, len(_MAGIC)) != _MAGIC:
        raise WireError("the listener does not speak this protocol")
    theirs = receive(link, _NONCE)
    mine = secrets.token_bytes(_NONCE)
    link.sendall(mine + _mac(key, b"reader", theirs, mine))
    if not compare_digest(receive(link, _MAC), _mac(key, b"owner", theirs, mine)):
        raise WireError("the listener does not have this pool's key")


def send_request(link: socket.socket, op: Op, ids: Sequence[int]) -> None:
    """Send a request for pages or epochs."""
    link.sendall(_REQUEST.pack(op, len(ids)) + struct.pack(f"<{len(ids)}I", *ids))


def receive_request(link: socket.socket, most: int, patience: float) -> tuple[Op, tuple[int, ...]] | None:
    """Wait for the next request, without a time limit; return `None` if the reader closed the connection. After the
    first byte, each receive must return within `patience` seconds.

    Raises:
        WireError, TimeoutError: the request is malformed, has more than `most` page ids, or is incomplete.
    """
    link.settimeout(None)
    first = link.recv(1)
    if not first:
        return None
    link.settimeout(patience)
    op, count = _REQUEST.unpack(first + receive(link, _REQUEST.size - 1))
    if op not in Op._value2member_map_ or not 0 < count <= most:
        raise WireError(f"invalid request of kind {op} for {count} pages")
    return Op(op), struct.unpack(f"<{count}I", receive(link, 4 * count))


def send_refusal(link: socket.socket) -> None:
    """Send a reply that rejects a request with page ids out of range."""
    link.sendall(_REPLY.pack(Status.REFUSED, 0))


def send_reply(link: socket.socket, content: Sequence[memoryview]) -> None:
    """Send a reply with the buffers as content, without copying them."""
    left = [memoryview(_REPLY.pack(Status.OK, sum(map(len, content)))), *content]
    while left:
        sent = link.sendmsg(left[:_MAX_BUFFERS])
        left = _advance(left, sent)


def receive_reply(link: socket.socket, into: Sequence[memoryview], clock: Clock, seconds: float) -> None:
    """Receive a reply into the buffers `into`, in order, within `seconds` in total.

    Raises:
        WireError, TimeoutError: the reply is a rejection, has an unexpected length, is incomplete, or takes too long.
    """
    deadline = clock.monotonic() + seconds
    status, length = _REPLY.unpack(receive(link, _REPLY.size))
    if status != Status.OK:
        raise WireError("the owner rejected the request")
    if length != sum(map(len, into)):
        raise WireError(f"the owner's reply has an unexpected length of {length} bytes")
    left = list(into)
    while left:
        piece, size = 0, 0
        while piece < min(len(left), _MAX_BUFFERS) and size < _PIECE_BYTES:
            size += len(left[piece])
            piece += 1
        received = link.recvmsg_into(left[:piece])[0]
        if not received:
            raise WireError("the owner closed the connection")
        left = _advance(left, received)
        if left and clock.monotonic() > deadline:
            raise TimeoutError(f"the reply took longer than {seconds:.0f} s")


def receive(link: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        WireError, TimeoutError: the connection was closed or stalled before `size` bytes arrived.
    """
    found = bytearray()
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            raise WireError("the other side closed the connection")
        found += more
    return bytes(found)


def _advance(left: list[memoryview], done: int) -> list[memoryview]:
    """Return the part of `left` after its first `done` bytes."""
    for i, view in enumerate(left):
        if done < len(view):
            return [view[done:], *left[i + 1 :]]
        done -= len(view)
    return []


def _mac(key: bytes, who: bytes, owners: bytes, readers: bytes) -> bytes:
    return blake3(who + owners + readers, key=key).digest()
