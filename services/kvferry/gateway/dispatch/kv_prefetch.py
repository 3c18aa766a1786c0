"""Starts KV prefetches: the decode worker fetches a long prompt's blocks while the prefill worker computes the prompt.

Prefetching is an optimization: a sample does not wait for its prefetch, nor does it fail if the prefetch fails.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.routes import Route, RouteReason
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.v1 import common_pb2, decode_pb2

_log = logging.getLogger(__name__)


class KvPrefetches:
    """The KV prefetches of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, min_tokens: int) -> None:
        """
        Args:
            fleet: the workers.
            min_tokens: minimum number of a prompt's tokens that the decode worker must lack for a prefetch; a shorter
                prompt is computed in one chunk, so no blocks are available early. 0 disables prefetching.
        """
        self._fleet = fleet
        self._min_tokens = min_tokens

    @contextmanager
    def running(self, run: SampleRun, route: Route, ticket_id: str) -> Iterator[None]:
        """Run a KV prefetch during the `with` block, in which the prompt is computed; no-op for short prompts.

        Args:
            run: the sample, which has no ticket yet.
            route: its route, with a prefill worker.
            ticket_id: id that the ticket will have.
        """
        request = self._request(run, route, ticket_id)
        if request is None:
            yield
            return
        stub = self._fleet.decode(route.decode.replica.address)
        call = stub.PrefetchKv(request)
        task = asyncio.ensure_future(_ended(call, run.request.caller.request_id))
        try:
            yield
        finally:
            call.cancel()  # the remaining blocks are fetched with the ticket
            task.cancel()

    def _request(self, run: SampleRun, route: Route, ticket_id: str) -> decode_pb2.PrefetchKvRequest | None:
        request = run.request
        if route.reason is not RouteReason.PAIR:  # a prefetch finds blocks by hash, and hashes depend on the layout
            return None
        if route.prefill is None or not self._min_tokens:
            return None
        if len(request.token_ids) - route.decode.cached.confirmed_tokens < self._min_tokens:
            return None
        view = self._fleet.view(route.prefill.replica.address)
        if view is None or view.incarnation is None or view.worker_id is None:
            return None
        return decode_pb2.PrefetchKvRequest(
            request_id=request.caller.request_id,
            token_ids=request.token_ids,
            scope=request.caller.scope,
            ticket_id=ticket_id,
            prefill=common_pb2.WorkerIdentity(worker_id=view.worker_id, incarnation=view.incarnation),
            prefill_address=view.endpoint.address,
        )


async def _ended(
    call: "grpc.aio.UnaryUnaryCall[decode_pb2.PrefetchKvRequest, decode_pb2.PrefetchKvResponse]", name: str
) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        _log.info("no KV prefetch: %s", error.details(), extra={"request_id": name})
