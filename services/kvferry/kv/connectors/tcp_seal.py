"""Encrypted connections of connector `tcp`: records of AES-256-GCM, with keys of each connection and direction.

    record    length u32 of the content   44 zero B   content, encrypted   tag 16 B       1 to 131,072 B of content

Both sides send a new X25519 key with their nonces, which the MACs of the handshake cover. The two keys of a connection
are derived from the pool's key, the result of the exchange and both nonces, so the pool's secret does not decrypt
recorded traffic. The nonce of a record is its number in its direction, and the tag covers the length: a record that was
altered, repeated, reordered or left out has a wrong tag. A connection that ends between two records has an incomplete
message, which the protocol above refuses.

A record is decrypted directly into the reader's buffers if it fits into one. Content whose tag is wrong is overwritten
with zeros, and its connection must be closed. The overhead of a record is 64 bytes, so that pages keep their alignment
on the way.
"""

import mmap
import socket
import struct
from typing import Any

from blake3 import blake3

from kvferry.core.errors import UsageError
from kvferry.kv.connectors.tcp_framing import SEALED_MAGIC, ByteLink, SealError

_KEYS_CONTEXT = "kvferry 2026-11 tcp connector, keys of an encrypted connection"
_KEY_BYTES = 32
_HEAD = struct.Struct("<I44x")
_TAG_BYTES = 16
OVERHEAD = _HEAD.size + _TAG_BYTES
"""Bytes of a record besides its content."""
RECORD_BYTES = 128 << 10
"""Maximum content of a record. The cipher releases the interpreter's lock for each record, and may have to wait until
other threads release it again, so records are large; but a record arrives within a second at 1 Mbit/s, before a read
counts as stalled."""
_WINDOW_BYTES = 4 * (RECORD_BYTES + OVERHEAD)
"""Bytes of records that are sent or received at once."""
_NONCE = struct.Struct("<Q4x")
_MAX_RECORDS = 1 << 21
"""Maximum number of records of a key, 256 GiB: with 2**34 AES blocks, an attacker's advantage over a random permutation
is about 2**-60, the margin that TLS 1.3 keeps."""


def check_package() -> None:
    """Check that the package for encryption is installed.

    Raises:
        UsageError: it is not, or is too old.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        found = hasattr(AESGCM, "decrypt_into")
    except ImportError:
        found = False
    if not found:
        raise UsageError(
            "kv_encryption needs a package that is not installed (cryptography, version 47 or later); install it with: "
            "pip install 'kvferry[encryption]'",
            field="kv_encryption",
        )


class EncryptedFraming:
    """Framing of encrypted connections."""

    magic = SEALED_MAGIC
    context = "kvferry 2026-11 tcp connector, encrypted"

    def __init__(self) -> None:
        """
        Raises:
            UsageError: the package for encryption is not installed.
        """
        check_package()

    def greet(self) -> "_Exchange":
        return _Exchange()


class _Exchange:
    """Key exchange of one connection."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.share: bytes = self._private.public_key().public_bytes_raw()

    def link(self, raw: socket.socket, key: bytes, owners: bytes, readers: bytes, *, is_owner: bool) -> ByteLink:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        theirs = (readers if is_owner else owners)[-len(self.share) :]
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as error:  # a point of low order, whose result would be zero
            raise SealError("the other side sent a key that is not valid") from error
        made = blake3(key + shared + owners + readers, derive_key_context=_KEYS_CONTEXT).digest(length=2 * _KEY_BYTES)
        of_owner, of_reader = made[:_KEY_BYTES], made[_KEY_BYTES:]
        return SealedLink(raw, *((of_owner, of_reader) if is_owner else (of_reader, of_owner)))


class _Direction:
    """Cipher of one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.cipher: Any = AESGCM(key)
        self.num_records = 0

    def nonce(self) -> bytes:
        """Return the nonce of the next record, which is never returned again.

        Raises:
            SealError: the key has encrypted as many records as it may.
        """
        number = self.num_records
        if number >= _MAX_RECORDS:
            raise SealError(f"the key of this connection has encrypted {_MAX_RECORDS} records, the maximum")
        self.num_records += 1
        return _NONCE.pack(number)


class SealedLink:
    """An encrypted connection with the methods of `ByteLink`. Used by one thread at a time."""

    def __init__(self, raw: socket.socket, sending: bytes, receiving: bytes) -> None:
        """
        Args:
            raw: the connection after the handshake.
            sending: key of this side's records.
            receiving: key of the other side's records.
        """
        from cryptography.exceptions import InvalidTag

        self._raw = raw
        self._sending, self._receiving = _Direction(sending), _Direction(receiving)
        self._wrong_tag = InvalidTag
        # The system allocates what is used of these areas, which is little for requests.
        self._out = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        self._in = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        self._start = self._end = 0
        """Range of the received bytes in `_in` that are not decrypted yet."""
        self._rest = memoryview(b"")
        """Decrypted content that has not been returned yet."""

    @property
    def is_spent(self) -> bool:
        """Whether the connection should be closed after the current exchange: half of a key's records are used."""
        return max(self._sending.num_records, self._receiving.num_records) >= _MAX_RECORDS // 2

    def settimeout(self, seconds: float | None) -> None:
        self._raw.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._raw.setsockopt(level, option, value)

    def close(self) -> None:
        self._raw.close()

    def send(self, data: bytes, flags: int) -> int:
        """Raise `BlockingIOError`: a record is sent as a whole, by `sendall`."""
        raise BlockingIOError("an encrypted connection sends no part of a message")

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self.sendmsg([left]) :]

    def sendmsg(self, buffers: list[memoryview]) -> int:
        """Encrypt and send a first part of the buffers, of up to four records; return its number of bytes.

        Raises:
            SealError: the key has encrypted as many records as it may.
            OSError: the connection is closed, or the other side does not receive.
        """
        at = done = 0
        for buffer in buffers:
            for start in range(0, len(buffer), RECORD_BYTES):
                content = buffer[start : start + RECORD_BYTES]
                end = at + OVERHEAD + len(content)
                if end > _WINDOW_BYTES:
                    self._raw.sendall(self._out[:at])
                    return done
                head = _HEAD.pack(len(content))
                self._out[at : at + len(head)] = head
                self._sending.cipher.encrypt_into(self._sending.nonce(), content, head, self._out[at + len(head) : end])
                at, done = end, done + len(content)
        self._raw.sendall(self._out[:at])
        return done

    def recv(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; none if the other side has closed the connection.

        Raises:
            BlockingIOError: nothing arrived in time.
            TimeoutError: a record did not arrive completely in time.
            SealError: see there.
        """
        while not self._rest:
            length = self._next_length()
            if length is None:
                try:
                    if not self._fill(1, 0):
                        return b""
                except BlockingIOError:
                    if self._end:
                        raise TimeoutError("a record did not arrive completely in time") from None
                    raise
            else:
                self._rest = self._opened(length)
        found, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return found

    def recvmsg_into(self, buffers: list[memoryview], ancillary: int, flags: int) -> tuple[int]:
        """Receive once from the socket; return the number of bytes that are in the buffers, none after the end.

        Args:
            buffers: targets, filled in order.
            ancillary: not used; that of `socket.recvmsg_into`.
            flags: `MSG_DONTWAIT`, `MSG_WAITALL`, or 0.

        Raises:
            BlockingIOError: no complete record has arrived, or not in time.
            SealError: see there.
        """
        if not self._rest and self._next_length() is None and not self._fill(sum(map(len, buffers)), flags):
            return (0,)
        done = 0
        for buffer in buffers:
            filled = self._deliver(buffer)
            done += filled
            if filled < len(buffer):
                break
        if not done:
            raise BlockingIOError("no complete record has arrived")
        return (done,)

    def _deliver(self, into: memoryview) -> int:
        """Fill a buffer from the records that have arrived; return the number of bytes."""
        at = 0
        while at < len(into):
            if self._rest:
                size = min(len(self._rest), len(into) - at)
                into[at : at + size] = self._rest[:size]
                self._rest = self._rest[size:]
            elif (length := self._next_length()) is None:
                break
            elif length <= len(into) - at:
                self._open(length, into[at : at + length])
                size = length
            else:
                self._rest, size = self._opened(length), 0
            at += size
        return at

    def _next_length(self) -> int | None:
        """Return the length of the next record's content; `None` if the record has not arrived completely."""
        arrived = self._end - self._start
        if arrived < OVERHEAD:
            return None
        length = self._length_at_start()
        return length if arrived >= OVERHEAD + length else None

    def _length_at_start(self) -> int:
        (length,) = _HEAD.unpack_from(self._in, self._start)
        if not 0 < length <= RECORD_BYTES:
            raise SealError(f"a record has {length} bytes; expected 1 to {RECORD_BYTES}")
        return int(length)

    def _fill(self, wanted: int, flags: int) -> int:
        """Receive once behind the bytes of the next record; return the number of bytes, 0 at the end between records.

        Args:
            wanted: bytes of content that the caller waits for.
            flags: flags of the call. `MSG_WAITALL` waits for no more than the records of the wanted content.
        """
        arrived = self._end - self._start
        self._in[:arrived] = self._in[self._start : self._end]
        self._start, self._end = 0, arrived
        size = _WINDOW_BYTES - arrived
        if flags & socket.MSG_WAITALL:
            least = wanted + OVERHEAD * -(-wanted // RECORD_BYTES)
            if arrived >= _HEAD.size:
                least = max(least, OVERHEAD + self._length_at_start())
            size = min(size, max(least, OVERHEAD + 1) - arrived)
        received = self._raw.recv_into(self._in[arrived : arrived + size], size, flags)
        if not received and arrived:
            raise SealError("the other side closed the connection within a record")
        self._end += received
        return received

    def _opened(self, length: int) -> memoryview:
        content = memoryview(bytearray(length))
        self._open(length, content)
        return content

    def _open(self, length: int, into: memoryview) -> None:
        """Decrypt the next record into `into`, of its length."""
        body = self._start + _HEAD.size
        try:
            self._receiving.cipher.decrypt_into(
                self._receiving.nonce(),
                self._in[body : self._start + OVERHEAD + length],
                self._in[self._start : body],
                into,
            )
        except self._wrong_tag:
            into[:] = bytes(len(into))  # the library leaves the altered content there
            raise SealError("a record was altered, repeated or reordered, or made with another key") from None
        self._start += OVERHEAD + length


def is_spent(link: ByteLink) -> bool:
    """Return whether the keys of a connection should not be used for a further exchange."""
    return isinstance(link, SealedLink) and link.is_spent
