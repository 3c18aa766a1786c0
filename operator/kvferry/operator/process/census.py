"""Census: compares the store with lists of the watched kinds, adds missed objects and removes deleted objects.

The first census precedes the first reconcile, since a pool with missing objects would be planned wrongly.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.process import watches

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0
_FIRST_SECONDS, _PERIOD_SECONDS = 5.0, 600.0
"""Seconds from the first to the second census, which also covers the start of the watches, and between later
censuses."""


class Census:
    """Job that periodically updates a store from lists of the watched kinds."""

    def __init__(
        self, api: KubeApi, store: Store, namespaces: Sequence[str], saw: watches.Saw, enqueue: Callable[[Key], None]
    ) -> None:
        """
        Args:
            saw: called with every object that is missing in the store, like the callback of a watch.
            enqueue: called with every pool whose object was deleted.
        """
        self._api = api
        self._store = store
        self._namespaces = namespaces
        self._saw = saw
        self._enqueue = enqueue

    async def first(self) -> None:
        """Run a census until one succeeds."""
        while True:
            try:
                return await self._once()
            except KvferryError as error:  # A kind whose definition was just installed is not served immediately.
                _log.warning("the first census failed: %s", error.message)
                await asyncio.sleep(_RETRY_SECONDS)

    async def run(self) -> None:
        """Repeat the census until cancelled."""
        wait = _FIRST_SECONDS
        while True:
            await asyncio.sleep(wait)
            wait = _PERIOD_SECONDS
            try:
                await self._once()
            except KvferryError as error:
                _log.warning("the census failed: %s", error.message)
                wait = _FIRST_SECONDS

    async def _once(self) -> None:
        """
        Raises:
            KvferryError: the API server is unavailable or rejected a list request.
        """
        for kind in watches.WATCHED:
            before = self._store.names(kind)
            listed = await asyncio.to_thread(watches.list_all, self._api, kind, self._namespaces)
            existing = {(body["metadata"]["namespace"], body["metadata"]["name"]) for body in listed}
            known = self._store.names(kind)  # with objects that a watch added during the list: these are not older
            for body in listed:
                if (body["metadata"]["namespace"], body["metadata"]["name"]) not in known:
                    self._saw(kind, body, False)
            for namespace, name in before - existing:
                key = self._store.drop(kind, namespace, name)
                if key is not None:
                    self._enqueue(key)
