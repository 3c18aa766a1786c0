"""The gateway's workers: one task polls each worker's status; other code reads immutable views.

The set of workers may change at any time (`Fleet.follow`). A worker that is no longer listed gets no new requests and
is polled until its last call has ended or it stops answering; then its channels are closed. `gateway.fleet.member` has
the state of a worker and its views. Calls to a worker that stopped answering are cancelled, so that their streams
resume on other workers.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import grpc

from kvferry.core.clock import Clock
from kvferry.core.errors import Unauthenticated
from kvferry.gateway.decide.config import FleetConfig
from kvferry.gateway.decide.flow.capacity import WorkerRoom
from kvferry.gateway.decide.generation_rule import GenerationRule
from kvferry.gateway.decide.routing.discovery import Listing
from kvferry.gateway.decide.routing.routes import Candidates, Replica
from kvferry.gateway.fleet.member import Hold, Member, WorkerView
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1 import decode_pb2_grpc, kv_events_pb2_grpc, prefill_pb2_grpc, worker_admin_pb2_grpc

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.1


class Fleet:
    """All workers of one gateway. Call `start` before use and `stop` at the end."""

    def __init__(
        self,
        config: FleetConfig,
        model: str,
        keys: WorkerKeys | None = None,
        tls: PoolTls | None = None,
        *,
        clock: Clock,
    ) -> None:
        """
        Args:
            config: limits and intervals.
            model: name of the model that workers must serve.
            keys: sign the calls to workers; `None` for workers that do not check them, in tests.
            tls: TLS of the pool; `None` for plain connections to workers.
            clock: gives the time at which a status is received.
        """
        self.rule = GenerationRule()
        """The pool's pause and weights."""
        self._tls = tls
        self._config = config
        self._model = model
        self._keys = keys
        self._clock = clock
        self._members: list[Member] = []
        self._by_address: dict[str, Member] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._is_running = False
        self._change = asyncio.Event()
        self.num_changes = 0
        """Number of changes of the fleet: new listings, statuses, suspicions."""
        self.num_polls = 0
        """Number of completed status polls of all workers, including failed polls."""
        self.follow(static_listings(config))

    def start(self) -> None:
        """Start polling all workers. Must be called on a running event loop."""
        self._is_running = True
        for member in self._members:
            self._begin(member)

    async def stop(self) -> None:
        """Stop polling and close all channels; calls still in flight are cancelled."""
        self._is_running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, listings: Iterable[Listing]) -> None:
        """Replace the set of workers. A worker with the same name, role and address as before keeps its state; a
        listing with a new name at a known address is a new worker."""
        listed = {listing.key: listing for listing in listings}
        known = {member.listing.key: member for member in self._members}
        addresses = {listing.endpoint.address: listing.name for listing in listed.values()}
        for key, member in known.items():
            listing = listed.get(key)
            if listing is not None:
                member.listing, member.has_left = listing, False
            elif not member.has_left:
                _log.info("worker %s (%s) removed: no longer listed", member.listing.name, member.address)
                member.has_left = True
                member.wake.set()
                if not self._is_running:
                    self._forget(member)
            if member.has_left and addresses.get(member.address, member.listing.name) != member.listing.name:
                member.lose_calls("was replaced by another worker at its address")
        for key, listing in listed.items():
            if key in known:
                continue
            member = Member(
                listing, self._model, self._keys,
                stalled_polls=self._config.stalled_polls, tls=self._tls, rule=self.rule,
            )  # fmt: skip
            self._members.append(member)
            if self._is_running:
                _log.info("worker %s (%s) added", listing.name, listing.endpoint.address)
                self._begin(member)
        self._by_address |= {member.address: member for member in self._members if not member.has_left}
        self._announce()

    def views(self) -> tuple[WorkerView, ...]:
        """Return a view of each worker, in the order in which they were added."""
        return tuple(member.view() for member in self._members)

    def view(self, address: str) -> WorkerView | None:
        """Return a view of the worker at `address`; `None` if there is no such worker."""
        member = self._by_address.get(address)
        return None if member is None else member.view()

    def candidates(self, excluded: frozenset[str] = frozenset()) -> Candidates:
        """Return the workers that accept requests, by role, without the addresses in `excluded`."""
        by_role: dict[str, list[Replica]] = {"prefill": [], "decode": [], "both": []}
        for member in self._members:
            if member.view().takes_work and member.address not in excluded:
                by_role[member.listing.role].append(member.replica())
        return Candidates(**{role: tuple(replicas) for role, replicas in by_role.items()})

    def context_tokens(self) -> int | None:
        """Return the smallest context length in tokens among workers that accept requests; `None` if no workers do."""
        return min((view.max_model_tokens for view in self.views() if view.takes_work), default=None)

    def prefill(self, address: str) -> "prefill_pb2_grpc.PrefillAsyncStub":
        """Return the stub of the Prefill service at `address`.

        Raises:
            KeyError: the worker was removed.
        """
        return self._by_address[address].prefill

    def decode(self, address: str) -> "decode_pb2_grpc.DecodeAsyncStub":
        """Return the stub of the Decode service at `address`.

        Raises:
            KeyError: the worker was removed.
        """
        return self._by_address[address].decode

    def admin(self, address: str) -> "worker_admin_pb2_grpc.WorkerAdminAsyncStub":
        """Return the stub of the WorkerAdmin service of the worker at `address`.

        Raises:
            KeyError: the worker was removed.
        """
        return self._by_address[address].admin

    def events(self, address: str) -> "kv_events_pb2_grpc.KvEventsAsyncStub":
        """Return the stub of the KvEvents service at `address`.

        Raises:
            KeyError: the worker was removed.
        """
        return self._by_address[address].events

    @contextmanager
    def hold(self, address: str) -> Iterator[Hold]:
        """Count one call to `address` as in flight during the `with` block; it is cancelled if the worker is lost."""
        member = self._by_address[address]
        held = Hold(member)
        member.held.add(held)
        try:
            yield held
        finally:
            member.held.discard(held)
            if member.has_left:
                member.wake.set()

    def suspect(self, address: str, why: str) -> None:
        """Stop sending requests to a worker because a call to it failed, and poll its status immediately.

        Args:
            address: address of the worker.
            why: the failure in words, for logs and reports.
        """
        member = self._by_address.get(address)
        if member is None:  # the worker has been removed
            return
        if not member.why_suspect:
            _log.warning("worker %s is suspect: %s", address, why)
        member.why_suspect = f"a call failed: {why}"
        member.num_suspicions += 1
        member.wake.set()
        self._announce()

    def poll_now(self) -> None:
        """Poll the status of all workers at once, because it has changed."""
        for member in self._members:
            member.wake.set()

    def may_recover(self) -> bool:
        """Return whether a worker that can decode may accept requests again without a restart."""
        return any(member.listing.role != "prefill" and member.may_recover for member in self._members)

    async def wait_until(self, holds: Callable[["Fleet"], bool]) -> None:
        """Return when `holds(fleet)` is true; it is evaluated after every change of the fleet."""
        while not holds(self):
            await self._change.wait()

    async def next_change(self) -> None:
        """Return at the next change of the fleet."""
        await self._change.wait()

    def rooms(self) -> dict[str, WorkerRoom]:
        """Return the room of each worker that accepts requests, by address."""
        found = ((member.address, member.room()) for member in self._members)
        return {address: room for address, room in found if room is not None}

    def _begin(self, member: Member) -> None:
        member.open()
        self._tasks[member] = asyncio.create_task(self._keep(member), name=f"watch {member.address}")

    def _forget(self, member: Member) -> None:
        self._members.remove(member)
        self._tasks.pop(member, None)
        if self._by_address.get(member.address) is member:
            del self._by_address[member.address]
        self._announce()

    async def _keep(self, member: Member) -> None:
        """Poll `member` until it is no longer listed and has no calls in flight, then close its channels."""
        try:
            await self._watch(member)
            self._forget(member)
        finally:
            await member.close(gracefully=member.has_left and self._is_running)

    async def _watch(self, member: Member) -> None:
        backoff, silent_polls = _FIRST_BACKOFF_SECONDS, 0
        while not (member.has_left and not member.held):
            member.wake.clear()
            suspicions, answers = member.num_suspicions, member.num_answers
            failure: grpc.aio.AioRpcError | None = None
            try:
                status = await member.status(self._config.status_timeout_seconds)
            except (grpc.aio.AioRpcError, Unauthenticated) as error:
                if isinstance(error, Unauthenticated):
                    member.lost(error.message)
                else:
                    failure = error
                    member.lost(f"{error.code().name}: {error.details()}")
                # A worker that still sends tokens is busy, not lost, even if its status is late.
                silent_polls = silent_polls + 1 if member.num_answers == answers else 0
                if silent_polls >= self._config.silent_polls:
                    member.lose_calls()
                delay = backoff
                backoff = min(2 * backoff, self._config.max_backoff_seconds)
            else:
                member.saw(status, self._clock.monotonic(), clears_suspicion=member.num_suspicions == suspicions)
                if member.is_stalled:
                    member.lose_calls("its engine makes no progress")
                delay = self._config.status_interval_seconds
                backoff, silent_polls = _FIRST_BACKOFF_SECONDS, 0
            self.num_polls += 1
            self._announce()
            if failure is not None and (cause := await member.channels.tls_cause(failure)):
                member.lost(cause)
                self._announce()
            with suppress(TimeoutError):
                # Not asyncio.wait_for: before Python 3.12 it can lose a cancellation that coincides with the event.
                async with asyncio.timeout(delay):
                    await member.wake.wait()

    def _announce(self) -> None:
        self.num_changes += 1
        self._change.set()
        self._change = asyncio.Event()


def static_listings(config: FleetConfig) -> Iterator[Listing]:
    """Yield the workers in `config` as listings without pods."""
    for role, endpoints in (("prefill", config.prefill), ("decode", config.decode), ("both", config.both)):
        for endpoint in endpoints:
            yield Listing(endpoint.address, role, endpoint)
