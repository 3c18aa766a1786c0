"""Keys probe: checks that the Secrets with generated keys and certificates exist, by dry runs of their creation.

The operator has no permission to read or watch Secrets, so it cannot be used to read other applications' Secrets.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvferry.core.clock import Clock
from kvferry.core.errors import KvferryError, UsageError
from kvferry.operator.api import KubeApi
from kvferry.operator.pool import names
from kvferry.operator.pool.facts import Key, Store
from kvferry.operator.pool.spec import Json, parse_pool

_log = logging.getLogger(__name__)
_PERIOD_SECONDS = 3.0
"""Time in seconds within which every pool is checked once, unless there are too many pools."""
_MIN_PAUSE_SECONDS = 0.05
"""Pause in seconds after each check, which bounds the load on the API server."""


class Take(Protocol):
    """Stores whether a Secret of a pool is missing; returns whether this changed."""

    def __call__(self, key: Key, *, missing: bool) -> bool: ...


class KeysProbe:
    """Job that checks the Secrets of all pools in turn."""

    def __init__(self, api: KubeApi, store: Store, clock: Clock, enqueue: Callable[[Key], None]) -> None:
        """
        Args:
            api: client for the checks; it needs no permission to read Secrets.
            store: store with the pools.
            clock: clock of the intervals between checks.
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
                for name, take in self._secrets(key):
                    await self._check(key, name, take)
                    await asyncio.sleep(_MIN_PAUSE_SECONDS)
            await asyncio.sleep(max(_MIN_PAUSE_SECONDS, _PERIOD_SECONDS - (self._clock.monotonic() - begun)))

    def _secrets(self, key: Key) -> list[tuple[str, Take]]:
        """Return a pool's generated Secrets, and where the result of a check is stored; none before its first
        reconcile, which creates the Secrets."""
        facts = self._store.facts(key)
        body = facts.body
        if body is None or "deletionTimestamp" in body["metadata"] or not facts.children:
            return []
        found: list[tuple[str, Take]] = []
        if _has_generated_keys(body):
            found.append((names.keys_secret(key.pool), self._store.take_keys))
        if facts.tls is not None and facts.tls.issuer:
            found.append((names.tls_object(key.pool), self._store.take_tls))
        return found

    async def _check(self, key: Key, name: str, take: Take) -> None:
        try:
            missing = await asyncio.to_thread(self._api.would_create, _probe_of(key, name))
        except KvferryError as error:
            _log.warning("pool %s: cannot check its Secret %s: %s", key, name, error.message)
            return
        if take(key, missing=missing) and missing:
            self._enqueue(key)


def _has_generated_keys(body: Mapping[str, Any]) -> bool:
    try:
        return not parse_pool(body).spec.internal_keys.secret_name
    except UsageError:
        return False  # The reconcile reports the error, and creates no Secret.


def _probe_of(key: Key, name: str) -> Json:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": key.namespace, "name": name}}
