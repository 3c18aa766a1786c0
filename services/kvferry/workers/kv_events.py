"""The `KvEvents` service: what this worker's prefix cache holds, exactly.

The feed keeps its own copy of the cache's names, fed by the engine step by step, so a snapshot costs the engine
nothing. Each subscriber has a bounded line of deltas; whoever falls behind it is cut off and begins anew.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.engine.prefix_index import CacheChange, CachedBlock
from kvferry.v1 import kv_events_pb2, kv_events_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_SUBSCRIBERS = 256
_MAX_WAITING_EVENTS = 1024
_SNAPSHOT_PART = 10_000
_NAME_BYTES = 32


class CacheFeed:
    """The cache as its subscribers should see it. Used on the event loop's thread only."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._blocks: dict[BlockHash, CachedBlock] = {}
        self._xor = 0
        self._sequence = 0
        self._lines: set[asyncio.Queue[kv_events_pb2.KvEvent | None]] = set()

    def apply(self, changes: list[CacheChange]) -> None:
        """Take over what a step changed and tell every subscriber, in one delta."""
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
        """A line of events that begins with the snapshot; `None` in it means: cut off.

        Raises:
            Overloaded: there are too many subscribers.
        """
        if len(self._lines) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"{MAX_SUBSCRIBERS} subscribers are served already", retry_after_seconds=1.0)
        line: asyncio.Queue[kv_events_pb2.KvEvent | None] = asyncio.Queue()
        for part in self._snapshot():
            line.put_nowait(part)
        self._lines.add(line)
        try:
            yield line
        finally:
            self._lines.discard(line)

    def close(self) -> None:
        """Cut everybody off: the worker ends."""
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
    """One engine's cache."""

    def __init__(self, feed: CacheFeed) -> None:
        self._feed = feed

    async def Subscribe(
        self, request: kv_events_pb2.SubscribeRequest, context: Context
    ) -> AsyncIterator[kv_events_pb2.KvEvent]:
        with self._feed.subscription() as line:
            while (event := await line.get()) is not None:
                yield event
        raise Unavailable("the stream of events ends here; subscribe again for a new snapshot", reason="RESUBSCRIBE")


def _to_wire(block: CachedBlock) -> kv_events_pb2.CachedBlock:
    return kv_events_pb2.CachedBlock(name=block.name, parent=block.parent or b"", depth=block.depth)
