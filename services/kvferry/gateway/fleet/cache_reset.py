"""Reset of the prefix caches of all workers, and of the gateway's references to them."""

import asyncio
from collections.abc import Callable

import grpc

from kvferry.core.errors import Unavailable
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.v1.worker_admin_pb2 import ResetPrefixCacheRequest

_TIMEOUT_SECONDS = 30.0
"""Deadline of the calls; a worker resets its cache between two steps."""


class CacheReset:
    """Resets the prefix caches of a gateway's fleet."""

    def __init__(self, fleet: Fleet, forget: Callable[[], None]) -> None:
        """
        Args:
            fleet: the workers.
            forget: drops the gateway's own references to cached KV.
        """
        self._fleet = fleet
        self._forget = forget

    async def run(self) -> dict[str, int]:
        """Reset the cache of every worker; return the number of dropped blocks by worker address. Idempotent.

        Raises:
            Unavailable: a worker did not confirm; the message names it. The other workers were reset.
        """
        self._forget()
        addresses = [view.endpoint.address for view in self._fleet.views()]
        results = await asyncio.gather(*map(self._reset, addresses), return_exceptions=True)
        self._forget()  # a stream that ended meanwhile may have stored a ticket
        dropped: dict[str, int] = {}
        failed: list[str] = []
        for address, result in zip(addresses, results, strict=True):
            if isinstance(result, int):
                dropped[address] = result
            elif isinstance(result, grpc.aio.AioRpcError):
                failed.append(f"{address} ({result.code().name})")
            elif isinstance(result, KeyError):
                dropped[address] = 0  # the worker was removed, and its cache with it
            else:
                raise result
        if failed:
            raise Unavailable(
                f"{len(failed)} of {len(addresses)} workers did not confirm the reset: {', '.join(failed[:8])}; the "
                "others were reset; retry",
                reason="RESET_INCOMPLETE",
            )
        return dropped

    async def _reset(self, address: str) -> int:
        call = self._fleet.admin(address).ResetPrefixCache(ResetPrefixCacheRequest(), timeout=_TIMEOUT_SECONDS)
        return int((await call).num_blocks)
