"""The map of the caches of all replicas, and predictions from it.

A prediction is a hint: a wrong one costs time, never correctness, since the worker compares the tokens of each block.
Parents and depths of blocks are not stored: a name is a hash of its whole prefix (`core.hashing`), so that looking
up a prompt's names in order gives the longest cached prefix.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.clock import Clock
from kvferry.gateway.decide.cache_map.audit import Audit, AuditAnswer, AuditOutcome, begin_audit, compare
from kvferry.gateway.decide.cache_map.block_index import BlockIndex
from kvferry.gateway.decide.cache_map.feed_events import CacheDelta, SnapshotPart, keys_of, num_names
from kvferry.gateway.decide.cache_map.map_states import LOSSES, MapEvent, MapState
from kvferry.gateway.decide.cache_map.replica_map import FeedBroken, ReplicaMap

PENDING_SECONDS = 10.0
"""Time in seconds for which a dispatched block counts as present on a replica with an exact map; longer than most
prompts wait and are computed."""
HISTORY_SECONDS = 300.0
"""Time in seconds for which a dispatched block counts as present on a replica whose cache is unknown."""
_MAX_DISPATCHED = 1 << 19
_MIN_DISPATCHED = 1024


class Basis(StrEnum):
    """Source of a prediction."""

    EXACT = "exact"
    """Reported by the worker."""
    PENDING = "pending"
    """Includes blocks that this gateway dispatched to the worker and the worker has not reported yet."""
    HISTORY = "history"
    """Dispatched to the worker by this gateway; the cache itself is unknown."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The leading blocks of a prompt that a replica is predicted to have."""

    state: MapState
    basis: Basis
    num_blocks: int = 0
    num_confirmed: int = 0
    """Number of leading blocks that the worker has reported."""


@dataclass(slots=True)
class MapCounts:
    """Totals of one map, for metrics."""

    snapshot_blocks: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0


class CacheMap:
    """The caches of a fleet's replicas, which are identified by their addresses. Not thread-safe."""

    def __init__(self, clock: Clock, max_blocks: int = 1 << 22) -> None:
        """
        Args:
            clock: clock of dispatched blocks.
            max_blocks: maximum number of blocks, counted once for each replica. When it is exceeded, the replica with
                the most blocks becomes `BLIND`. A block takes 60 to 110 bytes.
        """
        self._clock = clock
        self._max_blocks = max_blocks
        self._index = BlockIndex()
        self._replicas: dict[str, ReplicaMap] = {}
        self._by_bit: dict[int, str] = {}
        self.counts = MapCounts()
        self.losses: dict[MapEvent, int] = dict.fromkeys(LOSSES, 0)
        """Number of maps lost, by reason."""

    # ------------------------------------------------------------------ members

    def join(self, address: str) -> None:
        """Add a replica, in state `BLIND`; do nothing if it is known."""
        if address not in self._replicas:
            self._replicas[address] = ReplicaMap(self._index)

    def leave(self, address: str) -> None:
        """Remove a replica and all its blocks; do nothing if it is unknown."""
        replica = self._replicas.pop(address, None)
        if replica is not None:
            self._drop(replica)
            replica.on(MapEvent.LEFT)

    def met(self, address: str, incarnation: str) -> None:
        """Note the incarnation in a worker's status. If it is new, the replica's map and history are dropped.

        Args:
            address: address of the worker.
            incarnation: the incarnation that the worker reports.
        """
        replica = self._replicas.get(address)
        if replica is not None and not replica.meet(incarnation):
            self.lost(address, MapEvent.OTHER_INCARNATION, "the worker restarted")

    def lost(self, address: str, event: MapEvent, why: str) -> None:
        """Drop the replica's map; do nothing if it is unknown or has no map.

        Args:
            address: address of the worker.
            event: why the map is no longer exact.
            why: the reason in words, for reports.
        """
        replica = self._replicas.get(address)
        if replica is None or replica.state is MapState.BLIND:
            return
        self._drop(replica)
        replica.on(event)
        replica.why = why
        self.losses[event] += 1

    def _drop(self, replica: ReplicaMap) -> None:
        if replica.bit:
            self._index.drop_slot(replica.bit, replica.num_indexed)
            del self._by_bit[replica.bit]
        replica.bit = replica.num_indexed = 0
        replica.touched = None

    # ------------------------------------------------------------------ the feed

    def subscribed(self, address: str, check_name: bytes = b"") -> None:
        """Note that a subscription begins; its first event must be a snapshot.

        Args:
            address: address of the worker.
            check_name: the gateway's name for the block whose name the worker sends; empty if it is unknown.

        Raises:
            FeedBroken: there is no room for another map; try again later.
        """
        replica = self._replicas[address]
        self.lost(address, MapEvent.FEED_LOST, "subscribed again")
        bit = self._index.take_slot() if self._index.num_blocks + self._index.num_dead < 2 * self._max_blocks else None
        if bit is None:
            replica.why = "the map is full; a dropped map is still being removed"
            raise FeedBroken(MapEvent.FULL, replica.why)
        replica.begin(bit, check_name)
        self._by_bit[bit] = address
        replica.on(MapEvent.SUBSCRIBED)

    def apply(self, address: str, event: SnapshotPart | CacheDelta) -> Iterator[None]:
        """Apply an event of a replica's feed, one slice of at most `SLICE_NAMES` names per iteration. The iterator must
        be exhausted before the replica's next event.

        Args:
            address: address of the worker.
            event: the next event of its feed.

        Raises:
            FeedBroken: the event is inconsistent; the replica's map was dropped.
        """
        replica = self._replicas.get(address)
        if replica is None or replica.state is MapState.BLIND:
            raise FeedBroken(MapEvent.FEED_LOST, "the map was dropped" if replica is None else replica.why)
        bit = replica.bit
        try:
            self._check_room(replica, event)
            steps = replica.snapshot(event) if isinstance(event, SnapshotPart) else replica.delta(event)
            for _ in steps:
                yield
                if replica.bit != bit:  # the map was dropped while the caller handled other work
                    raise FeedBroken(MapEvent.FEED_LOST, replica.why)
        except FeedBroken as broken:
            if replica.bit == bit:
                self.lost(address, broken.event, str(broken))
            raise
        if isinstance(event, SnapshotPart):
            self.counts.snapshot_blocks += num_names(event.names)
        else:
            self.counts.stored_blocks += num_names(event.stored)
            self.counts.removed_blocks += num_names(event.removed)

    def _check_room(self, replica: ReplicaMap, event: SnapshotPart | CacheDelta) -> None:
        num_added = num_names(event.names if isinstance(event, SnapshotPart) else event.stored)
        if event.digest.count > self._max_blocks:
            raise FeedBroken(
                MapEvent.FULL, f"the worker has {event.digest.count} blocks; the limit is {self._max_blocks}"
            )
        num_blocks = self._index.num_blocks + num_added
        if num_blocks > self._max_blocks:
            largest = max(self._replicas, key=lambda address: self._replicas[address].num_indexed)
            why = f"the limit of {self._max_blocks} blocks was reached, and this replica has the most blocks"
            own = max(event.digest.count, replica.num_indexed + num_added)
            if own >= self._replicas[largest].num_indexed:
                raise FeedBroken(MapEvent.FULL, why)
            self.lost(largest, MapEvent.FULL, why)
        if num_blocks + self._index.num_dead > 2 * self._max_blocks:
            raise FeedBroken(MapEvent.FULL, "dropped maps are still being removed")

    def sweep(self) -> Iterator[None]:
        """Remove the blocks of dropped maps, in up to 1,024 short steps."""
        return self._index.sweep()

    @property
    def needs_sweep(self) -> bool:
        """Whether dropped maps have not been removed yet."""
        return self._index.has_dead

    # ------------------------------------------------------------------ audits

    def begin_audit(self, address: str) -> Audit | None:
        """Begin an audit of a replica; `None` if its map is not exact."""
        replica = self._replicas.get(address)
        return None if replica is None else begin_audit(replica, self._index)

    def end_audit(self, address: str, audit: Audit, answer: AuditAnswer) -> AuditOutcome:
        """Compare a worker's answer with the map; after a mismatch the map is dropped. After `WAIT`, call again when
        more events have been applied.

        Args:
            address: address of the worker.
            audit: the audit, begun earlier.
            answer: the worker's answer.
        """
        replica = self._replicas.get(address)
        if replica is None:
            return AuditOutcome.SKIPPED
        outcome, why = compare(audit, answer, replica, self._index)
        if outcome is AuditOutcome.MISMATCH:
            self.lost(address, MapEvent.AUDIT_FAILED, f"audit: {why}")
        elif outcome is not AuditOutcome.WAIT:
            replica.touched = None
        return outcome

    # ------------------------------------------------------------------ predictions

    def look_up(self, names: Sequence[bytes]) -> "Lookup":
        """Look up the leading blocks of a prompt on all replicas.

        Args:
            names: names of the prompt's blocks, from the first on.
        """
        return Lookup(self, keys_of(names), names)

    def state(self, address: str) -> MapState:
        """Return the state of a replica's map; `BLIND` if the replica is unknown."""
        replica = self._replicas.get(address)
        return MapState.BLIND if replica is None else replica.state

    @property
    def replicas(self) -> Mapping[str, ReplicaMap]:
        """All replicas by address, for reports."""
        return self._replicas

    @property
    def index(self) -> BlockIndex:
        """The index, for reports."""
        return self._index


class Lookup:
    """The prediction of a prompt's cached prefix on each replica."""

    __slots__ = ("_found", "_keys", "_map", "_names", "_now")

    def __init__(self, cache_map: CacheMap, keys: list[int], names: Sequence[bytes]) -> None:
        """
        Args:
            cache_map: the map.
            keys: leading bits of the names, in order.
            names: names of the prompt's full blocks, in order.
        """
        self._map, self._keys, self._names = cache_map, keys, names
        self._now = cache_map._clock.monotonic()
        index = cache_map._index
        self._found = index.prefix_blocks(keys, index.exact)

    def of(self, address: str) -> Prediction:
        """Return the prediction for a replica."""
        replica = self._map._replicas.get(address)
        if replica is None:
            return Prediction(MapState.BLIND, Basis.HISTORY)
        keys, dispatched = self._keys, replica.dispatched
        if replica.state is MapState.EXACT:
            confirmed = depth = self._found.get(replica.bit, 0)
            since, index, bit = self._now - PENDING_SECONDS, self._map._index, replica.bit
            if dispatched:
                while depth < len(keys) and (
                    dispatched.is_pending(keys[depth], since) or index.holds(keys[depth], bit)
                ):
                    depth += 1
            basis = Basis.EXACT if depth == confirmed else Basis.PENDING
            return Prediction(replica.state, basis, depth, confirmed)
        since, depth = self._now - HISTORY_SECONDS, 0
        while depth < len(keys) and dispatched.is_known(keys[depth], since):
            depth += 1
        return Prediction(replica.state, Basis.HISTORY, depth)

    def elsewhere(self, address: str) -> int:
        """Return the largest number of leading blocks that a replica with an exact map has, other than `address`."""
        replicas = self._map._replicas
        own = replicas[address].bit if address in replicas else 0
        return max((depth for bit, depth in self._found.items() if bit != own), default=0)

    def chose(self, address: str) -> None:
        """Note that the prompt is sent to a replica: its blocks count as present for a while, and the deepest block
        that the worker has reported is checked in the next audit."""
        self._map.join(address)
        replicas = self._map._replicas
        replica = replicas[address]
        num_confirmed = self._found.get(replica.bit, 0)
        limit = max(_MIN_DISPATCHED, _MAX_DISPATCHED // len(replicas))
        replica.dispatched.add(self._keys, self._now, limit, num_confirmed)
        if num_confirmed:
            replica.samples.append(bytes(self._names[num_confirmed - 1]))
