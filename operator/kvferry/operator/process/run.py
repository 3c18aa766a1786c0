"""Lifecycle of the operator: it acquires the lease, runs the first census and then its jobs, and stops when a job
ends."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.plan.process.rivals import Rivals
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Store
from kvferry.operator.process import watches
from kvferry.operator.process.census import Census
from kvferry.operator.process.config import OperatorConfig
from kvferry.operator.process.discovery import OptionalKinds, wait_for_definitions
from kvferry.operator.process.health import HealthServer
from kvferry.operator.process.keys_probe import KeysProbe
from kvferry.operator.process.leader import Leader
from kvferry.operator.process.reports import Reports
from kvferry.operator.process.watch_probe import WatchProbe
from kvferry.operator.process.workers import Workers

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 1.5
"""Seconds for which reconciles in progress may continue before the lease is released."""
_STOP_SECONDS = 2.0
_KOPF_WORKERS = 64
_RIVALS_SECONDS = 2.0
"""Seconds between two checks for other operators."""

Announce = Callable[[Mapping[str, object]], None]
"""Callback for the events `listening`, with the health port, and `leading`."""


class RivalOperator(KvferryError):
    """Another operator reconciles the same pools."""

    reason = "RIVAL_OPERATOR"


async def run_operator(config: OperatorConfig, api: KubeApi, announce: Announce, *, clock: Clock | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT.

    Args:
        config: configuration of the operator.
        api: client of the cluster's API server.
        announce: called when the health port is bound, and when this operator leads.
        clock: clock of all parts; `None` for the system clock.

    Returns:
        The exit status, 1 if leadership or a watch was lost.
    """
    operator = Operator(config, api, clock or SystemClock(), announce)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    try:
        return await operator.run(stop)
    finally:
        signal.set_wakeup_fd(-1)  # Signals must not be written to a closed event loop.


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


class Operator:
    """The operator's process: first a candidate for the lease, then, holding the lease, the active operator."""

    def __init__(self, config: OperatorConfig, api: KubeApi, clock: Clock, announce: Announce) -> None:
        """
        Args:
            config: configuration of the operator.
            api: client of the cluster's API server.
            clock: clock of all parts.
            announce: called when the health port is bound, and when this operator leads.
        """
        self._config = config
        self._announce = announce
        self._api = api
        self._clock = clock
        self._store = Store()
        self._probe = WatchProbe(
            api, self._store, clock, config.watch_probe_seconds, missing=lambda: self._census.request()
        )
        self._optional = OptionalKinds(api, lambda: self._workers.enqueue_all())
        self._workers = Workers(
            api,
            self._store,
            clock,
            identity=config.identity,
            operator=config.lease_id,
            default_image=config.default_image,
            template_policy=config.template_policy,
            installed=self._optional.installed,
        )
        installed = self._optional.installed
        self._census = Census(api, self._store, config.namespaces, self._saw, self._workers.enqueue, installed)
        self._keys = KeysProbe(api, self._store, clock, self._workers.enqueue)
        self._leads = False

    async def run(self, stop: asyncio.Event) -> int:
        """Run until `stop` is set or a job ends unexpectedly; return the exit status."""
        config = self._config
        health = await HealthServer.start(config.health_address, self._unhealthy, self._workers.instruments.registry)
        self._announce({"event": "listening", "health": health.port})
        leader = Leader(
            self._api,
            self._clock,
            config.lease,
            me=config.identity,
            namespace=config.own_namespace,
            name=config.lease_name,
            watched=config.namespaces,
        )
        self._api.may_write = leader.holds
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            acquiring = asyncio.create_task(self._acquire(leader), name="lease")
            await asyncio.wait({acquiring, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not acquiring.done():
                acquiring.cancel()
                return 0
            acquiring.result()
            return await self._lead(leader, stop, stopping)
        finally:
            stopping.cancel()
            await leader.release()
            await health.stop()

    async def _acquire(self, leader: Leader) -> None:
        await wait_for_definitions(self._api)
        await self._refuse_rivals()
        await leader.acquire()
        self._leads = True
        self._announce({"event": "leading", "identity": self._config.identity})
        self._workers.instruments.leads.set(1)

    async def _refuse_rivals(self) -> None:
        """Wait until no other operator reconciles this operator's pools.

        Raises:
            RivalOperator: an operator with a different lease reconciles them.
        """
        rivals = Rivals(self._config.lease_id, self._clock.monotonic())
        logged = ""
        while True:
            try:
                pools = await asyncio.to_thread(watches.list_all, self._api, names.POOL_KIND, self._config.namespaces)
            except KvferryError as error:
                pools = []
                _log.warning("cannot look for other operators: %s", error.message)
            reason, is_certain = rivals.look(pools, self._clock.monotonic(), self._clock.wall())
            if is_certain:
                raise RivalOperator(reason)
            if not reason:
                return
            if reason != logged:
                _log.warning("waiting until it is certain that no other operator is running: %s", reason)
                logged = reason
            await asyncio.sleep(_RIVALS_SECONDS)

    async def _lead(self, leader: Leader, stop: asyncio.Event, stopping: asyncio.Task[bool]) -> int:
        lease = asyncio.create_task(leader.keep(), name="lease")
        first = asyncio.create_task(self._first_census(), name="first census")
        await asyncio.wait({lease, first, stopping}, return_when=asyncio.FIRST_COMPLETED)
        jobs: set[asyncio.Task[None]] = {lease, first}
        workers: set[asyncio.Task[None]] = set()
        if first.done() and first.exception() is None:
            workers = {
                asyncio.create_task(self._workers.work(), name=f"worker {i}") for i in range(self._config.workers)
            }
            jobs = {lease, *workers, *self._jobs(stop)}
            await asyncio.wait({*jobs, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ended = [job for job in jobs if job.done()]
        leader.fence()  # Reconciles in progress fail at their next write.
        self._workers.wake()
        for job in jobs - workers:
            job.cancel()
        if workers:
            await asyncio.wait(workers, timeout=_DRAIN_SECONDS)
        await leader.release()
        await asyncio.wait(jobs, timeout=_STOP_SECONDS)
        if stopping.done():
            _log.info("stopped")
            return 0
        for job in ended:
            error = None if job.cancelled() else job.exception()
            why = error or ("the lease was not renewed in time" if job in workers else "it ended without an error")
            _log.error("the operator stops because its job %r ended: %s", job.get_name(), why, exc_info=error)
        return 1

    async def _first_census(self) -> None:
        await self._optional.refresh()
        await self._census.first()

    def _jobs(self, stop: asyncio.Event) -> set[asyncio.Task[None]]:
        reports = Reports(self._store, self._clock, self._workers.enqueue)
        return {
            asyncio.create_task(self._watch(stop), name="watches"),
            asyncio.create_task(self._probe.run(), name="watch probe"),
            asyncio.create_task(self._optional.run(self._config.discovery_seconds), name="discovery"),
            asyncio.create_task(self._census.run(), name="census"),
            asyncio.create_task(self._census.poll(), name="census of optional kinds"),
            asyncio.create_task(self._keys.run(), name="keys"),
            asyncio.create_task(reports.run(), name="gateway reports"),
        }

    async def _watch(self, stop: asyncio.Event) -> None:
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=watches.registry(self._saw, self._census.request, self._api),
            settings=watches.settings(_KOPF_WORKERS),
            standalone=True,
            clusterwide=not self._config.namespaces,
            namespaces=self._config.namespaces,
        )
        _stop_on_signals(stop)  # kopf replaced the handlers, and would stop before the lease is released.
        await kopf.run_tasks(tasks, ignored=others)

    def _saw(self, kind: str, body: Mapping[str, Any], gone: bool) -> None:
        if kind in watches.WATCHED:
            self._probe.saw(kind, body, gone)
        key, changed = self._store.take(kind, body, gone=gone)
        if key is not None and changed:
            self._workers.enqueue(key)

    def _unhealthy(self) -> str:
        """Return the reason why liveness fails; empty if the process is healthy."""
        if not self._leads:
            return ""
        return "; ".join(f"the watch of {kind} is {late:.0f} s late" for kind, late in self._probe.late().items())
