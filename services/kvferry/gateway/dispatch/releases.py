"""Releases offers at prefill workers, in background tasks.

A cancelled request cannot wait for its own clean-up, so the clean-up runs here. Each task has a time limit; if it
fails, the offer's lease expires instead.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from kvferry.core.ids import RequestId
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun, SealedTicket
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.v1 import prefill_pb2

_log = logging.getLogger(__name__)
_TRIES = 3
_PAUSE_SECONDS = 0.2

PrefillCall = grpc.aio.UnaryUnaryCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
Sleep = Callable[[float], Awaitable[None]]
TicketDrop = Callable[[SampleRun, str], None]


class Releases:
    """Background clean-up tasks of one dispatcher, which awaits `drain` before it stops."""

    def __init__(self, fleet: Fleet, instruments: GatewayInstruments, timeout_seconds: float, sleep: Sleep) -> None:
        """
        Args:
            fleet: the workers.
            instruments: metrics, which count releases by outcome.
            timeout_seconds: time limit of a call in seconds.
            sleep: called to wait between attempts.
        """
        self._fleet = fleet
        self._instruments = instruments
        self._timeout_seconds = timeout_seconds
        self._sleep = sleep
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Number of clean-up tasks in flight."""
        return len(self._tasks)

    def release(self, ticket: SealedTicket, request_id: RequestId, reason: str) -> None:
        """Release the offer of `ticket` at its prefill worker, in the background.

        Args:
            ticket: ticket of the offer.
            request_id: id of the request.
            reason: reason that the worker records.
        """
        self._spawn(self._release(ticket, request_id, reason))

    def reap(self, call: PrefillCall, ticket: SealedTicket, request_id: RequestId) -> None:
        """Cancel a prefill call and release the offer of `ticket`, which the worker may already have created.

        Args:
            call: the call that creates the offer.
            ticket: ticket of the offer.
            request_id: id of the request.
        """
        call.cancel()
        self._spawn(self._release(ticket, request_id, "client_gone"))

    def settle(self, call: grpc.aio.Call) -> None:
        """Wait in the background until a call whose last message has been received is closed."""
        self._spawn(self._settle(call))

    async def drain(self) -> None:
        """Return when all clean-up tasks have ended; each task has a time limit."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, ticket: SealedTicket, request_id: RequestId, reason: str) -> None:
        request = prefill_pb2.ReleaseRequest(ticket_id=ticket.ticket_id, reason=reason)
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                await self._fleet.prefill(ticket.address).Release(request, timeout=self._timeout_seconds)
            except KeyError:  # the worker was removed together with its offers
                self._instruments.releases.labels("lost").inc()
                return
            except grpc.aio.AioRpcError as error:
                if last:
                    _log.warning(
                        "offer of worker %s not released: %s; its pages are freed when the lease expires",
                        ticket.address,
                        error.code().name,
                        extra={"request_id": request_id, "ticket": ticket.ticket_id},
                    )
                    self._instruments.releases.labels("lost").inc()
                    return
                await self._sleep(_PAUSE_SECONDS)
            else:
                self._instruments.releases.labels("released").inc()
                return

    async def _settle(self, call: grpc.aio.Call) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await call.code()
        except TimeoutError:
            call.cancel()
