"""A small RESP2 client: commands go out without joining buffers, values come in where they belong.

Plain sockets block, with the kernel's own timeouts (`SO_RCVTIMEO`), so that one call fills a whole chunk: no poll
before each read and no copy after it. Every length is bounded before anything is allocated. After a timeout the place
in the stream is lost, so the connection is closed; a reply that was too slow can never be taken for the next one.
"""

import select
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

from kvferry.core.clock import Clock

Reply: TypeAlias = "int | bytes | list[Reply] | None"

MAX_LINE_BYTES = 4096
MAX_BULK_BYTES = 64 << 10
"""Of a reply that is no object."""
MAX_ITEMS = 16384
_MAX_DEPTH = 4
_MAX_BUFFERS = 512
CRLF = b"\r\n"
_ARM_AGAIN_SECONDS = 0.005
_WHOLE = getattr(socket, "MSG_WAITALL", 0)
_AT_ONCE = socket.MSG_DONTWAIT


class Lost(Exception):
    """The connection is of no use any more."""


class TooLate(Lost):
    """The deadline passed before the reply was there."""


class NotYet(Exception):
    """The moment until which a patient reader waits has passed; the connection is as good as before."""


class ServerError(Exception):
    """The server answered with an error; the connection is as good as before. The text is the server's."""

    @property
    def code(self) -> str:
        """`OOM`, `NOPERM`, `MOVED`...: the first word, if it is one."""
        word = str(self).partition(" ")[0]
        return word if word.isascii() and word.isalpha() and word.isupper() and len(word) <= 32 else "ERR"


def command(*words: bytes) -> bytes:
    """One command of short arguments."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class _Socket(Protocol):
    """What is needed of a plain or a TLS socket."""

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Wire:
    """One connection; one thread at a time. Deadlines are readings of the clock's `monotonic`."""

    def __init__(self, connected: socket.socket, clock: Clock) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._clock = clock
        self._buffer = bytearray(MAX_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._armed_seconds = float("inf")
        """The kernel's timeout for each call, as set last."""
        self._watcher: select.poll | None = None
        self.is_closed = False
        self.is_patient = False
        """Whether a timeout is only news (`NotYet`) and not the end of the connection."""
        if not self._is_tls:
            connected.settimeout(None)

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    @property
    def can_hedge(self) -> bool:
        """Whether it can be waited for beside another: what TLS has decrypted already is seen by no poll."""
        return not self._is_tls

    def is_quiet(self) -> bool:
        """Whether nothing waits to be read: what does is the connection's end, or out of step."""
        if self._watcher is None:
            self._watcher = select.poll()
            self._watcher.register(self._socket.fileno(), select.POLLIN)
        return self._start == self._end and not self._watcher.poll(0)

    def close(self) -> None:
        """Idempotent."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.close()

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send the parts one after the other.

        Raises:
            Lost: they could not be sent in time; the connection is closed.
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
        """Fill the views from the start as far as may be; how many bytes came, at least one.

        Args:
            deadline: `None` takes what is there and waits for nothing; 0 bytes then mean that nothing is.

        Raises:
            Lost: the connection ended, or the deadline passed; it is closed.
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
        """Unread bytes of the line buffer after at least one more read; `None` when nothing is there yet.

        Raises:
            Lost: the connection ended, the deadline passed, or a line is longer than any may be.
        """
        if self._start:
            rest = self._end - self._start
            if rest:
                self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        if self._end == len(self._buffer):
            raise self.broken("a line without end")
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
        """The next line if the buffer has all of it."""
        end = self._buffer.find(CRLF, self._start, self._end)
        if end < 0:
            return None
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def take(self, count: int) -> memoryview:
        """At most `count` bytes of the buffer; good until the next call."""
        taken = self._view[self._start : min(self._end, self._start + count)]
        self._start += len(taken)
        return taken

    @property
    def num_buffered(self) -> int:
        """Bytes read and not taken."""
        return self._end - self._start

    def line(self, deadline: float) -> bytes:
        """The next line.

        Raises:
            Lost: see `buffered`.
        """
        while (line := self.take_line()) is None:
            self.buffered(deadline)
        return line

    def reply(self, deadline: float, depth: int = 0) -> Reply:
        """A reply that is no object: numbers, words, short values, lists of them.

        Raises:
            ServerError: the server answered with an error.
            Lost: the connection ended, the deadline passed, or this is no RESP; it is closed.
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
        raise self.broken("a reply of no known kind, or too long")

    def number(self, digits: bytes) -> int:
        """A decimal number.

        Raises:
            Lost: it is none.
        """
        if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
            raise self.broken("a length that is no number")
        return int(digits)

    def broken(self, what: str) -> Lost:
        """The server does not speak RESP as it should: closes the connection; for the caller to raise."""
        self.close()
        return Lost(f"the server sent {what}")

    def _bulk(self, length: int, deadline: float) -> bytes | None:
        if length < 0:
            return None
        if length > MAX_BULK_BYTES:
            raise self.broken(f"{length} bytes where at most {MAX_BULK_BYTES} were due")
        whole = memoryview(bytearray(length + 2))
        got = self.take(length + 2)
        whole[: len(got)] = got
        at = len(got)
        while at < len(whole):
            at += self.read_into([whole[at:]], deadline)
        if whole[length:] != CRLF:
            raise self.broken("a value without an end")
        return bytes(whole[:length])

    def _arm(self, deadline: float) -> None:
        """Give the next call the time that is left."""
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

    def _lost(self, error: OSError | None) -> Lost | NotYet:
        is_late = isinstance(error, BlockingIOError | TimeoutError)
        if is_late and self.is_patient:
            return NotYet()
        self.close()
        if is_late:
            return TooLate("no answer in time")
        return Lost("the server closed the connection" if error is None else f"connection lost ({_reason(error)})")


def after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after `count` bytes."""
    if len(views) == 1:
        return [views[0][count:]] if count < len(views[0]) else []
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
