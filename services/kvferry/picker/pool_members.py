"""The endpoints of a pool: fixed, or the ready pods of an InferencePool as the API server lists them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import quote

from kvferry.core.clock import Clock
from kvferry.core.errors import UsageError
from kvferry.gateway.decide.routing.discovery import Update
from kvferry.gateway.fleet.endpoint_slices import EndpointSlices
from kvferry.gateway.fleet.pool_api import ApiError, PoolApi
from kvferry.picker.config import PickerConfig
from kvferry.picker.decide.endpoints import EndpointStates
from kvferry.picker.decide.pool_pods import PodCache, PodSelection, pool_endpoint

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 1.0
_RELIST_SECONDS = 30.0
"""Interval at which the pool's selector and ports are read again."""
_GROUP = "inference.networking.k8s.io/v1"


class PoolPodsApi(PoolApi):
    """Requests to the API server about the pods of an InferencePool of the Gateway API."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spec = PodSelection("", ())

    def list_slices(self) -> Mapping[str, Any]:
        """Read the pool, and list its pods.

        Raises:
            ApiError: a request failed, or the pool has no selector or port.
        """
        name = f"/apis/{_GROUP}/namespaces/{self.pool.namespace}/inferencepools/{self.pool.name}"
        try:
            self.spec = PodSelection.read(self._ask("GET", name))
        except UsageError as error:
            raise ApiError(f"{self.pool}: {error.message}") from error
        return super().list_slices()

    def _slices(self, query: str) -> str:
        path = f"/api/v1/namespaces/{self.pool.namespace}/pods"
        return f"{path}?labelSelector={quote(self.spec.selector, safe='')}{query}"


class PoolMembers:
    """Updates the endpoints of one pool. `run` is a background task."""

    def __init__(
        self, config: PickerConfig, states: EndpointStates, clock: Clock, api: PoolPodsApi | None = None
    ) -> None:
        """
        Args:
            config: all settings.
            states: the endpoints, which are updated.
            clock: clock of retries.
            api: requests to the API server; `None` connects if the endpoints are those of a pool.
        """
        self._config = config
        self._states = states
        self._clock = clock
        self._api = api
        self._failure = ""
        self.is_known = False
        """Whether the endpoints were listed."""

    def connect(self) -> None:
        """List the fixed endpoints, or connect to the API server.

        Raises:
            UsageError: the cluster cannot be accessed.
        """
        if self._config.pool is None:
            self._states.follow(self._config.endpoints)
            self.is_known = True
        elif self._api is None:
            self._api = cast("PoolPodsApi", PoolPodsApi.connect(self._config.pool))

    async def run(self) -> None:
        """Follow the list until cancelled. A list that cannot be read keeps the last endpoints."""
        api = self._api
        while api is not None:
            source = EndpointSlices(api, self._clock, relist_seconds=_RELIST_SECONDS, cache=lambda: _cache_of(api))
            try:
                stream = cast("AsyncGenerator[Update, None]", source.updates())
                async with aclosing(stream) as updates:
                    async for update in updates:
                        self._take(update)
            except Exception as error:  # requests go on with the last endpoints
                _log.exception("following the pool failed unexpectedly; it is started again")
                self._note(f"{type(error).__name__}: {error}")
            await asyncio.sleep(_AGAIN_SECONDS)

    def _take(self, update: Update) -> None:
        if update.listings is not None:
            port = self._config.scrape.port
            self._states.follow([pool_endpoint(listing, port) for listing in update.listings])
            self.is_known = True
        self._note(update.failure)

    def _note(self, failure: str) -> None:
        if failure and failure != self._failure:
            _log.warning("the list of endpoints may be stale: %s", failure)
        elif self._failure and not failure:
            _log.info("the list of endpoints is current again")
        self._failure = failure

    def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
            self._api.close()


class _PoolPodCache(PodCache):
    """A cache whose ports are those that the API client read last."""

    def __init__(self, api: PoolPodsApi) -> None:
        super().__init__()
        self._api = api

    def replace(self, listed: Mapping[str, Any]) -> None:
        super().replace(listed)
        self.ports = self._api.spec.ports


def _cache_of(api: PoolPodsApi) -> PodCache:
    return _PoolPodCache(api)
