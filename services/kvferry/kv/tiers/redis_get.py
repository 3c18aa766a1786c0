"""Gets one object from one server; asks a second time, on another connection, for what is late.

    first   GET ──────────────── ... ────► the caller's buffers
    second            GET ───────────────► a spare buffer, copied over if it is whole first
                      └ after the 95th percentile of recent loads, if a connection is idle and the budget allows

One thread reads both replies, so nobody writes the caller's buffers when `get` is over.
"""

import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvferry.core.clock import Clock
from kvferry.kv.tiers.frame import FrameDamaged, Frames
from kvferry.kv.tiers.redis_link import Link
from kvferry.kv.tiers.redis_read import NotThere, ObjectRead
from kvferry.kv.tiers.resp import Lost, ServerError, Wire, command
from kvferry.kv.tiers.tier import ObjectKey


class Getter:
    """Shared by a tier's threads."""

    def __init__(self, frames: Frames, clock: Clock, *, hedge: bool) -> None:
        self._frames = frames
        self._clock = clock
        self._hedge = hedge
        self._buffers: list[memoryview] = []
        """Spare ones; never more than there were second requests at a time."""
        self._lock = threading.Lock()  # guards the list

    def get(
        self, link: Link, wire: Wire, key: ObjectKey, stored: bytes, into: Sequence[memoryview], deadline: float
    ) -> None:
        """Read the object `key`, stored under the Redis key `stored`, into flat buffers.

        Raises:
            NotThere, ServerError, FrameDamaged, Lost: see `ObjectRead.advance`.
        """
        started = self._clock.monotonic()
        wire.send([command(b"GET", stored)], deadline)
        first = self._reading(wire, key, into)
        patience = link.patience_seconds() if self._hedge and wire.can_hedge else None
        spare: Wire | None = None
        by_second = False
        if patience is None:
            first.advance(deadline)
        elif not first.advance_until(min(started + patience, deadline)):
            with link.spare() as spare:
                by_second = spare is not None and self._race(first, spare, key, stored, into, deadline)
            if not by_second and not first.is_whole:
                first.advance(deadline)
        link.note_load(self._clock.monotonic() - started, hedged=spare is not None, by_second=by_second)

    def _race(
        self,
        first: ObjectRead,
        spare: Wire,
        key: ObjectKey,
        stored: bytes,
        into: Sequence[memoryview],
        deadline: float,
    ) -> bool:
        """Read both until one is whole; whether it was the second. The loser's connection is closed: its reply is of
        no use to anybody. When the second fails, the first goes on alone, since its answer is the one that counts.
        """
        with self._buffer() as buffer:
            second = self._reading(spare, key, [buffer])
            watcher = select.poll()
            watcher.register(first.wire.fileno(), select.POLLIN)
            watcher.register(spare.fileno(), select.POLLIN)
            try:
                with suppress(Lost):
                    spare.send([command(b"GET", stored)], deadline)
                while not spare.is_closed and (left := deadline - self._clock.monotonic()) > 0:
                    ready = {fd for fd, _ in watcher.poll(left * 1000)}
                    if first.wire.fileno() in ready and first.advance(None):
                        return False
                    if spare.fileno() in ready and _advance_or_close(second):
                        first.wire.close()
                        _scatter(buffer, into)
                        return True
            finally:
                spare.close()
        return False

    def _reading(self, wire: Wire, key: ObjectKey, into: Sequence[memoryview]) -> ObjectRead:
        return ObjectRead(wire, into, self._frames.object_bytes, lambda header: self._frames.open(header, key))

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else None
        if buffer is None:
            buffer = memoryview(bytearray(self._frames.object_bytes))
        try:
            yield buffer
        finally:
            with self._lock:
                self._buffers.append(buffer)


def _advance_or_close(read: ObjectRead) -> bool:
    try:
        return read.advance(None)
    except (NotThere, ServerError, FrameDamaged, Lost):
        read.wire.close()
        return False


def _scatter(whole: memoryview, into: Sequence[memoryview]) -> None:
    at = 0
    for part in into:
        part[:] = whole[at : at + len(part)]
        at += len(part)
