"""Asks each pool's gateway what its workers are and hold; the operator's only look past the API server."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import aiohttp

from kvferry.core.clock import Clock
from kvferry.operator import names
from kvferry.operator.facts import FleetReport, Key, PoolFacts, Store
from kvferry.operator.fleet_page import MAX_BYTES, read_fleet
from kvferry.operator.handoffs import RecentHandoffs

_log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 2.0
_AT_ONCE = 32
_TICK_SECONDS = 0.5
_QUICK_SECONDS = 2.0
_SLOW_SECONDS = 15.0
_MOST_DOUBLINGS = 4
"""Of the period, one for each answer missed: gateways that cannot be reached must not keep those that can waiting."""


class Reports:
    """Keeps the store's fleet reports fresh: often where a decision waits for them, rarely elsewhere."""

    def __init__(self, store: Store, clock: Clock, nudge: Callable[[Key], None]) -> None:
        """
        Args:
            nudge: called with a pool about which something new was learnt.
        """
        self._store = store
        self._clock = clock
        self._nudge = nudge
        self._asked_at: dict[Key, float] = {}
        self._recent: dict[Key, RecentHandoffs] = {}
        self._asking: set[Key] = set()
        self._missed: dict[Key, int] = {}
        """Answers in a row."""
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Ask, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as asking:
            while True:
                now = self._clock.monotonic()
                keys = self._store.pools()
                for gone in self._asked_at.keys() - set(keys):
                    del self._asked_at[gone]
                    self._recent.pop(gone, None)
                    self._missed.pop(gone, None)
                for key in keys:
                    facts = self._store.facts(key)
                    address = address_of(key, facts)
                    wait = _period(facts) * 2 ** min(self._missed.get(key, 0), _MOST_DOUBLINGS)
                    due = now - self._asked_at.get(key, float("-inf")) >= wait
                    if address and due and key not in self._asking:
                        self._asked_at[key] = now
                        self._asking.add(key)
                        asking.create_task(self._ask(session, key, address))
                await asyncio.sleep(_TICK_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, key: Key, address: str) -> None:
        async with self._gate:
            before = self._store.facts(key).report
            report = None
            try:
                report = await self._read(session, key, address)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                _log.debug("pool %s: no word from its gateway at %s: %s", key, address, error)
            except Exception:  # one pool's gateway must not end the watching of all
                _log.exception("pool %s: reading its gateway's word failed", key)
        self._asking.discard(key)
        self._missed[key] = 0 if report is not None else self._missed.get(key, 0) + 1
        if report is None and before is not None and self._clock.monotonic() - before.at < 2 * _SLOW_SECONDS:
            return  # one answer missed is no news
        self._store.take_report(key, report)
        if _news(before) != _news(report):
            self._nudge(key)

    async def _read(self, session: aiohttp.ClientSession, key: Key, address: str) -> FleetReport:
        """
        Raises:
            ValueError: what answers there is no gateway.
        """
        raw = bytearray()
        # By the Service's address, which no certificate names; what is read is no secret, and not believed anyway.
        async with session.get(f"{address}/fleet", allow_redirects=False, ssl=False) as answer:
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
    """Of the pool's gateway, with its scheme; empty while none of its pods is ready."""
    gateway = facts.deployments.get(names.role_object(key.pool, names.ROLE_GATEWAY))
    service = facts.services.get(key.pool)
    if gateway is None or gateway.ready < 1 or service is None or not service.address or not service.http_port:
        return ""
    host = f"[{service.address}]" if ":" in service.address else service.address
    secure = ((facts.body or {}).get("spec", {}).get("gateway") or {}).get("tlsSecret")
    return f"{'https' if secure else 'http'}://{host}:{service.http_port}"


def _period(facts: PoolFacts) -> float:
    body = facts.body or {}
    auto = any((role.get("scaling") or {}).get("mode") == "Auto" for role in body["spec"].get("roles") or ())
    conditions = (body.get("status") or {}).get("conditions") or ()
    settled = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return _SLOW_SECONDS if settled and not auto else _QUICK_SECONDS


def _news(report: FleetReport | None) -> object:
    """What of a report changes conditions; loads do not, the autoscaler looks at them on its own beat."""
    if report is None:
        return None
    lost = {outcome: n // 10 for outcome, n in report.handoffs.items()}
    return frozenset((w.name, w.role, w.takes_work, w.fingerprint, w.model_digest) for w in report.workers), lost
