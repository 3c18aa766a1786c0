"""Census: compares the store with lists of the watched kinds, adds missed objects and removes deleted objects.

The first census precedes the first reconcile, since a pool with missing objects would be planned wrongly. Optional
kinds have no watch; a census of them is taken every few seconds. A watch with a gap reports no deletions that happened
in the gap: a census follows at once (`Census.request`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.process import watches
from kvferry.operator.reconcile import Installed

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0
_FIRST_SECONDS, _PERIOD_SECONDS = 5.0, 600.0
"""Time from the first to the second census, which also covers the start of the watches, and between later censuses, in
seconds."""
_GATHER_SECONDS = 1.0
"""Time from a request to its census, in seconds, since kopf lists several kinds at about the same time."""
_POLL_SECONDS = 2.0
"""Interval between lists of the optional kinds in seconds."""


class Census:
    """Jobs that periodically update a store from lists of the watched kinds and of the optional kinds."""

    def __init__(
        self,
        api: KubeApi,
        store: Store,
        namespaces: Sequence[str],
        saw: watches.Saw,
        enqueue: Callable[[Key], None],
        installed: Installed,
    ) -> None:
        """
        Args:
            api: client for the lists.
            store: store to update.
            namespaces: namespaces to list; empty for all.
            saw: called with every object that is missing in the store, like the callback of a watch.
            enqueue: called with every pool whose object was deleted.
            installed: optional kinds that the cluster serves.
        """
        self._api = api
        self._store = store
        self._namespaces = namespaces
        self._saw = saw
        self._enqueue = enqueue
        self._installed = installed
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Begin the next census at once, since a watch had a gap. Called on the event loop."""
        self._requested.set()

    async def first(self) -> None:
        """Run a census until one succeeds."""
        while True:
            try:
                return await self._once((*watches.WATCHED, *self._optional()))
            except KvferryError as error:  # A kind whose definition was just installed is not served immediately.
                _log.warning("the first list of the watched kinds failed: %s", error.message)
                await asyncio.sleep(_RETRY_SECONDS)

    async def run(self) -> None:
        """Repeat the census until cancelled: periodically, and after each request."""
        wait = _FIRST_SECONDS
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._requested.wait(), wait)
                await asyncio.sleep(_GATHER_SECONDS)
            self._requested.clear()
            wait = _PERIOD_SECONDS
            try:
                await self._once(watches.WATCHED)
            except KvferryError as error:
                _log.warning("the periodic list of the watched kinds failed: %s", error.message)
                wait = _FIRST_SECONDS

    async def poll(self) -> None:
        """Repeat the census of the optional kinds until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self._once(self._optional())
            except KvferryError as error:
                _log.warning("the list of the optional kinds failed: %s", error.message)

    def _optional(self) -> list[str]:
        installed = self._installed()
        return [kind for kind, resource in watches.POLLED.items() if resource in installed]

    async def _once(self, kinds: Iterable[str]) -> None:
        """List the objects of `kinds` once: record new ones, and drop those that no longer exist.

        Raises:
            KvferryError: the API server is unavailable or rejected a list request.
        """
        for kind in kinds:
            before = self._store.names(kind)
            listed = await asyncio.to_thread(watches.list_all, self._api, kind, self._namespaces)
            existing = {(body["metadata"]["namespace"], body["metadata"]["name"]) for body in listed}
            known = self._store.names(kind)  # includes objects that a watch added during the list, which are not older
            for body in listed:
                is_known = (body["metadata"]["namespace"], body["metadata"]["name"]) in known
                if not is_known or kind != names.POOL_KIND:
                    self._saw(kind, body, False)
            for namespace, name in before - existing:
                key = self._store.drop(kind, namespace, name)
                if key is not None:
                    self._enqueue(key)
