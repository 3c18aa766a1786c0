"""What crosses a `tcp` connection, and how two workers prove to each other that they belong to one pool.

    owner  -> reader   "kvtcp-1\\n"  owner's nonce 32 B
    reader -> owner    reader's nonce 32 B   MAC(key, "reader" | both nonces) 32 B
    owner  -> reader   MAC(key, "owner" | both nonces) 32 B

    reader -> owner    op u8   count u32   page ids u32 x count           all numbers little endian
    owner  -> reader   status u8   length u64   content                   pages side by side, or epochs u64 x count

The key is keyed BLAKE3's, derived from the pool's secret and the owner's incarnation, so a MAC proves the pool and
this very life of the owner. Content is neither encrypted nor sealed: epochs prove that it is the right one, the link
is trusted not to alter it. Where it cannot be, put it through an encrypting network.
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
    """What a reader asks for."""

    PAGES = 1
    EPOCHS = 2


class Status(IntEnum):
    """How the owner answers."""

    OK = 0
    REFUSED = 1


class WireError(OSError):
    """The other side did not speak as it should, left, or is not of this pool."""


def connection_key(secret: bytes, owner: Incarnation) -> bytes:
    """The key that both sides of a connection to `owner` prove to have."""
    return blake3(secret + b"\x1f" + owner.encode(), derive_key_context=_CONTEXT).digest()


def greet_as_owner(link: socket.socket, keys: Sequence[bytes], clock: Clock, seconds: float) -> None:
    """The owner's part of the greeting, within `seconds` altogether; any of its keys will do, so that secrets can be
    rotated.

    Raises:
        WireError, TimeoutError: the reader has none of the keys, or does not answer.
    """
    mine = secrets.token_bytes(_NONCE)
    link.sendall(_MAGIC + mine)
    deadline = clock.monotonic() + seconds
    answer = b""
    while len(answer) < _NONCE + _MAC:
        answer += receive(link, 1)  # byte by byte, each with a look at the clock: it is short, and may be a stranger's
        if clock.monotonic() > deadline:
            raise TimeoutError("the greeting takes too long")
    theirs, mac = answer[:_NONCE], answer[_NONCE:]
    for key in keys:
        if compare_digest(mac, _mac(key, b"reader", mine, theirs)):
            link.sendall(_mac(key, b"owner", mine, theirs))
            return
    raise WireError("the reader does not have this pool's key")


def greet_as_reader(link: socket.socket, key: bytes) -> None:
    """The reader's part of the greeting.

    Raises:
        WireError, TimeoutError: whoever listens there is not the owner it should be, or does not answer.
    """
    if receive(link, len(_MAGIC)) != _MAGIC:
        raise WireError("whoever listens there does not speak this protocol")
    theirs = receive(link, _NONCE)
    mine = secrets.token_bytes(_NONCE)
    link.sendall(mine + _mac(key, b"reader", theirs, mine))
    if not compare_digest(receive(link, _MAC), _mac(key, b"owner", theirs, mine)):
        raise WireError("whoever listens there does not have this pool's key")


def send_request(link: socket.socket, op: Op, ids: Sequence[int]) -> None:
    """Ask for pages or epochs."""
    link.sendall(_REQUEST.pack(op, len(ids)) + struct.pack(f"<{len(ids)}I", *ids))


def receive_request(link: socket.socket, most: int, patience: float) -> tuple[Op, tuple[int, ...]] | None:
    """The next request, waited for without end; `None`: the reader left. Once begun it must come within `patience`.

    Raises:
        WireError, TimeoutError: it makes no sense, asks for more than `most` pages, or stops half-way.
    """
    link.settimeout(None)
    first = link.recv(1)
    if not first:
        return None
    link.settimeout(patience)
    op, count = _REQUEST.unpack(first + receive(link, _REQUEST.size - 1))
    if op not in Op._value2member_map_ or not 0 < count <= most:
        raise WireError(f"a request of kind {op} for {count} pages")
    return Op(op), struct.unpack(f"<{count}I", receive(link, 4 * count))


def send_refusal(link: socket.socket) -> None:
    """Say that a request names pages that are not there."""
    link.sendall(_REPLY.pack(Status.REFUSED, 0))


def send_reply(link: socket.socket, content: Sequence[memoryview]) -> None:
    """Answer with these bytes, straight from where they are."""
    left = [memoryview(_REPLY.pack(Status.OK, sum(map(len, content)))), *content]
    while left:
        sent = link.sendmsg(left[:_MAX_BUFFERS])
        left = _advance(left, sent)


def receive_reply(link: socket.socket, into: Sequence[memoryview], clock: Clock, seconds: float) -> None:
    """Take an answer into these places, one after the other, within `seconds` altogether.

    Raises:
        WireError, TimeoutError: refused, of another length, it stops half-way, or trickles.
    """
    deadline = clock.monotonic() + seconds
    status, length = _REPLY.unpack(receive(link, _REPLY.size))
    if status != Status.OK:
        raise WireError("the owner refused the request")
    if length != sum(map(len, into)):
        raise WireError(f"the owner answers with {length} bytes")
    left = list(into)
    while left:
        piece, size = 0, 0
        while piece < min(len(left), _MAX_BUFFERS) and size < _PIECE_BYTES:
            size += len(left[piece])
            piece += 1
        received = link.recvmsg_into(left[:piece])[0]
        if not received:
            raise WireError("the owner left")
        left = _advance(left, received)
        if left and clock.monotonic() > deadline:
            raise TimeoutError(f"it takes longer than {seconds:.0f} s")


def receive(link: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes.

    Raises:
        WireError, TimeoutError: fewer came.
    """
    found = bytearray()
    while len(found) < size:
        more = link.recv(size - len(found))
        if not more:
            raise WireError("the other side left")
        found += more
    return bytes(found)


def _advance(left: list[memoryview], done: int) -> list[memoryview]:
    """What remains of `left` after its first `done` bytes."""
    for i, view in enumerate(left):
        if done < len(view):
            return [view[done:], *left[i + 1 :]]
        done -= len(view)
    return []


def _mac(key: bytes, who: bytes, owners: bytes, readers: bytes) -> bytes:
    return blake3(who + owners + readers, key=key).digest()
