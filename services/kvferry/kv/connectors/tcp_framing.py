"""Framing of the bytes of a connection of connector `tcp`: plain here, encrypted records in `tcp_seal`.

A worker has one framing, by its setting `kv_encryption`; sides do not negotiate. The framing is part of what the
handshake authenticates, since the key of its MACs is derived with the framing's context: a MAC of one framing is not
valid in another one.
"""

import socket
from typing import Any, Protocol


class SealError(OSError):
    """A record was altered, repeated, reordered or cut off, was made with another key, or its key may not encrypt any
    further."""


class ByteLink(Protocol):
    """The part of `socket.socket` that is used after the handshake, for bytes before encryption."""

    def send(self, data: bytes, flags: int, /) -> int: ...
    def sendall(self, data: bytes, /) -> None: ...
    def sendmsg(self, buffers: list[memoryview], /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def recvmsg_into(self, buffers: list[memoryview], ancillary: int, flags: int, /) -> Any: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...
    def close(self) -> None: ...


class Greeting(Protocol):
    """One side of one handshake."""

    @property
    def share(self) -> bytes:
        """Bytes that this side sends with its nonce."""
        ...

    def link(self, raw: socket.socket, key: bytes, owners: bytes, readers: bytes, *, is_owner: bool) -> ByteLink:
        """Return the connection after the handshake.

        Args:
            raw: the connection.
            key: key with which both sides have authenticated.
            owners: the owner's nonce and share.
            readers: the reader's nonce and share.
            is_owner: whether this side is the owner.

        Raises:
            SealError: the other side's share is not valid.
        """
        ...


class Framing(Protocol):
    """A framing, which makes a greeting for each connection."""

    @property
    def magic(self) -> bytes:
        """First 8 bytes of the owner, which name the protocol's version and the framing."""
        ...

    @property
    def context(self) -> str:
        """Context with which the keys of the handshake are derived."""
        ...

    def greet(self) -> Greeting: ...


class Plain:
    """Bytes as they are, over the socket itself. Also its own greeting, since nothing is exchanged."""

    magic = b"kvtcp-2\n"
    context = "kvferry 2026-11 tcp connector"
    share = b""

    def greet(self) -> "Plain":
        return self

    def link(self, raw: socket.socket, key: bytes, owners: bytes, readers: bytes, *, is_owner: bool) -> ByteLink:
        return raw


PLAIN = Plain()
SEALED_MAGIC = b"kvtcp-2s"
