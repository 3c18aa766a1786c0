"""Wire protocol of connector `tcp`: mutual authentication of two workers of one pool, requests and replies.

    owner  -> reader   "kvtcp-2\\n"  owner's nonce 32 B  padding 24 B
    reader -> owner    reader's nonce 32 B   MAC(key, "reader" | both nonces) 32 B
    owner  -> reader   MAC(key, "owner" | both nonces) 32 B  padding 32 B

With encryption, the first message begins with "kvtcp-2s", a public key of 32 B follows each nonce and counts as a part
of it, and everything after the handshake is in records (`tcp_seal`).

    reader -> owner    op u8   count u32   page ids u32 x count           all numbers little endian
    owner  -> reader   status u8   length u64   padding 55 B   content    contiguous pages, or epochs u64 x count and
                                                                          padding to a multiple of 64 B

Each message of the owner is a multiple of 64 bytes if a page is. The kernel copies the messages of a thread one after
the other into its send buffers, so pages begin at a multiple of 64 bytes there; copies to and from other offsets took
about twice as long on Zen 4.

The MAC is keyed BLAKE3; its key is derived from the pool's secret and the owner's incarnation, so a valid MAC proves
knowledge of the secret and is bound to this incarnation and to the framing (`tcp_framing`). Without encryption, content
is not authenticated either: epochs prove its version, and the network is trusted not to alter it.
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
from kvferry.kv.connectors.tcp_framing import PLAIN, SEALED_MAGIC, ByteLink, Framing

_NONCE = 32
_MAC = 32
_REQUEST = struct.Struct("<BI")
_ALIGNMENT = 64
"""Number of bytes of which each message of the owner is a multiple."""
_REPLY = struct.Struct("<BQ55x")
_MAX_BUFFERS = 256
_PIECE_BYTES = 8 << 20
"""Maximum number of bytes of one receive, which bounds the time until the caller can look at its clock."""
_REQUEST_PIECE_BYTES = 4096
"""Number of bytes that are received at once for a request; enough for about 1,000 page ids."""


class Op(IntEnum):
    """Kind of request."""

    PAGES = 1
    EPOCHS = 2


_OPS = {op.value: op for op in Op}
_OTHER_FRAMING = {
    PLAIN.magic: "the listener does not encrypt, and this worker requires it (kv_encryption)",
    SEALED_MAGIC: "the listener requires encryption, and this worker does not encrypt (kv_encryption)",
}
"""Errors of a reader by the framing of the listener, if it is not the reader's own."""


class Status(IntEnum):
    """Status of a reply."""

    OK = 0
    REFUSED = 1


def padded(num_bytes: int) -> int:
    """Return a number of bytes, rounded up to the alignment of the owner's messages."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class WireError(OSError):
    """The other side violated the protocol, closed the connection, or has no key of this pool."""


def connection_key(secret: bytes, owner: Incarnation, framing: Framing = PLAIN) -> bytes:
    """Derive the key with which both sides of a connection to `owner` authenticate.

    Args:
        secret: the pool's secret.
        owner: incarnation of the worker that listens.
        framing: framing of the connection.
    """
    return blake3(secret + b"\x1f" + owner.encode(), derive_key_context=framing.context).digest()


def greet_as_owner(
    link: socket.socket, keys: Sequence[bytes], clock: Clock, seconds: float, framing: Framing = PLAIN
) -> ByteLink:
    """Run the owner's side of the handshake; return the connection for requests.

    Args:
        link: accepted connection, before any byte was exchanged.
        keys: connection keys, any of which is accepted, so that secrets can be rotated.
        clock: clock of the deadline.
        seconds: time limit of the whole handshake, in seconds.
        framing: framing of this worker's connections.

    Raises:
        WireError, SealError, TimeoutError: the reader has none of the keys, or does not answer in time.
    """
    greeting = framing.greet()
    mine = secrets.token_bytes(_NONCE) + greeting.share
    link.sendall(_padded(framing.magic + mine))
    deadline = clock.monotonic() + seconds
    answer = b""
    while len(answer) < len(mine) + _MAC:
        answer += receive(link, 1)  # byte by byte, so that an unauthenticated reader cannot exceed the deadline
        if clock.monotonic() > deadline:
            raise TimeoutError("the handshake took too long")
    theirs, mac = answer[: len(mine)], answer[len(mine) :]
    for key in keys:
        if compare_digest(mac, _mac(key, b"reader", mine, theirs)):
            opened = greeting.link(link, key, mine, theirs, is_owner=True)
            link.sendall(_padded(_mac(key, b"owner", mine, theirs)))
            return opened
    raise WireError("the reader does not have this pool's key")


def greet_as_reader(link: socket.socket, key: bytes, framing: Framing = PLAIN) -> ByteLink:
    """Run the reader's side of the handshake; return the connection for requests.

    Args:
        link: a new connection.
        key: result of `connection_key` for the same framing.
        framing: framing of this worker's connections.

    Raises:
        WireError, SealError, TimeoutError: the listener is not the expected owner, has another framing, or does not
            answer in time.
    """
    magic = framing.magic
    found = receive(link, len(magic))
    if found != magic:
        raise WireError(_OTHER_FRAMING.get(found, "the listener does not speak this protocol"))
    greeting = framing.greet()
    mine = secrets.token_bytes(_NONCE) + greeting.share
    theirs = receive(link, padded(len(magic) + len(mine)) - len(magic))[: len(mine)]
    link.sendall(mine + _mac(key, b"reader", theirs, mine))
    if not compare_digest(receive(link, padded(_MAC))[:_MAC], _mac(key, b"owner", theirs, mine)):
        raise WireError("the listener does not have this pool's key")
    return greeting.link(link, key, theirs, mine, is_owner=False)


def block_in_kernel(link: socket.socket, patience: float) -> None:
    """Make calls of a connection block in the kernel, each for at most `patience` seconds without data.

    With a socket time-out set in Python, each call first polls the socket, and a large send is resumed whenever
    a part fits into the buffer; that costs more than the transfer of a small page over loopback.

    Args:
        link: the connection.
        patience: time limit of a call without data, in seconds.
    """
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _interval(patience))
    limit_receives(link, patience)


def limit_receives(link: ByteLink, patience: float) -> None:
    """Make each receive of a connection without a socket time-out of Python wait for at most `patience` seconds,
    rounded up to the kernel's timer tick (1 to 10 ms).
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _interval(patience))


def send_request(link: ByteLink, op: Op, ids: Sequence[int], seconds: float) -> None:
    """Send a request for pages or epochs.

    Args:
        link: connection that blocks without a time-out; it still does afterwards.
        op: pages or epochs.
        ids: page ids of the peer.
        seconds: time limit in seconds.

    Raises:
        OSError, TimeoutError: the connection is closed, or the peer does not receive.
    """
    request = _REQUEST.pack(op, len(ids)) + struct.pack(f"<{len(ids)}I", *ids)
    sent = 0
    with suppress(BlockingIOError):
        # A socket time-out set in Python would cost three more system calls.
        sent = link.send(request, socket.MSG_DONTWAIT)
    if sent < len(request):
        link.settimeout(seconds)
        link.sendall(request[sent:])
        link.settimeout(None)


class Requests:
    """Requests that arrive on a connection, each usually received in one call."""

    def __init__(self, link: ByteLink, max_ids: int) -> None:
        """
        Args:
            link: an authenticated connection.
            max_ids: maximum number of page ids of a request.
        """
        self._link, self._max_ids = link, max_ids
        self._rest = b""
        """Bytes received after the last request."""

    def receive(self) -> tuple[Op, tuple[int, ...]] | None:
        """Wait for the next request, without a time limit; return `None` if the reader closed the connection. After
        the first byte, the connection's time-out applies.

        Raises:
            WireError, BlockingIOError: the request is malformed, has too many page ids, or is incomplete.
        """
        held = self._rest
        while not held:
            try:
                held = self._link.recv(_REQUEST_PIECE_BYTES)
            except BlockingIOError:  # the time-out of an idle connection
                continue
            if not held:
                return None
        if len(held) < _REQUEST.size:
            held += receive(self._link, _REQUEST.size - len(held))
        number, count = _REQUEST.unpack_from(held)
        op = _OPS.get(number)
        if op is None or not 0 < count <= self._max_ids:
            kinds = ", ".join(str(int(known)) for known in _OPS)
            raise WireError(
                f"request of kind {number} for {count} pages; expected kind {kinds} and 1 to {self._max_ids}"
            )
        size = _REQUEST.size + 4 * count
        if len(held) < size:
            held += receive(self._link, size - len(held))
        self._rest = held[size:]
        return op, struct.unpack_from(f"<{count}I", held, _REQUEST.size)


def send_refusal(link: ByteLink) -> None:
    """Send a reply that rejects a request with page ids out of range."""
    link.sendall(_REPLY.pack(Status.REFUSED, 0))


def send_epochs(link: ByteLink, epochs: Sequence[int]) -> None:
    """Send a reply with epochs as content."""
    send_reply(link, [memoryview(_padded(struct.pack(f"<{len(epochs)}Q", *epochs)))])


def epochs_of(content: memoryview, count: int) -> list[int]:
    """Return the epochs in the content of a reply.

    Args:
        content: the content, at least 8 bytes per epoch.
        count: number of epochs.
    """
    return list(struct.unpack_from(f"<{count}Q", content))


def send_reply(link: ByteLink, content: Sequence[memoryview]) -> None:
    """Send a reply with the buffers as content, without copying them.

    Args:
        link: the connection.
        content: the buffers, as bytes.
    """
    left = [memoryview(_REPLY.pack(Status.OK, sum(map(len, content)))), *content]
    while left:
        sent = link.sendmsg(left[:_MAX_BUFFERS])
        left = _advance(left, sent)


class IncomingReply:
    """A reply that is being received into buffers, in order."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._head = bytearray(_REPLY.size)
        self._left = [memoryview(self._head), *into]
        self._size = sum(map(len, into))
        self.num_received = 0
        """Bytes received so far."""

    def receive_some(self, link: ByteLink, flags: int = 0) -> bool:
        """Receive once, at most 8 MiB; return whether the reply is complete.

        Head and content are received together, since a call for the head alone would cost as much as a twentieth of a
        page over loopback. If the head turns out to be wrong, the buffers may have content of the wrong reply.

        Args:
            link: the connection.
            flags: `MSG_DONTWAIT` receives what has arrived; `MSG_WAITALL` waits for all bytes of this call, or for
                the time of `limit_receives`.

        Raises:
            BlockingIOError: nothing has arrived, or not in time.
            WireError, TimeoutError: the reply is a rejection or has an unexpected length, the connection was closed
                or timed out.
        """
        received = link.recvmsg_into(_first(self._left, _PIECE_BYTES), 0, flags)[0]
        if not received:
            raise WireError("the peer closed the connection before the whole reply arrived")
        before = self.num_received
        self.num_received += received
        self._left = _advance(self._left, received)
        if before < _REPLY.size <= self.num_received:
            self._check_head()
        return not self._left

    def _check_head(self) -> None:
        status, length = _REPLY.unpack(self._head)
        if status != Status.OK:
            raise WireError("the peer rejected the request")
        if length != self._size:
            raise WireError(f"the peer's reply has {length} bytes, not {self._size}")


def receive(link: ByteLink, size: int) -> bytes:
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


def _padded(message: bytes) -> bytes:
    """Return a message with zeros up to the alignment of the owner's messages."""
    return message.ljust(padded(len(message)), b"\0")


def _first(left: list[memoryview], size: int) -> list[memoryview]:
    """Return the first `size` bytes of `left`, or fewer if that many buffers do not fit into a call."""
    taken: list[memoryview] = []
    for view in left[:_MAX_BUFFERS]:
        taken.append(view[:size])
        size -= len(view)
        if size <= 0:
            break
    return taken


def _interval(seconds: float) -> bytes:
    """Encode a positive time as `struct timeval`; zero would mean no limit."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("@ll", micros // 1_000_000, micros % 1_000_000)


def _advance(left: list[memoryview], done: int) -> list[memoryview]:
    """Return the part of `left` after its first `done` bytes."""
    for i, view in enumerate(left):
        if done < len(view):
            return [view[done:], *left[i + 1 :]]
        done -= len(view)
    return []


def _mac(key: bytes, who: bytes, owners: bytes, readers: bytes) -> bytes:
    return blake3(who + owners + readers, key=key).digest()
