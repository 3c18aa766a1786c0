"""Reader of the reply to `GET` of an object: receives directly into the caller's buffers and verifies while receiving.

The length is checked before the value is read, and the header before the pages; pages are verified chunk by chunk while
they are in the core's cache. The read can be suspended and resumed, so that one thread can wait for two replies.
"""

from collections.abc import Callable, Sequence

from kvferry.kv.tiers.interface.frame import CHUNK_BYTES, HEADER_BYTES, FrameDamaged, Opening, chunked
from kvferry.kv.tiers.redis.redis_client import CRLF, ReplyPending, ServerError, Wire, after


class KeyMissing(Exception):
    """The server has no such key."""


class ObjectRead:
    """Resumable read of the reply to `GET` of one object into the caller's buffers."""

    def __init__(
        self, wire: Wire, into: Sequence[memoryview], num_bytes: int, opener: Callable[[bytes], Opening]
    ) -> None:
        """
        Args:
            wire: the connection, to which the command was sent.
            into: target buffers of the pages; byte views, `num_bytes` long in total.
            num_bytes: length of the object.
            opener: verifies the header before the pages are read.
        """
        self.wire = wire
        self._tail = memoryview(bytearray(2))
        self._opener = opener
        self._frame_bytes = HEADER_BYTES + num_bytes
        self._expected_line = b"$%d" % self._frame_bytes
        self._opening: Opening | None = None
        self._has_length = False
        self._is_whole = False
        self._runs = [*chunked(into, CHUNK_BYTES)]
        self._runs[-1].append(self._tail)
        self._next = 0
        self._left: list[memoryview] = list(self._runs[0])

    def advance(self, deadline: float | None) -> bool:
        """Read until the object is complete and verified, or, without a deadline, until no more data is available.

        Return whether the object is complete.

        Args:
            deadline: monotonic seconds; `None` to return when no more data is available.

        Raises:
            KeyMissing: the server has no such key.
            ServerError: the server answered with an error.
            FrameDamaged: the value is not the object as it was stored; the connection may have been closed.
            ConnectionLost: the connection ended, or the deadline passed.
        """
        if self._opening is None and not self._read_head(deadline):
            return False
        while self._next < len(self._runs):
            if self.wire.num_buffered:
                got = self.wire.take(len(self._left[0]))
                count = len(got)
                self._left[0][:count] = got
            else:
                count = self.wire.read_into(self._left, deadline)
                if not count:
                    return False
            self._left = after(self._left, count)
            if not self._left:
                self._check_run()
        if bytes(self._tail) != CRLF:
            raise self.wire.broken("a value without a terminator")
        self._opened.finish()
        self._is_whole = True
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the object is complete and verified."""
        return self._is_whole

    def advance_until(self, moment: float) -> bool:
        """Read until the object is complete and verified, or until time `moment`; return whether it is complete.

        Raises:
            KeyMissing, ServerError, FrameDamaged, ConnectionLost: see `advance`.
        """
        self.wire.is_patient = True
        try:
            return self.advance(moment)
        except ReplyPending:
            return False
        finally:
            self.wire.is_patient = False

    @property
    def _opened(self) -> Opening:
        assert self._opening is not None
        return self._opening

    def _check_run(self) -> None:
        for piece in self._runs[self._next]:
            if piece is not self._tail:
                self._opened.feed(piece)
        self._next += 1
        if self._next < len(self._runs):
            self._left = list(self._runs[self._next])

    def _read_head(self, deadline: float | None) -> bool:
        """Read the length line and the header; return whether both are complete."""
        wire = self.wire
        while not self._has_length:
            line = wire.take_line() if wire.num_buffered else None
            if line is not None:
                self._check_length(line)
                self._has_length = True
            elif wire.buffered(deadline) is None:
                return False
        while wire.num_buffered < HEADER_BYTES:
            if wire.buffered(deadline) is None:
                return False
        try:
            self._opening = self._opener(bytes(wire.take(HEADER_BYTES)))
        except Exception:
            wire.close()  # otherwise the rest of this reply would be read as the next one
            raise
        return True

    def _check_length(self, line: bytes) -> None:
        if line == self._expected_line:
            return
        if line[:1] == b"-":
            raise ServerError(line[1:].decode("ascii", "replace"))
        if line[:1] != b"$":
            raise self.wire.broken("no bulk string where one was expected")
        length = self.wire.number(line[1:])
        if length < 0:
            raise KeyMissing
        if length != self._frame_bytes:
            self.wire.close()
            raise FrameDamaged(f"the stored value has {length} bytes, not {self._frame_bytes}")
