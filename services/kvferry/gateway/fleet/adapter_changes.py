"""Loads and removes adapters on all workers of the fleet."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import grpc

from kvferry.core.errors import KvferryError, Unavailable
from kvferry.core.ids import AdapterId
from kvferry.gateway.decide.routing.routes import served_adapters
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.rpc.errors import error_from_rpc
from kvferry.v1.worker_admin_pb2 import AdapterResponse, LoadAdapterRequest, UnloadAdapterRequest

_TIMEOUT_SECONDS = 60.0
"""Deadline of the calls; a worker reads and packs the adapter."""
_SEEN_SECONDS = 5.0
"""Time for the workers' next statuses to show the change."""


class AdapterChanges:
    """Changes the adapters of a gateway's fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: tuple[AdapterId, ...] = ()

    def served(self) -> tuple[AdapterId, ...]:
        """Return the adapters that requests may currently name. While no worker can generate, those of the last ones:
        their requests wait as others do, instead of naming an unknown model."""
        candidates = self._fleet.candidates()
        if candidates.decode or candidates.both:
            self._last = served_adapters(candidates)
        return self._last

    async def load(self, name: str, path: str) -> Mapping[str, str]:
        """Load an adapter on every worker; return its digest by worker address. Idempotent.

        Args:
            name: name of the adapter.
            path: the adapter's folder on the workers.

        Raises:
            KvferryError: a worker refused it; the message names the worker. The others may have loaded it.
        """
        request = LoadAdapterRequest(name=name, path=path)
        found = await self._on_all(
            lambda address: self._fleet.admin(address).LoadAdapter(request, timeout=_TIMEOUT_SECONDS)
        )
        versions = {AdapterId(one.adapter.name, one.adapter.digest) for one in found.values()}
        await self._seen(lambda: not versions.isdisjoint(self.served()))
        return {address: one.adapter.digest.hex() for address, one in found.items()}

    async def unload(self, name: str) -> Mapping[str, str]:
        """Remove an adapter from every worker; return the digest that it had by worker address.

        Raises:
            KvferryError: a worker refused it, for example because it has no adapter of this name; the message names the
                worker. The others may have removed it.
        """
        request = UnloadAdapterRequest(name=name)
        found = await self._on_all(
            lambda address: self._fleet.admin(address).UnloadAdapter(request, timeout=_TIMEOUT_SECONDS)
        )
        await self._seen(lambda: all(adapter.name != name for adapter in self.served()))
        return {address: one.adapter.digest.hex() for address, one in found.items()}

    async def _on_all(self, call: Callable[[str], Awaitable[AdapterResponse]]) -> dict[str, AdapterResponse]:
        addresses = [view.endpoint.address for view in self._fleet.views()]
        if not addresses:
            raise Unavailable("there are no workers; start one, then retry", retry_after_seconds=1.0)
        results = await asyncio.gather(*map(call, addresses), return_exceptions=True)
        found: dict[str, AdapterResponse] = {}
        failed: list[tuple[str, KvferryError]] = []
        for address, result in zip(addresses, results, strict=True):
            if isinstance(result, grpc.aio.AioRpcError):
                failed.append((address, error_from_rpc(result)))
            elif isinstance(result, KeyError):
                continue  # the worker was removed meanwhile
            elif isinstance(result, BaseException):
                raise result
            else:
                found[address] = result
        if failed:
            address, error = failed[0]
            error.message = f"{len(failed)} of {len(addresses)} workers refused, {address}: {error.message}"
            raise error
        return found

    async def _seen(self, is_seen: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_SECONDS):
                await self._fleet.wait_until(lambda _: is_seen())
