"""The operator's process: wait for the lease, watch, work, prove that it lives, end when any of that ends."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kopf

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import KvferryError
from kvferry.operator import names, watches
from kvferry.operator.api import KubeApi
from kvferry.operator.events import Events
from kvferry.operator.facts import Key, Store
from kvferry.operator.health import HealthServer
from kvferry.operator.instruments import Instruments
from kvferry.operator.leader import Leader, LeadershipLost
from kvferry.operator.lease import LeaseTimes
from kvferry.operator.pulse import Pulse
from kvferry.operator.reconcile import Reconciler, rfc3339
from kvferry.operator.reports import Reports
from kvferry.operator.surroundings import EXTENSION_POOL, POD_MONITOR
from kvferry.operator.work_queue import WorkQueue

_log = logging.getLogger(__name__)
LEASE = "kvferry-operator"
_DEFINITIONS_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 1.0
_LAST_PASS_SECONDS = 1.5
"""For passes under way, before the lease is given back."""
_END_SECONDS = 2.0
_CENSUS_SECONDS = (5.0, 600.0)
"""After the first one, and between the later ones."""


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """One operator process."""

    default_image: str
    """Of pools that name none."""
    namespaces: tuple[str, ...] = ()
    """Where pools are looked after; empty: everywhere."""
    own_namespace: str = "default"
    """Where its lease is."""
    lease_name: str = LEASE
    identity: str = ""
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    health_address: str = "0.0.0.0:8080"
    pulse_seconds: float = 10.0
    look_seconds: float = 30.0
    """Between looks at which kinds of others are installed."""
    workers: int = 4
    """Pools reconciled at the same time."""


Announce = Callable[[Mapping[str, object]], None]
"""Told `listening` with the health port, then `leading`."""


async def run_operator(config: OperatorConfig, api: KubeApi, announce: Announce, *, clock: Clock | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. 1: leadership or a watch was lost."""
    operator = Operator(config, api, clock or SystemClock(), announce)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    try:
        return await operator.run(stop)
    finally:
        signal.set_wakeup_fd(-1)  # a later signal must not be written to a loop that is being closed


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def leader_of(api: KubeApi, namespace: str, timeout: float, name: str = LEASE) -> str:
    """Who renews the lease; empty: nobody did within `timeout` seconds, or it cannot be read."""
    renewed = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while True:
                lease = await asyncio.to_thread(api.get, "coordination.k8s.io/v1", "Lease", namespace, name)
                spec = (lease or {}).get("spec") or {}
                # Seen to change, rather than compared with this machine's clock.
                if spec.get("holderIdentity") and renewed and spec.get("renewTime") != renewed:
                    return str(spec["holderIdentity"])
                renewed = spec.get("renewTime") or ""
                await asyncio.sleep(_DEFINITIONS_SECONDS / 10)
    return ""


class Operator:
    """One candidate and, while it leads, the operator."""

    def __init__(self, config: OperatorConfig, api: KubeApi, clock: Clock, announce: Announce) -> None:
        self._config = config
        self._announce = announce
        self._api = api
        self._clock = clock
        self._store = Store()
        self._queue: WorkQueue[Key] = WorkQueue()
        self._wake = asyncio.Event()
        self._installed: frozenset[tuple[str, str]] = frozenset()
        self._instruments = Instruments(api, self._queue, clock)
        self._pulse = Pulse(api, self._store, clock, config.pulse_seconds)
        self._leads = False
        events = Events(api, config.identity, lambda: rfc3339(clock.wall()))
        self._reconciler = Reconciler(
            api,
            clock,
            events,
            default_image=config.default_image,
            installed=lambda: self._installed,
            applied=self._applied,
        )

    _loop: asyncio.AbstractEventLoop

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop`, or until something that must not end has ended."""
        config = self._config
        self._loop = asyncio.get_running_loop()
        health = await HealthServer.start(config.health_address, self._ill, self._instruments.registry)
        self._announce({"event": "listening", "health": health.port})
        leader = Leader(
            self._api,
            self._clock,
            config.lease,
            me=config.identity,
            namespace=config.own_namespace,
            name=config.lease_name,
        )
        self._api.may_write = leader.holds
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            first = asyncio.create_task(self._begin(leader), name="begin")
            await asyncio.wait({first, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                first.cancel()
                return 0
            first.result()
            return await self._lead(leader, stop, stopping)
        finally:
            stopping.cancel()
            await leader.give_back()
            await health.stop()

    async def _begin(self, leader: Leader) -> None:
        await self._wait_for_definitions()
        await leader.acquire()
        self._leads = True
        self._announce({"event": "leading", "identity": self._config.identity})
        self._instruments.leads.set(1)

    async def _lead(self, leader: Leader, stop: asyncio.Event, stopping: asyncio.Task[bool]) -> int:
        lease = asyncio.create_task(leader.keep(), name="lease")
        first = asyncio.create_task(self._first_look(), name="first look")
        await asyncio.wait({lease, first, stopping}, return_when=asyncio.FIRST_COMPLETED)
        jobs: set[asyncio.Task[None]] = {lease, first}
        workers: set[asyncio.Task[None]] = set()
        if first.done() and first.exception() is None:
            workers = {asyncio.create_task(self._work(), name=f"worker {i}") for i in range(self._config.workers)}
            jobs = {lease, *workers, *self._jobs(stop)}
            await asyncio.wait({*jobs, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ended = [job for job in jobs if job.done()]
        leader.fence()  # a pass that is under way in a thread ends at its next write
        self._wake.set()
        for job in jobs - workers:
            job.cancel()
        if workers:
            await asyncio.wait(workers, timeout=_LAST_PASS_SECONDS)
        await leader.give_back()
        await asyncio.wait(jobs, timeout=_END_SECONDS)
        if stopping.done():
            _log.info("stopped")
            return 0
        for job in ended:
            error = None if job.cancelled() else job.exception()
            why = error or ("the lease was not renewed in time" if job in workers else "without a word")
            _log.error("%s ended, so this operator does: %s", job.get_name(), why, exc_info=error)
        return 1

    def _jobs(self, stop: asyncio.Event) -> set[asyncio.Task[None]]:
        return {
            asyncio.create_task(self._watch(stop), name="watches"),
            asyncio.create_task(self._pulse.run(), name="pulse"),
            asyncio.create_task(self._keep_looking_around(), name="installed kinds"),
            asyncio.create_task(self._keep_counting(), name="census"),
            asyncio.create_task(Reports(self._store, self._clock, self._nudge).run(), name="reports"),
        }

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self, stop: asyncio.Event) -> None:
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=watches.registry(self._saw, self._api),
            settings=watches.settings(64),
            standalone=True,
            clusterwide=not self._config.namespaces,
            namespaces=self._config.namespaces,
        )
        _stop_on_signals(stop)  # kopf has just taken them for itself, and would end before the lease is given back
        await kopf.run_tasks(tasks, ignored=others)

    def _saw(self, kind: str, body: Mapping[str, Any], gone: bool) -> None:
        self._pulse.saw(kind, body, gone)
        key, changed = self._store.take(kind, body, gone=gone)
        if key is not None and changed:
            self._nudge(key)

    def _nudge(self, key: Key) -> None:
        self._queue.add(key, self._clock.monotonic())
        self._wake.set()

    # -- working -----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._api.may_write():
            now = self._clock.monotonic()
            key = self._queue.take(now)
            if key is None:
                self._wake.clear()
                due = self._queue.next_at()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                        await self._wake.wait()
                continue
            await self._reconcile(key)

    def _applied(self, body: Mapping[str, Any]) -> None:
        """What a write of ours made, told by a reconcile's thread; the watch would tell a moment later."""
        if body["kind"] in ("Deployment", "PoolRoleScaler"):
            self._loop.call_soon_threadsafe(lambda: self._store.take(body["kind"], body, gone=False))

    async def _reconcile(self, key: Key) -> None:
        facts = self._store.facts(key)
        begun = self._clock.monotonic()
        try:
            again = await asyncio.to_thread(self._reconciler.reconcile, key, facts)
        except KvferryError as error:
            wait = self._queue.failed(key, self._clock.monotonic())
            self._instruments.failures.labels(error.reason).inc()
            _log.warning("pool %s: %s; trying again in %.1f s", key, error.message, wait)
        except Exception:
            wait = self._queue.failed(key, self._clock.monotonic())
            self._instruments.failures.labels("BUG").inc()
            _log.exception("pool %s: a mistake of the operator's own; trying again in %.1f s", key, wait)
        else:
            self._queue.done(key, self._clock.monotonic(), again)
            if facts.body is None:
                self._queue.forget(key)
        self._instruments.reconcile_seconds.observe(self._clock.monotonic() - begun)
        self._wake.set()

    # -- the cluster around ------------------------------------------------------------------------------------------

    async def _wait_for_definitions(self) -> None:
        said = False
        while True:
            try:
                there = [
                    await asyncio.to_thread(self._api.serves, names.API_VERSION, plural)
                    for plural in (names.POOLS, names.SCALERS)
                ]
                if all(there):
                    return
                why = (
                    f"the cluster has no {names.POOLS} or {names.SCALERS} of {names.API_VERSION}; apply the definitions"
                )
            except KvferryError as error:
                why = error.message
            if not said:
                _log.warning("waiting: %s", why)
                said = True
            await asyncio.sleep(_DEFINITIONS_SECONDS)

    async def _census(self) -> None:
        """List what is watched: adds what no event told of, and drops what went while nobody watched.

        Raises:
            KvferryError: the API server is away.
        """
        for kind in watches.WATCHED:
            known = self._store.names(kind)
            listed = await asyncio.to_thread(watches.list_all, self._api, kind, self._config.namespaces)
            there = {(body["metadata"]["namespace"], body["metadata"]["name"]) for body in listed}
            told = self._store.names(kind)  # meanwhile; what a watch told of is at least as new as the list
            for body in listed:
                if (body["metadata"]["namespace"], body["metadata"]["name"]) not in told:
                    self._saw(kind, body, False)
            for namespace, name in known - there:
                key = self._store.drop(kind, namespace, name)
                if key is not None:
                    self._nudge(key)

    async def _keep_counting(self) -> None:
        first, later = _CENSUS_SECONDS
        wait = first
        while True:
            await asyncio.sleep(wait)
            wait = later
            try:
                await self._census()
            except KvferryError as error:
                _log.warning("no census: %s", error.message)
                wait = first

    async def _first_look(self) -> None:
        """Before anything is decided: half a pool must not be taken for a whole one."""
        await self._look_around()
        while True:
            try:
                return await self._census()
            except KvferryError as error:  # of definitions that have just been installed there is no list yet
                _log.warning("no first census: %s", error.message)
                await asyncio.sleep(_FIRST_LOOK_SECONDS)

    async def _look_around(self) -> None:
        try:
            found = [kind for kind in (POD_MONITOR, EXTENSION_POOL) if await asyncio.to_thread(self._api.serves, *kind)]
        except KvferryError as error:
            _log.warning("cannot ask which kinds are installed: %s", error.message)
            return
        before, self._installed = self._installed, frozenset(found)
        if before != self._installed:
            for key in self._store.pools():
                self._nudge(key)

    async def _keep_looking_around(self) -> None:
        while True:
            await asyncio.sleep(self._config.look_seconds)
            await self._look_around()

    def _ill(self) -> str:
        """Why this process should be started anew; empty: it should not."""
        if not self._leads:
            return ""
        return "; ".join(f"the watch of {kind} is {late:.0f} s late" for kind, late in self._pulse.late().items())


__all__ = ["LeadershipLost", "Operator", "OperatorConfig", "run_operator"]
