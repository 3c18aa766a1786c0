"""The map of one replica's cache: verifies the replica's feed and applies it to the common index.

Every event is verified at a cost proportional to its changes: incarnation, sequence, and a digest kept incrementally
over the complete names. The first inconsistency raises `FeedBroken`.
"""

from collections import deque
from collections.abc import Iterator

from kvferry.gateway.decide.cache_map.block_index import BlockIndex, DispatchedBlocks
from kvferry.gateway.decide.cache_map.feed_events import CacheDelta, Digest, NameSlice, SnapshotPart, num_names, slices
from kvferry.gateway.decide.cache_map.map_states import MAP_MACHINE, MapEvent, MapState

SLICE_NAMES = 512
"""Number of names that are applied at once, in about 0.5 ms."""
_MAX_REPEATED = 1000
"""Repeated names after which a feed counts as malformed; collisions of truncated names are much rarer."""
_NUM_DIGESTS = 256
_NUM_SAMPLES = 64
MAX_TOUCHED = 1 << 16
"""Number of changed keys after which an audit in progress is cancelled."""


class FeedBroken(Exception):
    """The feed is inconsistent; the map of its replica is lost."""

    def __init__(self, event: MapEvent, why: str) -> None:
        """
        Args:
            event: why the map is no longer exact.
            why: the reason in words.
        """
        super().__init__(why)
        self.event = event


class ReplicaMap:
    """State of one replica's map. Changed only by `CacheMap`."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.state: MapState = MAP_MACHINE.initial
        self.why = "not subscribed yet"
        """Reason for the last loss, as text; empty if the map is exact."""
        self.bit = 0
        """The replica's slot in the index; 0 if it has none."""
        self.incarnation = ""
        self.check_name = b""
        self.sequence = -1
        self.count = 0
        self.xor = 0
        self.num_indexed = 0
        """Number of blocks in the index; differs from `count` only while a change is being applied."""
        self.num_repeated = 0
        self.dispatched = DispatchedBlocks()
        self.samples: deque[bytes] = deque(maxlen=_NUM_SAMPLES)
        """Names of blocks that were predicted to be cached; an audit verifies them with the worker."""
        self.digests: deque[tuple[int, Digest]] = deque(maxlen=_NUM_DIGESTS)
        """Digests after the most recent events, by sequence."""
        self.touched: set[int] | None = None
        """Keys that changed since the beginning of the audit in progress; `None` if there is no audit."""

    def on(self, event: MapEvent) -> None:
        """Apply `event` to the state.

        Raises:
            InvariantBroken: `event` is illegal in the current state.
        """
        self.state = MAP_MACHINE.next(self.state, event)
        if self.state is MapState.EXACT:
            self._index.exact |= self.bit
        else:
            self._index.exact &= ~self.bit

    def begin(self, bit: int, check_name: bytes) -> None:
        """Start with an empty map in a new slot.

        Args:
            bit: bit of the slot in the index.
            check_name: name of the fixed block (`core.hashing.check_name`) that the feed must report.
        """
        self.bit, self.sequence, self.count, self.xor = bit, -1, 0, 0
        self.check_name = check_name
        self.num_indexed = self.num_repeated = 0
        self.digests.clear()
        self.touched = None
        self.why = "the snapshot is not complete"

    def meet(self, incarnation: str) -> bool:
        """Record the incarnation of the worker; return whether it is the same as before. A new incarnation has an empty
        cache, so blocks dispatched to its predecessor are dropped."""
        if incarnation == self.incarnation:
            return True
        was_known = bool(self.incarnation)
        self.incarnation = incarnation
        if was_known:
            self.dispatched.clear()
            self.samples.clear()
        return not was_known

    def snapshot(self, part: SnapshotPart) -> Iterator[None]:
        """Apply a part of a snapshot, one slice per iteration.

        Raises:
            FeedBroken: the part is inconsistent.
        """
        if self.state is not MapState.CATCHING_UP or self.digests:
            raise FeedBroken(MapEvent.MALFORMED, "the worker sent a second snapshot in one subscription")
        if self.sequence < 0:
            if self.check_name and part.check_name and self.check_name != part.check_name:
                raise FeedBroken(
                    MapEvent.OTHER_NAMES,
                    "the worker's block names differ from the gateway's; set the same --tenant-key-file for both",
                )
            self.meet(part.incarnation)
            self.sequence = part.sequence
        elif part.incarnation != self.incarnation:
            raise FeedBroken(MapEvent.OTHER_INCARNATION, "the worker restarted during its snapshot")
        elif part.sequence != self.sequence:
            raise FeedBroken(
                MapEvent.GAP,
                f"the parts of a snapshot have the sequence numbers {self.sequence} and {part.sequence}; all must be "
                "equal",
            )
        num_blocks = self.count + num_names(part.names)
        if num_blocks > part.digest.count:
            raise FeedBroken(
                MapEvent.MALFORMED,
                f"a snapshot has at least {num_blocks} blocks, but its digest is of {part.digest.count}",
            )
        for some in slices(part.names, SLICE_NAMES):
            self.on(MapEvent.PART)
            self._store(some)
            yield
        if part.is_last:
            self._applied(part.sequence, part.digest)

    def delta(self, delta: CacheDelta) -> Iterator[None]:
        """Apply the changes of a step, one slice per iteration.

        Raises:
            FeedBroken: the changes are inconsistent with the map.
        """
        if delta.incarnation != self.incarnation:
            raise FeedBroken(MapEvent.OTHER_INCARNATION, "the worker restarted")
        if self.state is not MapState.EXACT or delta.sequence != self.sequence + 1:
            why = f"event {delta.sequence} follows event {self.sequence}"
            raise FeedBroken(MapEvent.GAP, why if self.state is MapState.EXACT else f"{why} within a snapshot")
        self.sequence = delta.sequence
        if num_names(delta.removed) + num_names(delta.stored) <= SLICE_NAMES:
            if delta.removed:
                self._remove(delta.removed)
            if delta.stored:
                self._store(delta.stored)
        else:
            for some in slices(delta.removed, SLICE_NAMES):
                self.on(MapEvent.PART)
                self._remove(some)
                yield
            for some in slices(delta.stored, SLICE_NAMES):
                self.on(MapEvent.PART)
                self._store(some)
                yield
        self._applied(delta.sequence, delta.digest)

    def _applied(self, sequence: int, digest: Digest) -> None:
        if self.count != digest.count or self.xor != digest.xor:
            what = f"{self.count} blocks, not {digest.count}" if self.count != digest.count else "other blocks"
            raise FeedBroken(MapEvent.MISMATCH, f"after event {sequence} the map has {what}")
        self.digests.append((sequence, digest))
        self.on(MapEvent.APPLIED)
        self.why = ""

    def _store(self, some: bytes) -> None:
        names = self._read(some)
        self.num_repeated += self._index.add(names.keys, self.bit)
        self.num_indexed += len(names.keys)
        if self.num_repeated > _MAX_REPEATED:
            raise FeedBroken(
                MapEvent.MALFORMED,
                f"the worker reported {self.num_repeated} blocks as stored that were in the map already; at most "
                f"{_MAX_REPEATED} are accepted",
            )
        self.count += len(names.keys)
        self.dispatched.confirm(names.keys)

    def _remove(self, some: bytes) -> None:
        names = self._read(some)
        unknown = self._index.remove(names.keys, self.bit)
        self.num_indexed -= len(names.keys) - unknown
        if unknown:
            raise FeedBroken(
                MapEvent.MALFORMED, f"the worker reported {unknown} blocks as removed that were not in the map"
            )
        self.count -= len(names.keys)
        self.dispatched.forget(names.keys)

    def _read(self, some: bytes) -> NameSlice:
        try:
            names = NameSlice.read(some)
        except ValueError as error:
            raise FeedBroken(MapEvent.MALFORMED, str(error)) from error
        self.xor ^= names.xor
        if self.touched is not None:
            self.touched.update(names.keys)
            if len(self.touched) > MAX_TOUCHED:
                self.touched = None
        return names
