"""Hedged GET of an object from a Redis server: if the reply is late, a hedged request is sent on an idle connection.

    first   GET ──────────────── ... ────► the caller's buffers
    hedge             GET ───────────────► a spare buffer, copied to the caller's buffers if it completes first
                      └ after the 95th percentile of recent loads, if a connection is idle and the budget allows

One thread reads both replies, so the caller's buffers are never written after `get` returns.
"""

import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvferry.core.clock import Clock
from kvferry.kv.tiers.interface.frame import FrameDamaged, Frames
from kvferry.kv.tiers.interface.tier import ObjectKey
from kvferry.kv.tiers.redis.object_reader import KeyMissing, ObjectRead
from kvferry.kv.tiers.redis.redis_client import ConnectionLost, ServerError, Wire, command
from kvferry.kv.tiers.redis.server_link import Link


class Getter:
    """Reader of a tier's objects that hedges late requests. Thread-safe."""

    def __init__(self, frames: Frames, clock: Clock, *, hedge: bool) -> None:
        self._frames = frames
        self._clock = clock
        self._hedge = hedge
        self._buffers: list[memoryview] = []
        """Spare buffers, at most one per concurrent hedged request."""
        self._lock = threading.Lock()  # guards _buffers

    def get(
        self, link: Link, wire: Wire, key: ObjectKey, stored: bytes, into: Sequence[memoryview], deadline: float
    ) -> None:
        """Read an object into byte buffers.

        Args:
            link: connections to the server, which supply a second one for a hedged request.
            wire: connection for the first request.
            key: key of the object.
            stored: the Redis key.
            into: target buffers of the pages.
            deadline: monotonic time in seconds.

        Raises:
            KeyMissing, ServerError, FrameDamaged, ConnectionLost: see `ObjectRead.advance`.
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
        """Read both replies until one is complete; return whether it was the reply to the hedged request. The
        connection of the unfinished reply is closed. If the hedged request fails, reading the first reply continues.
        """
        with self._buffer() as buffer:
            second = self._reading(spare, key, [buffer])
            watcher = select.poll()
            watcher.register(first.wire.fileno(), select.POLLIN)
            watcher.register(spare.fileno(), select.POLLIN)
            try:
                with suppress(ConnectionLost):
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
    except (KeyMissing, ServerError, FrameDamaged, ConnectionLost):
        read.wire.close()
        return False


def _scatter(whole: memoryview, into: Sequence[memoryview]) -> None:
    at = 0
    for part in into:
        part[:] = whole[at : at + len(part)]
        at += len(part)
