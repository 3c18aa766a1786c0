"""Follows the cache feeds of all workers of a fleet, and removes dropped maps in the background."""

import asyncio
from collections import Counter
from functools import partial

from kvferry.core.clock import Clock
from kvferry.core.hashing import BlockNamers, check_name
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.decide.config import CacheMapConfig
from kvferry.gateway.fleet.cache_feeds.replica_feed import FeedLimits, ReplicaFeed
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.v1 import kv_events_pb2_grpc

_SWEEP_SECONDS = 0.002
"""Seconds for which a sweep keeps the event loop busy before it pauses."""
_SWEEP_PAUSE_SECONDS = 0.01
_SWEEP_INTERVAL_SECONDS = 1.0


class CacheFeeds:
    """The feeds of one gateway. `run` is a background task."""

    def __init__(
        self, fleet: Fleet, cache_map: CacheMap, config: CacheMapConfig, clock: Clock, tenant_key: bytes
    ) -> None:
        """
        Args:
            fleet: the workers to follow.
            cache_map: receives the events.
            config: limits and intervals.
            clock: clock of audits and retries.
            tenant_key: key of the block names, to detect workers with a different key.
        """
        self._fleet = fleet
        self._map = cache_map
        self._config = config
        self._clock = clock
        self._namers = BlockNamers(tenant_key)
        self._limits = FeedLimits()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._incarnations: dict[str, str] = {}
        self._fingerprints: dict[str, bytes] = {}
        self.audits: Counter[str] = Counter()
        """Number of audits by outcome."""

    async def run(self) -> None:
        """Follow the fleet until cancelled."""
        sweeping = asyncio.create_task(self._sweep_repeatedly(), name="cache map sweep")
        try:
            while True:
                await self._update()
                await asyncio.sleep(self._config.poll_seconds)
        finally:
            await _end(sweeping, *self._tasks.values())
            self._tasks.clear()

    async def _update(self) -> None:
        """Start the feeds of new workers, end those of removed workers, and note restarts."""
        present = {view.endpoint.address for view in self._fleet.views()}
        for address in present:
            view = self._fleet.view(address)
            if view is None or view.incarnation is None:
                continue
            self._map.join(address)
            if self._fingerprints.get(address) != view.fingerprint:  # the weights have changed, and all names with them
                self._fingerprints[address] = view.fingerprint
                if address in self._tasks and self._map.state(address) is MapState.BLIND:
                    await _end(self._tasks.pop(address))  # subscribe at once, with the new check name
            if self._incarnations.get(address) != view.incarnation:
                self._incarnations[address] = view.incarnation
                self._map.met(address, view.incarnation)
                if address in self._tasks and self._map.state(address) is MapState.BLIND:
                    await _end(self._tasks.pop(address))  # subscribe at once, instead of after the backoff
            if address not in self._tasks and self._config.max_blocks:
                self._tasks[address] = asyncio.create_task(self._feed(address).run(), name=f"cache feed {address}")
        for address in self._map.replicas.keys() - present:
            self._incarnations.pop(address, None)
            self._fingerprints.pop(address, None)
            task = self._tasks.pop(address, None)
            if task is not None:
                await _end(task)
            self._map.leave(address)

    def _feed(self, address: str) -> ReplicaFeed:
        return ReplicaFeed(
            address,
            partial(self._stub, address),
            self._map,
            self._limits,
            self._clock,
            check_name=partial(self._check_name, address),
            audit_seconds=self._config.audit_seconds,
            count_audit=self._count_audit,
        )

    def _stub(self, address: str) -> "kv_events_pb2_grpc.KvEventsAsyncStub":
        view = self._fleet.view(address)
        if view is None or view.incarnation is None:
            raise KeyError(address)
        return self._fleet.events(address)

    def _check_name(self, address: str) -> bytes:
        view = self._fleet.view(address)
        if view is None or view.block_tokens <= 0:
            return b""
        return check_name(self._namers, fingerprint=view.fingerprint, block_tokens=view.block_tokens)

    def _count_audit(self, outcome: str) -> None:
        self.audits[str(outcome)] += 1

    async def _sweep_repeatedly(self) -> None:
        while True:
            began = self._clock.monotonic()
            for _ in self._map.sweep():
                if self._clock.monotonic() - began > _SWEEP_SECONDS:
                    await asyncio.sleep(_SWEEP_PAUSE_SECONDS)
                    began = self._clock.monotonic()
            await asyncio.sleep(_SWEEP_INTERVAL_SECONDS)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
