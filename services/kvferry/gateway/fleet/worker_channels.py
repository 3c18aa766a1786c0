"""Channels to one worker, opened again when the gateway's certificate is renewed, without ending a call in flight."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

import grpc

from kvferry.gateway.decide.config import Endpoint
from kvferry.rpc.channel import open_channel
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.rpc.tls.refusal_cause import may_be_tls, refusal_cause

_CLOSE_SECONDS = 5.0
"""Grace period in seconds of a channel that is being closed, for releases of offers and final statuses of streams."""
REPLACED_POLLS = 1_200
"""Status polls for which a replaced channel is kept, 10 minutes at the default interval: calls that do not keep it open
(KV prefetches, releases and subscriptions) end earlier or are repeated."""


@dataclass(slots=True)
class _Replaced:
    """Channels that get no new calls."""

    channels: tuple[grpc.aio.Channel, ...]
    calls: frozenset[object]
    """Calls that were in flight when the channels were replaced."""
    polls_left: int


class WorkerChannels:
    """The channel for requests and the channel for status polls of a worker. Used on the event loop only."""

    work: grpc.aio.Channel
    """Channel to the services for requests; set by `open`."""
    admin: grpc.aio.Channel
    """Channel to WorkerAdmin, so that status polls do not queue behind requests; set by `open`."""

    def __init__(self, endpoint: Endpoint, tls: PoolTls | None) -> None:
        """
        Args:
            endpoint: the worker and its address.
            tls: TLS of the pool; `None` for plain connections.
        """
        self._endpoint = endpoint
        self._tls = tls
        self._generation = 0
        self._replaced: list[_Replaced] = []

    def open(self) -> None:
        """Open both channels. Must be called on a running event loop."""
        self._generation = 0 if self._tls is None else self._tls.generation
        self.work = open_channel(self._endpoint.address, self._tls)
        self.admin = open_channel(self._endpoint.admin_address, self._tls)

    def renew(self, calls: Collection[object]) -> bool:
        """Open new channels if the certificate was renewed; return whether it was.

        Args:
            calls: calls in flight, for which the replaced channels are kept.
        """
        if self._tls is None or self._tls.generation == self._generation:
            return False
        self._replaced.append(_Replaced((self.work, self.admin), frozenset(calls), REPLACED_POLLS))
        self.open()
        return True

    async def close_replaced(self, calls: Collection[object]) -> None:
        """Close replaced channels whose calls have ended; called after each status poll.

        Args:
            calls: calls in flight now.
        """
        for replaced in tuple(self._replaced):
            replaced.polls_left -= 1
            if replaced.polls_left <= 0 and replaced.calls.isdisjoint(calls):
                self._replaced.remove(replaced)
                for channel in replaced.channels:
                    await channel.close()

    async def close(self, *, gracefully: bool) -> None:
        """Close all channels; if `gracefully`, after a grace period for calls in flight."""
        opened = [self.work, self.admin] if hasattr(self, "work") else []
        replaced, self._replaced = self._replaced, []
        for channel in (*opened, *(channel for each in replaced for channel in each.channels)):
            await channel.close(_CLOSE_SECONDS if gracefully else None)

    async def tls_cause(self, error: grpc.aio.AioRpcError) -> str:
        """Return the cause of a TLS failure after a failed status poll; empty if TLS did not fail."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or not may_be_tls(error.details() or ""):
            return ""
        files = None if self._tls is None else self._tls.files
        return await asyncio.to_thread(refusal_cause, self._endpoint.admin_address, files)
