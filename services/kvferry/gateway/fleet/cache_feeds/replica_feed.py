"""Follows the cache feed of one worker: subscribes, applies its events to the map, audits the map, and starts again."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from kvferry.core.clock import Clock
from kvferry.gateway.decide.cache_map.audit import AuditOutcome
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.map_states import MapEvent, MapState
from kvferry.gateway.decide.cache_map.replica_map import FeedBroken
from kvferry.gateway.fleet.cache_feeds.event_reader import audit_from_wire, event_from_wire
from kvferry.v1 import kv_events_pb2, kv_events_pb2_grpc

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 30.0
_STEADY_SECONDS = 30.0
"""Duration of a subscription in seconds after which the backoff is reset."""
_PART_SECONDS = 10.0
"""Time limit in seconds for the next part of a snapshot."""
_SNAPSHOT_SECONDS = 120.0
_PROBE_SECONDS = 5.0
_FEED_LAG_SECONDS = 5.0
"""Time in seconds within which the feed must reach the state of the worker's answer to an audit; after that, it counts
as stalled."""
_LAG_CHECKS = 50
_NUM_SAMPLES = 64
_MAX_CATCHING_UP = 2
_MAX_REASON_CHARS = 300
_PERSISTENT = frozenset({MapEvent.OTHER_NAMES, MapEvent.FULL, MapEvent.MALFORMED})
"""Reasons for losing a feed after which an immediate new subscription would most likely fail in the same way."""


@dataclass(slots=True)
class FeedLimits:
    """Limits on the concurrent work of all feeds of a gateway, so that snapshots do not block the event loop."""

    catching_up: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_CATCHING_UP))
    """Held while a snapshot is received."""
    slice: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a slice of an event is applied: all feeds together apply one slice per turn of the event loop."""


class ReplicaFeed:
    """The feed of one worker. `run` is a background task."""

    def __init__(
        self,
        address: str,
        stub: Callable[[], "kv_events_pb2_grpc.KvEventsAsyncStub"],
        cache_map: CacheMap,
        limits: FeedLimits,
        clock: Clock,
        *,
        check_name: Callable[[], bytes],
        audit_seconds: float,
        count_audit: Callable[[str], None],
    ) -> None:
        """
        Args:
            address: address of the worker, its key in the map.
            stub: returns the stub of the worker's KvEvents service; raises `KeyError` if the worker is unreachable.
            cache_map: receives the events.
            limits: limits on concurrent work, shared by all feeds of the gateway.
            clock: clock of audits and retries.
            check_name: returns the gateway's name for the block whose name the worker sends.
            audit_seconds: mean interval in seconds between two audits.
            count_audit: called with the outcome of each audit.
        """
        self._address = address
        self._stub = stub
        self._map = cache_map
        self._limits = limits
        self._clock = clock
        self._check_name = check_name
        self._audit_seconds = audit_seconds
        self._count_audit = count_audit

    async def run(self) -> None:
        """Follow the feed until cancelled."""
        backoff, logged = _FIRST_BACKOFF_SECONDS, ""
        while True:
            began = self._clock.monotonic()
            event, why = await self._follow()
            self._map.lost(self._address, event, why)
            if why != logged:
                _log.info("cache map of worker %s: %s: %s", self._address, event.value, why)
                logged = why
            if self._clock.monotonic() - began >= _STEADY_SECONDS:
                backoff = _FIRST_BACKOFF_SECONDS
            if event in _PERSISTENT:
                backoff = _MAX_BACKOFF_SECONDS
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    async def _follow(self) -> tuple[MapEvent, str]:
        """Subscribe and follow until the feed breaks; return the reason."""
        call: grpc.aio.UnaryStreamCall[kv_events_pb2.SubscribeRequest, kv_events_pb2.KvEvent] | None = None
        auditing: asyncio.Task[None] | None = None
        try:
            async with self._limits.catching_up, asyncio.timeout(_SNAPSHOT_SECONDS):
                self._map.subscribed(self._address, self._check_name())
                call = self._stub().Subscribe(kv_events_pb2.SubscribeRequest())
                while self._map.state(self._address) is not MapState.EXACT:
                    async with asyncio.timeout(_PART_SECONDS):
                        event = await call.read()
                    await self._apply(event)
            auditing = asyncio.create_task(self._audit_repeatedly(call), name=f"audit {self._address}")
            while True:
                await self._apply(await call.read())
        except FeedBroken as broken:
            return broken.event, str(broken)
        except grpc.aio.AioRpcError as error:
            details = "".join(c if c.isprintable() else "?" for c in (error.details() or "")[:_MAX_REASON_CHARS])
            return MapEvent.FEED_LOST, f"{error.code().name}: {details}"
        except TimeoutError:
            return MapEvent.FEED_LOST, "the snapshot took too long"
        except KeyError:
            return MapEvent.FEED_LOST, "the worker does not answer"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return MapEvent.FEED_LOST, "the subscription was cancelled"  # by `_audit_repeatedly`, after a failed audit
        except Exception as error:
            # A stale map would look exact, so no error may end the task.
            _log.exception("the cache feed of worker %s failed", self._address)
            return MapEvent.MALFORMED, f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        finally:
            if auditing is not None:
                auditing.cancel()
                await asyncio.gather(auditing, return_exceptions=True)
            if call is not None:
                call.cancel()

    async def _apply(self, event: object) -> None:
        """Apply an event in slices, between which other tasks run.

        Raises:
            FeedBroken: the event is inconsistent, or the stream ended.
        """
        if not isinstance(event, kv_events_pb2.KvEvent):
            raise FeedBroken(MapEvent.FEED_LOST, "the worker ended the stream")
        async with self._limits.slice:
            is_first = True
            for _ in self._map.apply(self._address, event_from_wire(event)):
                if not is_first:
                    await asyncio.sleep(0)
                is_first = False

    async def _audit_repeatedly(self, call: grpc.aio.Call) -> None:
        """Audit the map until its feed ends; cancel the subscription after a mismatch."""
        while True:
            await asyncio.sleep(self._audit_seconds * random.uniform(0.5, 1.5))  # noqa: S311
            outcome = await self.audit()
            self._count_audit(outcome)
            if self._map.state(self._address) is MapState.BLIND:
                call.cancel()
                return

    async def audit(self) -> str:
        """Audit the map once; return the outcome, `failed` if the worker did not answer."""
        audit = self._map.begin_audit(self._address)
        if audit is None:
            return AuditOutcome.SKIPPED
        request = kv_events_pb2.ProbeRequest(names=audit.names, num_samples=_NUM_SAMPLES)
        try:
            answer = audit_from_wire(await self._stub().Probe(request, timeout=_PROBE_SECONDS))
        except (grpc.aio.AioRpcError, KeyError):
            return "failed"
        for _ in range(_LAG_CHECKS):
            outcome = self._map.end_audit(self._address, audit, answer)
            if outcome is not AuditOutcome.WAIT:
                return outcome
            await asyncio.sleep(_FEED_LAG_SECONDS / _LAG_CHECKS)
        self._map.lost(self._address, MapEvent.AUDIT_FAILED, "the feed stalled")
        return "stalled"
