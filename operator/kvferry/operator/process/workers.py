"""Reconcile workers: they take due pools from the queue, reconcile each pool in a thread, and requeue it."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.plan.process.work_queue import WorkQueue
from kvferry.operator.plan.template_policy import TemplatePolicy
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.process.instruments import OperatorInstruments
from kvferry.operator.reconcile import Installed, Reconciler

_log = logging.getLogger(__name__)


class Workers:
    """Work queue of pools, with its workers. Call all methods on the event loop."""

    def __init__(
        self,
        api: KubeApi,
        store: Store,
        clock: Clock,
        *,
        identity: str,
        operator: str,
        default_image: str,
        template_policy: TemplatePolicy,
        installed: Installed,
    ) -> None:
        """
        Args:
            api: client of the cluster's API server.
            store: store with the observed objects.
            clock: clock of all passes.
            identity: identity of the operator, for events.
            operator: namespace and name of the operator's lease, for statuses.
            default_image: image for pools without `spec.image`.
            template_policy: what the templates of pools may contain.
            installed: optional kinds that the cluster serves.
        """
        self._api = api
        self._store = store
        self._clock = clock
        self._queue: WorkQueue[Key] = WorkQueue()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.instruments = OperatorInstruments(api, self._queue, clock)
        self._reconciler = Reconciler(
            api,
            clock,
            identity=identity,
            operator=operator,
            default_image=default_image,
            template_policy=template_policy,
            installed=installed,
            applied=self._applied,
        )

    def enqueue(self, key: Key) -> None:
        """Queue a pool to be reconciled as soon as a worker is free."""
        self._queue.add(key, self._clock.monotonic())
        self._wake.set()

    def enqueue_all(self) -> None:
        """Enqueue every pool for a reconcile."""
        for key in self._store.pools():
            self.enqueue(key)

    def wake(self) -> None:
        """Wake idle workers, so that they check again whether this operator may still write."""
        self._wake.set()

    async def work(self) -> None:
        """Run one worker until this operator must no longer write."""
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
        """Store the result of a write before the watch delivers it. Called on the thread of a reconcile."""
        self._loop.call_soon_threadsafe(self._store_applied, body)

    def _store_applied(self, body: Mapping[str, Any]) -> None:
        if body["kind"] == "Secret":
            self._store.take_keys(
                Key(body["metadata"]["namespace"], body["metadata"]["labels"][names.LABEL_POOL]), missing=False
            )
            return
        key, _ = self._store.take(names.kind_of(body), body, gone=False)
        if key is not None and body["kind"] == "ConfigMap" and body["metadata"]["name"] == names.tls_object(key.pool):
            self._store.take_tls(key, missing=False)  # it is written after the Secret with the certificates

    async def _reconcile(self, key: Key) -> None:
        facts = self._store.facts(key)
        begun = self._clock.monotonic()
        try:
            again = await asyncio.to_thread(self._reconciler.reconcile, key, facts)
        except KvferryError as error:
            wait = self._queue.failed(key, self._clock.monotonic())
            self.instruments.failures.labels(error.reason).inc()
            _log.warning("pool %s: reconcile failed, next attempt in %.1f s: %s", key, wait, error.message)
        except Exception:
            wait = self._queue.failed(key, self._clock.monotonic())
            self.instruments.failures.labels("BUG").inc()
            _log.exception("pool %s: reconcile failed with an internal error, next attempt in %.1f s", key, wait)
        else:
            self._queue.done(key, self._clock.monotonic(), again)
            if facts.body is None:
                self._queue.forget(key)
        self.instruments.reconcile_seconds.observe(self._clock.monotonic() - begun)
        self._wake.set()
