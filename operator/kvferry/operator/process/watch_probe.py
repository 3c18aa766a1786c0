"""Watch probe: marks objects and checks that the watches deliver the marks; the I/O for `plan.process.heartbeat`."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError
from kvferry.operator.api import ApiRefusal, KubeApi
from kvferry.operator.plan.process.heartbeat import Heartbeat
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.process.watches import WATCHED, api_version_of

_log = logging.getLogger(__name__)
_TICK_SECONDS = 0.5


class WatchProbe:
    """Probe of all watches, with a heartbeat for each watch."""

    def __init__(
        self, api: KubeApi, store: Store, clock: Clock, period: float, missing: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            api: client for the writes of marks.
            store: store with the watched objects.
            clock: clock of the heartbeats.
            period: interval between two heartbeats of a watch, in seconds.
            missing: called on the event loop when an object of the store does not exist: its watch had a gap, or will
                report the deletion soon.
        """
        self._api = api
        self._store = store
        self._clock = clock
        self._beats = {kind: Heartbeat(period) for kind in WATCHED}
        self._marked: dict[str, tuple[str, str]] = {}
        self._missing = missing
        self._round = 0

    def saw(self, kind: str, body: Mapping[str, Any], gone: bool) -> None:
        """Record an event of a watch. Called on the event loop."""
        if gone and self._marked.get(kind) == (body["metadata"]["namespace"], body["metadata"]["name"]):
            self._beats[kind].unmarked()
        self._beats[kind].saw(heartbeat_mark(kind, body))

    def late(self) -> dict[str, float]:
        """Return, for each watch that did not deliver its mark in time, by how many seconds the mark is overdue, by
        kind."""
        now = self._clock.monotonic()
        found = {kind: beat.late_seconds(now) for kind, beat in self._beats.items()}
        return {kind: late for kind, late in found.items() if late > 0}

    async def run(self) -> None:
        """Mark one object of each watched kind per period, until cancelled."""
        while True:
            for kind, beat in self._beats.items():
                if beat.is_due(self._clock.monotonic()):
                    await self._mark_object(kind, beat)
            await asyncio.sleep(_TICK_SECONDS)

    async def _mark_object(self, kind: str, beat: Heartbeat) -> None:
        target = self._target(kind)
        if target is None:
            return
        self._marked[kind] = target
        mark = self._mark(kind)
        # Recorded before the write, since the watch event may arrive before the response.
        beat.marked(mark, self._clock.monotonic())
        try:
            await asyncio.to_thread(self._write, kind, *target, mark)
        except ApiRefusal as refusal:
            _log.debug("no heartbeat through %s %s/%s: %s", kind, *target, refusal.message)
            beat.unmarked()
            if refusal.status == 404:
                self._missing()
        except KvferryError as error:
            _log.warning("no heartbeat: %s", error.message)
            beat.unmarked()

    def _mark(self, kind: str) -> str:
        wall = self._clock.wall()
        if kind == "InferencePool":
            return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return f"{wall:.6f}"  # Label values must not contain colons.

    def _write(self, kind: str, namespace: str, name: str, mark: str) -> None:
        if kind == names.POOL_KIND:
            # The mark is in the status, which the operator owns; the metadata belongs to the user.
            change: dict[str, Any] = {"status": {"operatorObservedAt": mark}}
            subresource = "status"
        else:
            change, subresource = {"metadata": {"labels": {names.LABEL_SEEN: mark}}}, ""
        self._api.patch(
            api_version_of(kind), kind, namespace, name, change, subresource=subresource, manager=names.PROBE_MANAGER
        )

    def _target(self, kind: str) -> tuple[str, str] | None:
        """Choose an object of a kind, a different one each time, to spread the writes."""
        keys = self._store.pools()
        if not keys:
            return None
        self._round += 1
        for i in range(len(keys)):
            key = keys[(self._round + i) % len(keys)]
            name = self._name(kind, key)
            if name:
                return key.namespace, name
        return None

    def _name(self, kind: str, key: Key) -> str:
        facts = self._store.facts(key)
        if facts.body is None or "deletionTimestamp" in facts.body["metadata"]:
            return ""
        if kind == names.POOL_KIND:
            return key.pool
        if kind == "Deployment":
            return next((name for name, d in facts.deployments.items() if not d.deleting), "")
        uid = facts.body["metadata"]["uid"]
        return next((name for (other, name), c in facts.children.items() if other == kind and c.owner == uid), "")


def heartbeat_mark(kind: str, body: Mapping[str, Any]) -> str:
    """Return the heartbeat mark on an object; empty if there is none."""
    if kind == "InferencePool":
        return str((body.get("status") or {}).get("operatorObservedAt") or "")
    return str((body["metadata"].get("labels") or {}).get(names.LABEL_SEEN) or "")
