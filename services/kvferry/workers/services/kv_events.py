"""`KvEvents` service: streams a snapshot and deltas of this worker's prefix cache to subscribers.

The feed has a copy of the cache's block names, updated after each engine step, so that a snapshot does not access the
engine. Each subscriber has a bounded queue of deltas; a subscriber that falls behind is disconnected.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.engine.blocks.prefix_index import CacheChange, CachedBlock
from kvferry.v1 import kv_events_pb2, kv_events_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_SUBSCRIBERS = 256
_MAX_WAITING_EVENTS = 1024
_SNAPSHOT_PART = 10_000
_NAME_BYTES = 32


class CacheFeed:
    """Copy of the prefix cache's block names for subscribers. Used only on the event loop's thread."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._blocks: dict[BlockHash, CachedBlock] = {}
        self._xor = 0
        self._sequence = 0
        self._lines: set[asyncio.Queue[kv_events_pb2.KvEvent | None]] = set()

    def apply(self, changes: list[CacheChange]) -> None:
        """Apply the changes of a step and send them to every subscriber as one delta."""
        removed: dict[BlockHash, None] = {}
        stored: dict[BlockHash, CachedBlock] = {}
        for change in changes:
            self._xor ^= int.from_bytes(change.name, "big")
            if change.stored is None:
                del self._blocks[change.name]
                if stored.pop(change.name, None) is None:
                    removed[change.name] = None
            else:
                self._blocks[change.name] = stored[change.name] = change.stored
        self._sequence += 1
        event = self._event()
        event.delta.removed.extend(removed)
        event.delta.stored.extend(map(_to_wire, stored.values()))
        for line in list(self._lines):
            if line.qsize() >= _MAX_WAITING_EVENTS:
                self._lines.discard(line)
                line.put_nowait(None)
            else:
                line.put_nowait(event)

    @contextmanager
    def subscription(self) -> Iterator["asyncio.Queue[kv_events_pb2.KvEvent | None]"]:
        """Yield a queue of events that begins with a snapshot; `None` in the queue ends the subscription.

        Raises:
            Overloaded: the feed already has `MAX_SUBSCRIBERS` subscribers.
        """
        if len(self._lines) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"there are {MAX_SUBSCRIBERS} subscribers already; retry later", retry_after_seconds=1.0)
        line: asyncio.Queue[kv_events_pb2.KvEvent | None] = asyncio.Queue()
        for part in self._snapshot():
            line.put_nowait(part)
        self._lines.add(line)
        try:
            yield line
        finally:
            self._lines.discard(line)

    def close(self) -> None:
        """End all subscriptions, before the worker shuts down."""
        for line in self._lines:
            line.put_nowait(None)
        self._lines.clear()

    def _snapshot(self) -> Iterator[kv_events_pb2.KvEvent]:
        blocks = list(self._blocks.values())
        for start in range(0, max(1, len(blocks)), _SNAPSHOT_PART):
            event = self._event()
            event.snapshot.blocks.extend(map(_to_wire, blocks[start : start + _SNAPSHOT_PART]))
            event.snapshot.last = start + _SNAPSHOT_PART >= len(blocks)
            yield event

    def _event(self) -> kv_events_pb2.KvEvent:
        digest = kv_events_pb2.KvDigest(count=len(self._blocks), xor=self._xor.to_bytes(_NAME_BYTES, "big"))
        return kv_events_pb2.KvEvent(incarnation=self._incarnation, sequence=self._sequence, digest=digest)


class KvEventsService(kv_events_pb2_grpc.KvEventsServicer):
    """Implements `KvEvents` for one engine's prefix cache."""

    def __init__(self, feed: CacheFeed) -> None:
        self._feed = feed

    async def Subscribe(
        self, request: kv_events_pb2.SubscribeRequest, context: Context
    ) -> AsyncIterator[kv_events_pb2.KvEvent]:
        with self._feed.subscription() as line:
            while (event := await line.get()) is not None:
                yield event
        raise Unavailable("the event stream ended; resubscribe for a new snapshot", reason="RESUBSCRIBE")


def _to_wire(block: CachedBlock) -> kv_events_pb2.CachedBlock:
    return kv_events_pb2.CachedBlock(name=block.name, parent=block.parent or b"", depth=block.depth)
