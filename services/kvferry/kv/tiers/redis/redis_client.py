"""Small RESP2 client with scatter/gather I/O: commands are sent without joining buffers, and values are received in
place.

Plain sockets are blocking, with kernel time-outs (`SO_RCVTIMEO`), so that one call fills a whole chunk, without a poll
before each read or a copy after it. Every length is bounded before memory is allocated. After a time-out the position
in the stream is unknown, so the connection is closed; a late reply can therefore never be taken for the reply to a
later command.
"""

import select
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from kvferry.core.clock import Clock

Reply: TypeAlias = "int | bytes | list[Reply] | None"

MAX_LINE_BYTES = 4096
MAX_BULK_BYTES = 64 << 10
"""Maximum length in bytes of a bulk string other than an object."""
MAX_ITEMS = 16384
_MAX_DEPTH = 4
_MAX_BUFFERS = 512
CRLF = b"\r\n"
_ARM_AGAIN_SECONDS = 0.005
_WHOLE = getattr(socket, "MSG_WAITALL", 0)
_AT_ONCE = socket.MSG_DONTWAIT


class ConnectionLost(Exception):
    """The connection is no longer usable."""


class ReplyTimeout(ConnectionLost):
    """The deadline passed before the reply was complete."""


class ReplyPending(Exception):
    """The reply was not complete at the time limit of a patient read; the connection is still usable."""


class ServerError(Exception):
    """The server replied with an error; the message is its text. The connection is still usable."""

    @property
    def code(self) -> str:
        """Error code, such as `OOM`, `NOPERM` or `MOVED`; `ERR` if the text has no code."""
        word = str(self).partition(" ")[0]
        return word if word.isascii() and word.isalpha() and word.isupper() and len(word) <= 32 else "ERR"


def command(*words: bytes) -> bytes:
    """Encode one command with short arguments."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Wire:
    """A connection to a server, used by one thread at a time. Deadlines are times of the clock's `monotonic`."""

    def __init__(self, connected: socket.socket, clock: Clock) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._clock = clock
        self._buffer = bytearray(MAX_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._armed_seconds = float("inf")
        """Kernel time-out per call in seconds, as last set."""
        self._watcher: select.poll | None = None
        self.is_closed = False
        self.is_patient = False
        """Whether a time-out raises `ReplyPending` and keeps the connection open."""
        if not self._is_tls:
            connected.settimeout(None)

    def fileno(self) -> int:
        """Return the file descriptor, for `poll`."""
        return self._socket.fileno()

    @property
    def can_hedge(self) -> bool:
        """Whether this connection can be polled together with others; `False` with TLS, whose buffered data `poll`
        ignores."""
        return not self._is_tls

    def is_quiet(self) -> bool:
        """Return whether no data is pending. Between exchanges, pending data means that the connection was closed or is
        out of sync."""
        if self._watcher is None:
            self._watcher = select.poll()
            self._watcher.register(self._socket.fileno(), select.POLLIN)
        return self._start == self._end and not self._watcher.poll(0)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.close()

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send buffers in order.

        Args:
            parts: the buffers.
            deadline: monotonic seconds.

        Raises:
            ConnectionLost: the buffers could not be sent in time; the connection is closed.
        """
        rest = [v for v in (memoryview(p) for p in parts) if len(v)]
        try:
            while rest:
                self._arm(deadline)
                if self._is_tls:
                    self._socket.sendall(rest[0])
                    rest = rest[1:]
                    continue
                rest = after(rest, self._socket.sendmsg(rest[:_MAX_BUFFERS]))
        except OSError as error:
            raise self._lost(error) from error

    def read_into(self, views: Sequence[memoryview], deadline: float | None) -> int:
        """Receive into the views, from their start; return the number of received bytes, at least 1.

        Args:
            views: target buffers.
            deadline: time limit. With `None`, only available data is received; the result is 0 if no data is available.

        Raises:
            ConnectionLost: the connection ended or the deadline passed; the connection is closed.
        """
        flags = 0
        try:
            if deadline is None:
                flags = _AT_ONCE
            else:
                self._arm(deadline)
                flags = 0 if self._is_tls else _WHOLE
            if self._is_tls:
                count = self._socket.recv_into(views[0])
            elif len(views) == 1:
                count = self._socket.recv_into(views[0], 0, flags)
            else:
                count = self._socket.recvmsg_into(views, 0, flags)[0]
        except (BlockingIOError, TimeoutError) as error:
            if deadline is None:
                return 0
            raise self._lost(error) from error
        except OSError as error:
            raise self._lost(error) from error
        if count == 0:
            raise self._lost(None)
        return count

    def buffered(self, deadline: float | None) -> memoryview | None:
        """Receive more data into the line buffer; return the buffer's unread bytes, or `None` if no data is available.

        Args:
            deadline: monotonic seconds; `None` to receive only available data.

        Raises:
            ConnectionLost: the connection ended, the deadline passed, or a line exceeds `MAX_LINE_BYTES`.
        """
        if self._start:
            rest = self._end - self._start
            if rest:
                self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        if self._end == len(self._buffer):
            raise self.broken("a line that is too long")
        try:
            if deadline is not None:
                self._arm(deadline)
            flags = _AT_ONCE if deadline is None and not self._is_tls else 0
            count = self._socket.recv_into(self._view[self._end :], 0, flags)
        except (BlockingIOError, TimeoutError) as error:
            if deadline is None:
                return None
            raise self._lost(error) from error
        except OSError as error:
            raise self._lost(error) from error
        if count == 0:
            raise self._lost(None)
        self._end += count
        return self._view[self._start : self._end]

    def take_line(self) -> bytes | None:
        """Return the next line if it is complete in the buffer, otherwise `None`."""
        end = self._buffer.find(CRLF, self._start, self._end)
        if end < 0:
            return None
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def take(self, count: int) -> memoryview:
        """Consume at most `count` bytes of the buffer; return a view of them that is valid until the next call."""
        taken = self._view[self._start : min(self._end, self._start + count)]
        self._start += len(taken)
        return taken

    @property
    def num_buffered(self) -> int:
        """Number of bytes that were received and not consumed."""
        return self._end - self._start

    def line(self, deadline: float) -> bytes:
        """Read the next line.

        Args:
            deadline: monotonic seconds.

        Raises:
            ConnectionLost: see `buffered`.
        """
        while (line := self.take_line()) is None:
            self.buffered(deadline)
        return line

    def reply(self, deadline: float, depth: int = 0) -> Reply:
        """Read a reply other than an object: an integer, a simple string, a short bulk string, or an array of them.

        Args:
            deadline: monotonic seconds.
            depth: number of arrays around the reply.

        Raises:
            ServerError: the server answered with an error.
            ConnectionLost: the connection ended, the deadline passed, or the reply is not RESP; the connection is
                closed.
        """
        line = self.line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise ServerError(rest.decode("ascii", "replace"))
        number = self.number(rest)
        if kind == b":":
            return number
        if kind == b"$":
            return self._bulk(number, deadline)
        if kind == b"*" and number <= MAX_ITEMS and depth < _MAX_DEPTH:
            return None if number < 0 else [self.reply(deadline, depth + 1) for _ in range(number)]
        raise self.broken("a reply of an unknown type, or one that is too long")

    def number(self, digits: bytes) -> int:
        """Parse a decimal number.

        Raises:
            ConnectionLost: the number is malformed; the connection is closed.
        """
        if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
            raise self.broken("a length that is not a number")
        return int(digits)

    def broken(self, what: str) -> ConnectionLost:
        """Close the connection after a protocol violation; return the exception for the caller to raise."""
        self.close()
        return ConnectionLost(f"the server sent {what}")

    def _bulk(self, length: int, deadline: float) -> bytes | None:
        if length < 0:
            return None
        if length > MAX_BULK_BYTES:
            raise self.broken(f"{length} bytes where at most {MAX_BULK_BYTES} were expected")
        whole = memoryview(bytearray(length + 2))
        got = self.take(length + 2)
        whole[: len(got)] = got
        at = len(got)
        while at < len(whole):
            at += self.read_into([whole[at:]], deadline)
        if whole[length:] != CRLF:
            raise self.broken("a value without a terminator")
        return bytes(whole[:length])

    def _arm(self, deadline: float) -> None:
        """Set the kernel time-out of the next call to the time that remains until the deadline."""
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise self._lost(TimeoutError())
        if self._is_tls:
            self._socket.settimeout(left)
            return
        if abs(left - self._armed_seconds) < _ARM_AGAIN_SECONDS:
            return
        seconds = int(left)
        value = struct.pack("@ll", seconds, max(1, int((left - seconds) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._armed_seconds = left

    def _lost(self, error: OSError | None) -> ConnectionLost | ReplyPending:
        is_late = isinstance(error, BlockingIOError | TimeoutError)
        if is_late and self.is_patient:
            return ReplyPending()
        self.close()
        if is_late:
            return ReplyTimeout("no answer in time")
        return ConnectionLost(
            "the server closed the connection" if error is None else f"connection lost ({_reason(error)})"
        )


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the part of the views after the first `count` bytes."""
    if len(views) == 1:
        return [views[0][count:]] if count < len(views[0]) else []
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
