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
from contextlib import suppress
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


def block_in_kernel(link: socket.socket, patience: float) -> None:
    """Make calls of a connection block in the kernel, each for at most `patience` seconds without data.

    With a time-out of Python's, each call asks the kernel whether it would block, and a large send is resumed whenever
    a part fits into the buffer; that costs more than the transfer of a small page over loopback.
    """
    link.settimeout(None)
    limit = struct.pack("@ll", int(patience), int(patience % 1 * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_request(link: socket.socket, op: Op, ids: Sequence[int]) -> None:
    """Send a request for pages or epochs."""
    link.sendall(_REQUEST.pack(op, len(ids)) + struct.pack(f"<{len(ids)}I", *ids))


def receive_request(link: socket.socket, most: int) -> tuple[Op, tuple[int, ...]] | None:
    """Wait for the next request, without a time limit; return `None` if the reader closed the connection. After the
    first byte, the connection's time-out applies.

    Raises:
        WireError, BlockingIOError: the request is malformed, has more than `most` page ids, or is incomplete.
    """
    head = None
    while head is None:
        with suppress(BlockingIOError):  # the time-out of an idle connection
            head = link.recv(_REQUEST.size)
    if not head:
        return None
    op, count = _REQUEST.unpack(head + receive(link, _REQUEST.size - len(head)))
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


class Reply:
    """A reply that is being received into buffers, in order."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._head = bytearray(_REPLY.size)
        self._head_left = memoryview(self._head)
        self._left = list(into)
        self.num_received = 0
        """Bytes received so far."""

    def receive_some(self, link: socket.socket) -> bool:
        """Receive once, at most 1 MiB if no buffer is longer; return whether the reply is complete.

        Raises:
            BlockingIOError: nothing has arrived on a connection that does not block.
            WireError, TimeoutError: the reply is a rejection or has an unexpected length, the connection was closed
                or timed out.
        """
        if self._head_left:
            received = link.recv_into(self._head_left)
            self._head_left = self._head_left[received:]
            if received and not self._head_left:
                self._check_head()
        else:
            piece, size = 0, 0
            while piece < min(len(self._left), _MAX_BUFFERS) and size < _PIECE_BYTES:
                size += len(self._left[piece])
                piece += 1
            received = link.recvmsg_into(self._left[:piece])[0]
            self._left = _advance(self._left, received)
        if not received:
            raise WireError("the peer closed the connection before the whole reply arrived")
        self.num_received += received
        return not self._left and not self._head_left

    def _check_head(self) -> None:
        status, length = _REPLY.unpack(self._head)
        if status != Status.OK:
            raise WireError("the owner rejected the request")
        if length != sum(map(len, self._left)):
            raise WireError(f"the owner's reply has an unexpected length of {length} bytes")


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
