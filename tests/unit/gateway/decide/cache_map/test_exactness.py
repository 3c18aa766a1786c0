"""Events lost, reordered or repeated between a feed and a map: the map equals the cache, or its state is BLIND."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.clock import ManualClock
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.engine.schedule.blocks.prefix_index import CacheChange, CachedBlock
from kvferry.gateway.decide.cache_map import replica_map
from kvferry.gateway.decide.cache_map.audit import AuditOutcome
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.feed_events import NameSlice
from kvferry.gateway.decide.cache_map.map_states import MapEvent, MapState
from kvferry.gateway.decide.cache_map.replica_map import FeedBroken
from kvferry.gateway.fleet.cache_feeds.event_reader import audit_from_wire, event_from_wire
from kvferry.v1 import kv_events_pb2
from kvferry.workers.services import kv_events
from kvferry.workers.services.kv_events import CacheFeed, FeedLine

POOL = [BlockHash(random.Random(number).randbytes(32)) for number in range(40)]
KEYS = NameSlice.read(b"".join(POOL)).keys
ADDRESS = "w:1"
ACTIONS = ("step", "step", "deliver", "deliver", "drop", "repeat", "swap", "subscribe", "worker", "gateway", "audit")


class Rig:
    """A worker's feed, a gateway's map, and a connection that loses, repeats and reorders events."""

    def __init__(self) -> None:
        self.num_incarnations = 0
        self.truth: dict[tuple[str, int], frozenset[bytes]] = {}
        self.line: FeedLine | None = None
        self.waiting: list[kv_events_pb2.KvEvent] = []
        self.subscriptions = []
        self.worker()
        self.gateway()

    def worker(self) -> None:
        """Start or restart the worker; a restart breaks the stream."""
        self.num_incarnations += 1
        self.incarnation = f"i{self.num_incarnations}"
        self.feed = CacheFeed(Incarnation(self.incarnation))
        self.held: set[BlockHash] = set()
        self.sequence = 0
        self.truth[self.incarnation, 0] = frozenset()
        self.line = None  # the gateway still gets the events in flight

    def gateway(self) -> None:
        """Start or restart the gateway."""
        self.map = CacheMap(ManualClock(), max_blocks=1000)
        self.map.join(ADDRESS)
        self.subscribe()

    def subscribe(self) -> None:
        self.waiting.clear()
        subscription = self.feed.subscription()
        self.subscriptions.append(subscription)  # keeps the subscription open as long as the rig
        self.line = subscription.__enter__()
        self.map.subscribed(ADDRESS)

    def step(self, chosen: list[int]) -> None:
        """Run an engine step that changes each of the blocks from present to absent or back."""
        changes = []
        for number in chosen:
            name = POOL[number]
            if name in self.held:
                self.held.remove(name)
                changes.append(CacheChange(name, None))
            else:
                self.held.add(name)
                changes.append(CacheChange(name, CachedBlock(name, None, 0)))
        self.feed.apply(changes)
        self.sequence += 1
        self.truth[self.incarnation, self.sequence] = frozenset(self.held)

    def fetch(self) -> None:
        while self.line is not None and not self.line.empty():
            event = self.line.get_nowait()
            if event is None:
                self.line = None
                self.map.lost(ADDRESS, MapEvent.FEED_LOST, "cut off")
                self.waiting.clear()
            else:
                self.waiting.append(event)

    def deliver(self, event: kv_events_pb2.KvEvent) -> None:
        try:
            for _ in self.map.apply(ADDRESS, event_from_wire(event)):
                self.check_partial()
        except FeedBroken:
            assert self.map.state(ADDRESS) is MapState.BLIND
        self.check()

    def check_partial(self) -> None:
        assert self.map.state(ADDRESS) is not MapState.EXACT or len(self.present()) <= len(POOL)

    def present(self) -> frozenset[bytes]:
        bit = self.map.replicas[ADDRESS].bit
        return frozenset(name for name, key in zip(POOL, KEYS, strict=True) if bit and self.map.index.holds(key, bit))

    def check(self) -> None:
        replica = self.map.replicas[ADDRESS]
        if replica.state is MapState.EXACT:
            assert self.present() == self.truth[replica.incarnation, replica.sequence]
            assert replica.num_indexed == replica.count == len(self.present()) == self.map.index.num_blocks
            assert self.map.index.exact == replica.bit
            assert replica.why == ""
        else:
            assert replica.why
            assert self.map.index.exact == 0
            assert self.map.index.num_blocks == replica.num_indexed
            lookup = self.map.look_up(POOL[:1])
            assert lookup.of(ADDRESS).num_blocks == 0, "a map that is not exact predicts no hits"


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_the_map_equals_the_cache_or_is_blind(data: st.DataObject) -> None:
    rig = Rig()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "step":
            rig.step(data.draw(st.lists(st.integers(0, len(POOL) - 1), max_size=12)))
        elif action in ("subscribe", "worker", "gateway"):
            getattr(rig, action)()
            rig.check()
        elif action == "audit":
            audit = rig.map.begin_audit(ADDRESS)
            rig.fetch()
            answer = rig.feed.probe(() if audit is None else audit.names, 8)
            if audit is not None:
                while rig.waiting:
                    rig.deliver(rig.waiting.pop(0))
                outcome = rig.map.end_audit(ADDRESS, audit, audit_from_wire(answer))
                if rig.map.replicas[ADDRESS].incarnation == rig.incarnation and rig.line is not None:
                    assert outcome in (AuditOutcome.MATCH, AuditOutcome.SKIPPED, AuditOutcome.WAIT)
        else:
            rig.fetch()
            if not rig.waiting:
                continue
            if action == "drop":
                rig.waiting.pop(0)
            elif action == "repeat":
                rig.waiting.insert(0, rig.waiting[0])
            elif action == "swap":
                rig.waiting[:2] = reversed(rig.waiting[:2])
            else:
                rig.deliver(rig.waiting.pop(0))
    # The map recovers at the next subscription.
    rig.subscribe()
    rig.fetch()
    while rig.waiting:
        rig.deliver(rig.waiting.pop(0))
    assert rig.map.state(ADDRESS) is MapState.EXACT
    assert rig.present() == frozenset(rig.held)
    for _ in rig.map.sweep():
        pass
    assert rig.map.index.num_entries == len(rig.held), "the index has entries of maps that were dropped"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, len(POOL) - 1), max_size=30), max_size=6))
def test_in_small_parts_and_slices_as_well(steps: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_events, "_SNAPSHOT_PART", 3)
        patched.setattr(replica_map, "SLICE_NAMES", 2)
        rig = Rig()
        for chosen in steps[: len(steps) // 2]:
            rig.step(chosen)
        rig.subscribe()
        for chosen in steps[len(steps) // 2 :]:
            rig.step(chosen)
            rig.fetch()
            if rig.waiting:
                rig.deliver(rig.waiting.pop(0))
        rig.fetch()
        while rig.waiting:
            rig.deliver(rig.waiting.pop(0))
        assert rig.map.state(ADDRESS) is MapState.EXACT
        assert rig.present() == frozenset(rig.held)


def test_a_slow_subscriber_is_cut_off_and_its_map_is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MAX_WAITING_EVENTS", 2)
    rig = Rig()
    for number in range(4):
        rig.step([number])
    rig.fetch()
    rig.check()
    assert rig.map.state(ADDRESS) is MapState.BLIND
