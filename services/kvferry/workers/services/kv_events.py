"""`KvEvents` service: streams a snapshot and deltas of this worker's prefix cache to subscribers.

The feed has a copy of the cache's block names, updated after each engine step, so that a snapshot does not access the
engine. Each subscriber has a bounded queue of deltas; a subscriber that falls behind is disconnected. The parts of a
snapshot are built when they are sent, so that a large cache does not block the event loop.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from kvferry.core.errors import InvalidRequest, Overloaded, Unavailable
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.engine.schedule.blocks.prefix_index import CacheChange, CachedBlock
from kvferry.v1 import kv_events_pb2, kv_events_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_SUBSCRIBERS = 256
MAX_PROBED_NAMES = 256
_MAX_WAITING_EVENTS = 1024
_SNAPSHOT_PART = 2000
_NAME_BYTES = 32
_NO_PARENT = bytes(_NAME_BYTES)
"""Parent of a prompt's first block on the wire."""
_SAMPLED_BLOCKS = 100_000
"""Number of oldest blocks from which samples are drawn, since a dictionary has no random access."""


class FeedLine:
    """The events of one subscriber: the parts of a snapshot, built on demand, then the queued deltas."""

    def __init__(self, head: kv_events_pb2.KvEvent, blocks: Sequence[CachedBlock]) -> None:
        """
        Args:
            head: event with the incarnation, sequence number and digest, which every part of the snapshot repeats.
            blocks: the snapshot: all cached blocks.
        """
        self._head = head
        self._blocks = blocks
        self._num_parts = max(1, -(-len(blocks) // _SNAPSHOT_PART))
        self._next_part = 0
        self._queue: asyncio.Queue[kv_events_pb2.KvEvent | None] = asyncio.Queue()

    def put_nowait(self, event: kv_events_pb2.KvEvent | None) -> None:
        """Queue a delta; `None` ends the subscription."""
        self._queue.put_nowait(event)

    def get_nowait(self) -> kv_events_pb2.KvEvent | None:
        """Return the next event.

        Raises:
            asyncio.QueueEmpty: there is no event yet.
        """
        return self._part() if self._next_part < self._num_parts else self._queue.get_nowait()

    async def get(self) -> kv_events_pb2.KvEvent | None:
        """Wait for the next event and return it; `None` at the end of the subscription."""
        return self._part() if self._next_part < self._num_parts else await self._queue.get()

    def qsize(self) -> int:
        """Return the number of events that can be read without waiting."""
        return self._num_parts - self._next_part + self._queue.qsize()

    def empty(self) -> bool:
        """Return whether no event can be read without waiting."""
        return self.qsize() == 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting events, where an unfinished snapshot counts as one event."""
        return min(1, self._num_parts - self._next_part) + self._queue.qsize()

    def _part(self) -> kv_events_pb2.KvEvent:
        start = self._next_part * _SNAPSHOT_PART
        self._next_part += 1
        event = kv_events_pb2.KvEvent()
        event.CopyFrom(self._head)
        event.snapshot.blocks.CopyFrom(_to_wire(self._blocks[start : start + _SNAPSHOT_PART]))
        event.snapshot.last = self._next_part == self._num_parts
        if event.snapshot.last:
            self._blocks = ()
        return event


class CacheFeed:
    """Copy of the prefix cache's block names for subscribers. Used only on the event loop's thread."""

    def __init__(self, incarnation: Incarnation, check_name: bytes = b"") -> None:
        """
        Args:
            incarnation: incarnation of the worker.
            check_name: name of a known block under the worker's tenant key, sent with snapshots; see
                `core.hashing.check_name`.
        """
        self._incarnation = incarnation
        self._check_name = check_name
        self._blocks: dict[BlockHash, CachedBlock] = {}
        self._xor = 0
        self._sequence = 0
        self._lines: set[FeedLine] = set()

    def rename(self, check_name: bytes) -> None:
        """Send another check name with snapshots from now on, because the model's weights, and so all names, have
        changed."""
        self._check_name = check_name

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
        event.delta.removed = b"".join(removed)
        event.delta.stored.CopyFrom(_to_wire(stored.values()))
        for line in list(self._lines):
            if line.num_waiting >= _MAX_WAITING_EVENTS:
                self._lines.discard(line)
                line.put_nowait(None)
            else:
                line.put_nowait(event)

    @contextmanager
    def subscription(self) -> Iterator[FeedLine]:
        """Yield a queue of events that begins with a snapshot; `None` in the queue ends the subscription.

        Raises:
            Overloaded: the feed already has `MAX_SUBSCRIBERS` subscribers.
        """
        if len(self._lines) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"there are already {MAX_SUBSCRIBERS} subscribers; retry later", retry_after_seconds=1.0)
        head = self._event()
        head.snapshot.check_name = self._check_name
        line = FeedLine(head, list(self._blocks.values()))
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

    def probe(self, names: Sequence[bytes], num_samples: int) -> kv_events_pb2.ProbeResponse:
        """Return the state of the cache, which of `names` it has, and a sample of its blocks.

        Args:
            names: names that the map of a gateway has.
            num_samples: maximum number of blocks in the sample.
        """
        event = self._event()
        first = random.randrange(max(1, min(len(self._blocks), _SAMPLED_BLOCKS) - num_samples + 1))  # noqa: S311
        return kv_events_pb2.ProbeResponse(
            incarnation=event.incarnation,
            sequence=event.sequence,
            digest=event.digest,
            held=[name in self._blocks for name in names],
            samples=itertools.islice(self._blocks, first, first + num_samples),
        )

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

    async def Probe(self, request: kv_events_pb2.ProbeRequest, context: Context) -> kv_events_pb2.ProbeResponse:
        if len(request.names) > MAX_PROBED_NAMES:
            raise InvalidRequest(
                f"names has {len(request.names)} items; at most {MAX_PROBED_NAMES} are accepted", field="names"
            )
        if request.num_samples > MAX_PROBED_NAMES:
            raise InvalidRequest(
                f"num_samples must be at most {MAX_PROBED_NAMES}, not {request.num_samples}", field="num_samples"
            )
        return self._feed.probe(request.names, request.num_samples)


def _to_wire(blocks: Collection[CachedBlock]) -> kv_events_pb2.CachedBlocks:
    return kv_events_pb2.CachedBlocks(
        names=b"".join([block.name for block in blocks]),
        parents=b"".join([block.parent or _NO_PARENT for block in blocks]),
        depths=[block.depth for block in blocks],
    )
