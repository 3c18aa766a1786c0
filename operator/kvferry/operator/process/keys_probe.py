"""Keys probe: checks that the Secrets with generated keys exist, by dry runs of their creation.

The operator has no permission to read or to watch Secrets, so that it cannot be used to read those of other
applications.
"""

import asyncio
import logging
from collections.abc import Callable

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError
from kvferry.operator.api import KubeApi
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, PoolFacts, Store
from kvferry.operator.pool.spec import Json

_log = logging.getLogger(__name__)
_PERIOD_SECONDS = 3.0
"""Time in seconds within which every pool is checked once, unless there are too many pools."""
_MIN_PAUSE_SECONDS = 0.05
"""Pause in seconds after each check, which bounds the load on the API server."""


class KeysProbe:
    """Job that checks the Secrets of all pools in turn."""

    def __init__(self, api: KubeApi, store: Store, clock: Clock, enqueue: Callable[[Key], None]) -> None:
        """
        Args:
            enqueue: called with every pool whose Secret was deleted.
        """
        self._api = api
        self._store = store
        self._clock = clock
        self._enqueue = enqueue

    async def run(self) -> None:
        """Check the Secrets until cancelled."""
        while True:
            begun = self._clock.monotonic()
            for key in self._store.pools():
                if _has_generated_keys(self._store.facts(key)):
                    await self._check(key)
                    await asyncio.sleep(_MIN_PAUSE_SECONDS)
            await asyncio.sleep(max(_MIN_PAUSE_SECONDS, _PERIOD_SECONDS - (self._clock.monotonic() - begun)))

    async def _check(self, key: Key) -> None:
        try:
            missing = await asyncio.to_thread(self._api.would_create, _probe_of(key))
        except KvferryError as error:
            _log.warning("pool %s: cannot check its Secret: %s", key, error.message)
            return
        if self._store.take_keys(key, missing=missing) and missing:
            self._enqueue(key)


def _has_generated_keys(facts: PoolFacts) -> bool:
    """Return whether the operator has generated a pool's keys; not before its first reconcile, which creates them."""
    body = facts.body
    if body is None or "deletionTimestamp" in body["metadata"] or not facts.children:
        return False
    return not (body["spec"].get("tenancy") or {}).get("keysSecret")


def _probe_of(key: Key) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": key.namespace, "name": names.keys_secret(key.pool)},
    }
