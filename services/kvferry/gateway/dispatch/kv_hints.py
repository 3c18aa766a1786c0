"""Hints to workers where the KV of a prompt is: tickets of prior turns for prefill, prefetches for decode.

At the end of a stream a decode worker returns a ticket for the blocks that stay in its cache. They cover the prompt and
the generated tokens; no prefill worker has the KV of generated tokens. The ticket pins no pages; the reader verifies
their epochs. The gateway stores tickets by the hash of their last block and looks up the longest prefix of a new
prompt.

A prefetch lets the decode worker fetch a long prompt's blocks while the prefill worker computes the prompt. It is an
optimization: a sample does not wait for its prefetch, nor does it fail if the prefetch fails.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import BlockHash, Incarnation
from kvferry.gateway.decide.lifecycle.sample_run import SampleRun
from kvferry.gateway.decide.routing.cached_prefix import block_names
from kvferry.gateway.decide.routing.routes import Pick, Route, RouteReason
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.v1 import common_pb2, decode_pb2

_MAX_TURNS = 4096
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    address: str
    """Address of the worker that has the blocks."""
    incarnation: Incarnation
    sealed: bytes


class Turns:
    """The prior-turn tickets of one gateway. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, namers: BlockNamers) -> None:
        self._fleet = fleet
        self._namers = namers
        self._turns: OrderedDict[BlockHash, _Turn] = OrderedDict()

    def remember(self, run: SampleRun, address: str, sealed: bytes, num_tokens: int) -> None:
        """Store the ticket of a stream that has ended; it replaces the ticket of an equal prefix.

        Args:
            run: the sample, with its prompt and output.
            address: address of the worker that has the blocks.
            sealed: the ticket.
            num_tokens: number of leading tokens that the ticket covers.
        """
        view = self._fleet.view(address)
        if view is None or view.incarnation is None:
            return
        names = block_names(self._namers, run.request.caller.scope, view.as_replica(), run.token_ids[:num_tokens])
        if not names:
            return
        self._turns[names[-1]] = _Turn(address, view.incarnation, sealed)
        self._turns.move_to_end(names[-1])
        if len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)

    def clear(self) -> None:
        """Drop all tickets."""
        self._turns.clear()

    def find(self, run: SampleRun, pick: Pick) -> bytes:
        """Return the ticket of the longest prior turn that is a prefix of the prompt and that `pick` can read; empty if
        there is no such turn.

        Args:
            run: the sample.
            pick: worker that will read the KV.
        """
        if not self._turns:
            return b""
        request = run.request
        names = run.names.of(
            self._namers, request.caller.scope, pick.replica, request.token_ids[:-1], len(request.token_ids)
        )
        for name in reversed(names):
            turn = self._turns.get(name)
            if turn is None:
                continue
            view = self._fleet.view(turn.address)
            if view is None or not view.takes_work or view.incarnation != turn.incarnation:
                del self._turns[name]  # restarted or suspect: waiting for the worker would cost more than recomputing
                continue
            if view.as_replica().fingerprint == pick.replica.fingerprint:
                return turn.sealed
        return b""


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
