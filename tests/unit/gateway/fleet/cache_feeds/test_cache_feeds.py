"""Subscriptions to real feeds over gRPC, whose events are lost, changed or delayed in transit."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from harness.fakes.scripted_fleet import fleet_config
from harness.fakes.scripted_worker import ScriptedWorker, ScriptedWorkers
from prometheus_client import CollectorRegistry

from kvferry.core.clock import SystemClock
from kvferry.core.hashing import BlockNamers, check_name
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.engine.schedule.blocks.prefix_index import CacheChange, CachedBlock
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.feed_events import NameSlice
from kvferry.gateway.decide.cache_map.map_states import MapEvent, MapState
from kvferry.gateway.decide.config import CacheMapConfig
from kvferry.gateway.decide.routing.discovery import Listing
from kvferry.gateway.fleet.cache_feeds import replica_feed
from kvferry.gateway.fleet.cache_feeds.cache_feeds import CacheFeeds
from kvferry.gateway.fleet.cache_feeds.map_metrics import CacheMapCollector
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.v1 import kv_events_pb2, kv_events_pb2_grpc
from kvferry.workers.services.kv_events import CacheFeed, KvEventsService

NAMES = [BlockHash(random.Random(number).randbytes(32)) for number in range(60)]
KEY = b"the pool's tenant key"


class Events(kv_events_pb2_grpc.KvEventsServicer):
    """A worker's feed. `mangle` replaces each event on its way by a list of events."""

    def __init__(self) -> None:
        self.restart(Incarnation("first"))
        self.mangle: Callable[[kv_events_pb2.KvEvent], list[kv_events_pb2.KvEvent]] = lambda event: [event]
        self.num_subscriptions = 0
        self.may_probe = True

    def restart(self, incarnation: Incarnation) -> None:
        self.feed = CacheFeed(incarnation, check_name(BlockNamers(KEY), fingerprint=b"layout", block_tokens=16))
        self.service = KvEventsService(self.feed)

    async def Subscribe(self, request: Any, context: Any) -> AsyncGenerator[kv_events_pb2.KvEvent, None]:
        self.num_subscriptions += 1
        async for event in self.service.Subscribe(request, context):
            for sent in self.mangle(event):
                yield sent

    async def Probe(self, request: Any, context: Any) -> kv_events_pb2.ProbeResponse:
        if not self.may_probe:
            await asyncio.Event().wait()
        return await self.service.Probe(request, context)

    def store(self, *numbers: int) -> None:
        self.feed.apply([CacheChange(NAMES[n], CachedBlock(NAMES[n], None, 0)) for n in numbers])


class Rig:
    """A fleet of one worker with a feed, and a gateway's map of it."""

    def __init__(self, workers: ScriptedWorkers, events: list[Events], fleet: Fleet, feeds: CacheFeeds) -> None:
        self.workers, self.fleet, self.feeds = workers, fleet, feeds
        self.worker: ScriptedWorker = workers.both[0]
        self.events = events[0]
        self.map = feeds._map

    @property
    def state(self) -> MapState:
        return self.map.state(self.worker.address)

    @property
    def num_blocks(self) -> int:
        return self.map.look_up(NAMES).of(self.worker.address).num_confirmed

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            await self.fleet.wait_until(lambda _: holds())

    async def exact(self, num_blocks: int) -> None:
        await self.until(lambda: self.state is MapState.EXACT and self.num_blocks == num_blocks)


@asynccontextmanager
async def a_rig(
    *, audit_seconds: float = 1000.0, max_blocks: int = 1000, key: bytes = KEY, num_workers: int = 1
) -> AsyncIterator[Rig]:
    workers = ScriptedWorkers(both=num_workers)
    events = [Events() for _ in workers.both]
    for worker, own in zip(workers.both, events, strict=True):
        worker.events = own
    async with workers:
        clock = SystemClock()
        fleet = Fleet(fleet_config(workers), workers.both[0].model, clock=SystemClock())
        cache_map = CacheMap(clock, max_blocks)
        config = CacheMapConfig(max_blocks=max_blocks, audit_seconds=audit_seconds, poll_seconds=0.01)
        feeds = CacheFeeds(fleet, cache_map, config, clock, key)
        fleet.start()
        before = asyncio.all_tasks()
        running = asyncio.create_task(feeds.run())
        try:
            yield Rig(workers, events, fleet, feeds)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            names = {task.get_name() for task in asyncio.all_tasks() - before}
            assert not any("cache" in name or "audit" in name for name in names), "no task is left"
            await fleet.stop()
        await workers.idle()


async def test_a_map_follows_its_worker():
    async with a_rig() as rig:
        rig.events.store(0, 1, 2)
        await rig.exact(3)
        rig.events.store(3)
        await rig.exact(4)
        rig.events.feed.apply([CacheChange(NAMES[1], None)])
        await rig.exact(1)
        assert rig.events.num_subscriptions == 1


async def test_a_subscriber_that_was_cut_off_subscribes_again():
    async with a_rig() as rig:
        await rig.exact(0)
        rig.events.store(0)
        rig.events.feed.close()
        await rig.until(lambda: rig.events.num_subscriptions == 2)
        rig.events.store(1)
        await rig.exact(2)
        assert rig.map.losses[MapEvent.FEED_LOST] == 1


def _flip_xor(event: kv_events_pb2.KvEvent) -> list[kv_events_pb2.KvEvent]:
    changed = kv_events_pb2.KvEvent()
    changed.CopyFrom(event)
    changed.digest.xor = bytes(32)
    return [changed]


def _last_sequence(event: kv_events_pb2.KvEvent) -> list[kv_events_pb2.KvEvent]:
    changed = kv_events_pb2.KvEvent()
    changed.CopyFrom(event)
    changed.sequence = (1 << 64) - 1
    return [changed]


def _unknown_removal(event: kv_events_pb2.KvEvent) -> list[kv_events_pb2.KvEvent]:
    changed = kv_events_pb2.KvEvent()
    changed.CopyFrom(event)
    changed.delta.removed += b"u" * 32
    return [changed]


def _short_name(event: kv_events_pb2.KvEvent) -> list[kv_events_pb2.KvEvent]:
    changed = kv_events_pb2.KvEvent()
    changed.CopyFrom(event)
    changed.delta.stored.names += b"short"
    return [changed]


def _other_incarnation(event: kv_events_pb2.KvEvent) -> list[kv_events_pb2.KvEvent]:
    changed = kv_events_pb2.KvEvent()
    changed.CopyFrom(event)
    changed.incarnation = "x" * 100_000
    return [changed]


@pytest.mark.parametrize(
    ("mangle", "loss"),
    [
        (lambda event: [], MapEvent.GAP),
        (lambda event: [event, event], MapEvent.GAP),
        (_last_sequence, MapEvent.GAP),
        (_flip_xor, MapEvent.MISMATCH),
        (_unknown_removal, MapEvent.MALFORMED),
        (_short_name, MapEvent.MALFORMED),
        (_other_incarnation, MapEvent.OTHER_INCARNATION),
    ],
    ids=["lost", "repeated", "sequence", "digest", "unknown", "short", "incarnation"],
)
async def test_an_inconsistent_event_blinds_the_map_until_the_next_snapshot(monkeypatch, mangle, loss):
    monkeypatch.setattr(replica_feed, "_PERSISTENT", frozenset())  # skip the wait of 30 s
    async with a_rig() as rig:
        rig.events.store(0)
        await rig.exact(1)
        rig.events.mangle = mangle
        rig.events.store(1)
        rig.events.mangle = lambda event: mangle(event) if event.sequence == 2 else [event]
        rig.events.store(2)
        await rig.until(lambda: rig.map.losses[loss] >= 1)
        rig.events.mangle = lambda event: [event]
        await rig.exact(3)


async def test_a_worker_with_wrong_digests_stays_blind_and_subscriptions_are_rare():
    async with a_rig() as rig:
        rig.events.store(0)
        rig.events.mangle = _flip_xor
        await rig.until(lambda: rig.map.losses[MapEvent.MISMATCH] >= 2)
        assert rig.state is not MapState.EXACT
        lookup = rig.map.look_up(NAMES[:2])
        lookup.chose(rig.worker.address)
        assert rig.map.look_up(NAMES[:2]).of(rig.worker.address).num_blocks == 2, (
            "without a map, the history of dispatched requests is used"
        )


async def test_a_restarted_worker_has_an_empty_map():
    async with a_rig() as rig:
        rig.events.store(0, 1)
        await rig.exact(2)
        rig.map.look_up(NAMES[:2]).chose(rig.worker.address)
        await rig.worker.stop()
        await rig.until(lambda: rig.state is MapState.BLIND)
        rig.events.restart(Incarnation("second"))
        await rig.worker.start()
        rig.events.store(5)
        await rig.exact(0)
        assert rig.map.look_up(NAMES[:2]).of(rig.worker.address).num_blocks == 0, "the history was dropped too"
        assert rig.map.replicas[rig.worker.address].num_indexed == 1


async def test_members_come_and_go():
    async with a_rig(num_workers=2) as rig:
        first, second = rig.workers.both
        await rig.until(lambda: all(rig.map.state(w.address) is MapState.EXACT for w in (first, second)))
        both = [view.endpoint for view in rig.fleet.views()]
        rig.fleet.follow([Listing(both[1].address, "both", both[1])])
        await rig.until(lambda: list(rig.map.replicas) == [second.address])
        rig.fleet.follow([Listing(one.address, "both", one) for one in both])
        await rig.until(lambda: rig.map.state(first.address) is MapState.EXACT)


async def test_an_audit_finds_a_block_that_the_index_lost():
    async with a_rig(audit_seconds=0.02) as rig:
        rig.events.store(*range(40))
        await rig.exact(40)
        await rig.until(lambda: rig.feeds.audits["match"] > 0)
        replica = rig.map.replicas[rig.worker.address]
        rig.map.index.remove(NameSlice.read(NAMES[7]).keys, replica.bit)
        await rig.until(lambda: rig.feeds.audits["mismatch"] == 1)
        await rig.exact(40)
        assert rig.map.losses[MapEvent.AUDIT_FAILED] == 1


async def test_an_audit_finds_a_block_that_the_worker_does_not_have():
    async with a_rig(audit_seconds=0.02) as rig:
        rig.events.store(*range(4))
        await rig.exact(4)
        rig.map.look_up(NAMES[:4]).chose(rig.worker.address)
        rig.events.feed._blocks[BlockHash(b"z" * 32)] = rig.events.feed._blocks.pop(NAMES[3])
        await rig.until(lambda: rig.feeds.audits["mismatch"] >= 1)


async def test_an_audit_finds_a_feed_that_stalled(monkeypatch):
    monkeypatch.setattr(replica_feed, "_FEED_LAG_SECONDS", 0.1)
    async with a_rig(audit_seconds=0.02) as rig:
        await rig.exact(0)
        rig.events.mangle = lambda event: [event] if event.HasField("snapshot") else []
        rig.events.store(0)
        await rig.until(lambda: rig.feeds.audits["stalled"] >= 1)
        assert rig.map.losses[MapEvent.AUDIT_FAILED] >= 1
        await rig.exact(1)


async def test_an_audit_without_an_answer_changes_nothing(monkeypatch):
    monkeypatch.setattr(replica_feed, "_PROBE_SECONDS", 0.05)
    async with a_rig(audit_seconds=0.02) as rig:
        rig.events.may_probe = False
        await rig.exact(0)
        await rig.until(lambda: rig.feeds.audits["failed"] >= 2)
        assert rig.state is MapState.EXACT


async def test_a_gateway_with_another_tenant_key_is_blind():
    async with a_rig(key=b"another") as rig:
        await rig.until(lambda: rig.map.losses[MapEvent.OTHER_NAMES] == 1)
        assert "--tenant-key-file" in rig.map.replicas[rig.worker.address].why


async def test_a_snapshot_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(replica_feed, "_PART_SECONDS", 0.05)
    async with a_rig() as rig:
        rig.events.mangle = lambda event: []
        await rig.until(lambda: rig.events.num_subscriptions >= 2)
        rig.events.mangle = lambda event: [event]
        await rig.exact(0)


async def test_without_room_there_are_no_subscriptions_but_a_history():
    async with a_rig(max_blocks=0) as rig:
        await rig.until(lambda: rig.worker.address in rig.map.replicas)
        rig.map.look_up(NAMES[:3]).chose(rig.worker.address)
        assert rig.map.look_up(NAMES).of(rig.worker.address).num_blocks == 3
        assert rig.events.num_subscriptions == 0


async def test_a_cache_beyond_the_limit_is_refused_and_counted_in_metrics():
    async with a_rig(max_blocks=10) as rig:
        registry = CollectorRegistry()
        CacheMapCollector(rig.map, rig.feeds, registry)
        rig.events.store(*range(10))
        await rig.exact(10)
        address = {"worker": rig.worker.address}
        assert registry.get_sample_value("kvferry_gateway_cache_map_state", {**address, "state": "exact"}) == 1
        assert registry.get_sample_value("kvferry_gateway_cache_map_blocks", address) == 10
        rig.events.store(10)
        await rig.until(lambda: rig.map.losses[MapEvent.FULL] == 1)
        assert registry.get_sample_value("kvferry_gateway_cache_map_state", {**address, "state": "blind"}) == 1
        assert registry.get_sample_value("kvferry_gateway_cache_map_losses_total", {"reason": "full"}) == 1
        assert (registry.get_sample_value("kvferry_gateway_cache_map_bytes") or 0) > 0


async def test_no_error_leaves_a_stale_map_behind(monkeypatch):
    async with a_rig() as rig:
        await rig.exact(0)

        def fails(*_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(rig.map, "apply", fails)
        rig.events.store(0)
        await rig.until(lambda: rig.state is MapState.BLIND)
        assert "a defect" in rig.map.replicas[rig.worker.address].why
