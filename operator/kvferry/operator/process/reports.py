"""Fleet reports from the gateway of each pool, the operator's only input besides the API server."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import aiohttp

from kvferry.core.clock import Clock
from kvferry.core.handoffs import TRIED, HandoffOutcome
from kvferry.operator.plan.process.fleet_page import MAX_BYTES, read_fleet
from kvferry.operator.plan.process.handoff_counts import RecentHandoffs
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import FleetReport, Key, PoolFacts, Store

_log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 2.0
_AT_ONCE = 32
_TICK_SECONDS = 0.5
_QUICK_SECONDS = 2.0
_SLOW_SECONDS = 15.0
_MAX_DOUBLINGS = 4
"""Maximum number of doublings of the period, one per failed read, so that unreachable gateways do not delay other
reads."""


class Reports:
    """Job that periodically reads fleet reports into the store, more often for pools whose decisions depend on them."""

    def __init__(self, store: Store, clock: Clock, enqueue: Callable[[Key], None]) -> None:
        """
        Args:
            store: store with the pools, which gets the reports.
            clock: clock of the intervals and of the reports' times.
            enqueue: called with every pool whose report changed.
        """
        self._store = store
        self._clock = clock
        self._enqueue = enqueue
        self._read_at: dict[Key, float] = {}
        self._recent: dict[Key, RecentHandoffs] = {}
        self._reading: set[Key] = set()
        self._missed: dict[Key, int] = {}
        """Number of consecutive failed reads, by pool."""
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Read the fleet reports of all pools periodically until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as reading:
            while True:
                now = self._clock.monotonic()
                keys = self._store.pools()
                for gone in self._read_at.keys() - set(keys):
                    del self._read_at[gone]
                    self._recent.pop(gone, None)
                    self._missed.pop(gone, None)
                for key in keys:
                    facts = self._store.facts(key)
                    address = address_of(key, facts)
                    wait = _period(facts) * 2 ** min(self._missed.get(key, 0), _MAX_DOUBLINGS)
                    due = now - self._read_at.get(key, float("-inf")) >= wait
                    if address and due and key not in self._reading:
                        self._read_at[key] = now
                        self._reading.add(key)
                        reading.create_task(self._ask(session, key, address))
                await asyncio.sleep(_TICK_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, key: Key, address: str) -> None:
        async with self._gate:
            before = self._store.facts(key).report
            report = None
            try:
                report = await self._read(session, key, address)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                _log.debug("pool %s: no report from its gateway at %s: %s", key, address, error)
            except Exception:  # A failure for one pool must not stop the reads for other pools.
                _log.exception("pool %s: reading the report of its gateway failed", key)
        self._reading.discard(key)
        self._missed[key] = 0 if report is not None else self._missed.get(key, 0) + 1
        if report is None and before is not None and self._clock.monotonic() - before.at < 2 * _SLOW_SECONDS:
            return  # After a single failed read, the last report is kept.
        self._store.take_report(key, report)
        if _state(before) != _state(report):
            self._enqueue(key)

    async def _read(self, session: aiohttp.ClientSession, key: Key, address: str) -> FleetReport:
        """Read the report of one gateway's fleet.

        Raises:
            ValueError: the response is not a fleet report.
        """
        raw = bytearray()
        async with session.get(f"{address}/fleet", allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            async for part in answer.content.iter_chunked(1 << 16):
                raw += part
                if len(raw) > MAX_BYTES:
                    raise ValueError(f"more than {MAX_BYTES} bytes")
        report = read_fleet(bytes(raw), self._clock.monotonic())
        recent = self._recent.setdefault(key, RecentHandoffs())
        return replace(report, handoffs=recent.take(report.gateway, report.at, report.handoffs))


def address_of(key: Key, facts: PoolFacts) -> str:
    """Return the URL of the gateways' admin API; empty if no gateway pod is ready."""
    name = names.role_object(key.pool, names.ROLE_GATEWAY)
    gateway, service = facts.deployments.get(name), facts.services.get(name)
    if gateway is None or gateway.ready < 1 or service is None or not service.address or not service.admin_port:
        return ""
    host = f"[{service.address}]" if ":" in service.address else service.address
    return f"http://{host}:{service.admin_port}"


def _period(facts: PoolFacts) -> float:
    body = facts.body or {}
    auto = any((role.get("scaling") or {}).get("mode") == "Auto" for role in body["spec"].get("roles") or ())
    conditions = (body.get("status") or {}).get("conditions") or ()
    settled = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return _SLOW_SECONDS if settled and not auto else _QUICK_SECONDS


def _state(report: FleetReport | None) -> object:
    """Return the parts of a report that affect conditions. Loads are not included, since the autoscaler reads them
    periodically."""
    if report is None:
        return None
    # The first tickets with an unknown key are significant; for the other outcomes, only large changes are.
    tried = {outcome: report.handoffs.get(outcome, 0) for outcome in TRIED}
    rough = {outcome: min(n, 3) if outcome == HandoffOutcome.KEY_UNKNOWN else n // 10 for outcome, n in tried.items()}
    workers = frozenset(
        (
            *(w.name, w.role, w.takes_work, w.fingerprint, w.model_digest, w.context_tokens, w.device, w.is_staged),
            *(w.adapters, tuple(sorted(w.adapter_failures))),
        )
        for w in report.workers
    )
    return workers, rough
