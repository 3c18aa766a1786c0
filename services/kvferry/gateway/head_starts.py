"""Lets the decode worker fetch a long prompt's blocks while the prefill worker still computes it.

Only a head start: the sample never waits for it, and whatever becomes of it is no concern of the sample's.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvferry.gateway.fleet import Fleet
from kvferry.gateway.routing import Route, RouteReason
from kvferry.gateway.trip import Trip
from kvferry.v1 import common_pb2, decode_pb2

_log = logging.getLogger(__name__)


class HeadStarts:
    """All head starts of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, least_tokens: int) -> None:
        """
        Args:
            least_tokens: shorter prompts are computed in one go, so there is nothing to fetch meanwhile; 0: never.
        """
        self._fleet = fleet
        self._least_tokens = least_tokens

    @contextmanager
    def running(self, trip: Trip, route: Route, ticket_id: str) -> Iterator[None]:
        """A head start within the `with` block, in which the prompt is computed, if it is worth one."""
        request = self._request(trip, route, ticket_id)
        if request is None:
            yield
            return
        stub = self._fleet.decode(route.decode.replica.address)
        call = stub.Prepare(request)
        task = asyncio.ensure_future(_ended(call, trip.request.request_id))
        try:
            yield
        finally:
            call.cancel()  # what is left is the ticket's business
            task.cancel()

    def _request(self, trip: Trip, route: Route, ticket_id: str) -> decode_pb2.PrepareRequest | None:
        asked = trip.request
        if route.reason is not RouteReason.PAIR:  # blocks are told of by name, and names differ with layouts
            return None
        if route.prefill is None or not self._least_tokens or len(asked.token_ids) < self._least_tokens:
            return None
        view = self._fleet.view(route.prefill.replica.address)
        if view is None or view.incarnation is None or view.worker_id is None:
            return None
        return decode_pb2.PrepareRequest(
            request_id=asked.request_id,
            token_ids=asked.token_ids,
            tenant=asked.tenant,
            ticket_id=ticket_id,
            prefill=common_pb2.WorkerIdentity(worker_id=view.worker_id, incarnation=view.incarnation),
            prefill_address=view.endpoint.address,
        )


async def _ended(
    call: "grpc.aio.UnaryUnaryCall[decode_pb2.PrepareRequest, decode_pb2.PrepareResponse]", name: str
) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        _log.info("no head start: %s", error.details(), extra={"request_id": name})
