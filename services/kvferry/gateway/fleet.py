"""The workers as the gateway knows them: one task watches each, everybody else reads immutable views.

Who there is may change at any time (`Fleet.follow`). A worker that is no longer listed gets no new requests at once
and is watched until the last call to it has ended or it stops answering; then everything that was made for it ends.
A worker's state and the views of it are in `gateway.member`. Calls to one that has stopped answering are cancelled, so
that their streams go on elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import grpc

from kvferry.gateway.config import FleetConfig
from kvferry.gateway.discovery import Listing
from kvferry.gateway.member import Hold, Member, WorkerView
from kvferry.gateway.routing import Candidates
from kvferry.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_admin_pb2

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.1


class Fleet:
    """All workers there are. `start` and `stop` frame its life."""

    def __init__(self, config: FleetConfig, model: str) -> None:
        self._config = config
        self._model = model
        self._members: list[Member] = []
        self._by_address: dict[str, Member] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._is_running = False
        self._change = asyncio.Event()
        self.num_looks = 0
        """Answers and failures to answer so far, over all workers."""
        self.follow(static_listings(config))

    def start(self) -> None:
        """Begin to watch. Needs a running event loop."""
        self._is_running = True
        for member in self._members:
            self._begin(member)

    async def stop(self) -> None:
        """Stop watching and close all channels; calls still in flight are cancelled."""
        self._is_running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, listings: Iterable[Listing]) -> None:
        """From now on these are the workers. One that stays listed under the same name, role and address keeps
        everything that is known of it; another name at an old address is another worker."""
        listed = {listing.key: listing for listing in listings}
        known = {member.listing.key: member for member in self._members}
        addresses = {listing.endpoint.address: listing.name for listing in listed.values()}
        for key, member in known.items():
            listing = listed.get(key)
            if listing is not None:
                member.listing, member.has_left = listing, False
            elif not member.has_left:
                _log.info("worker %s (%s) left", member.listing.name, member.address)
                member.has_left = True
                member.wake.set()
                if not self._is_running:
                    self._forget(member)
            if member.has_left and addresses.get(member.address, member.listing.name) != member.listing.name:
                member.lose_calls("is gone: its address is another worker's now")
        for key, listing in listed.items():
            if key in known:
                continue
            member = Member(listing, self._model)
            self._members.append(member)
            if self._is_running:
                _log.info("worker %s (%s) joined", listing.name, listing.endpoint.address)
                self._begin(member)
        self._by_address |= {member.address: member for member in self._members if not member.has_left}
        self._announce()

    def views(self) -> tuple[WorkerView, ...]:
        """Every worker, those last that came last."""
        return tuple(member.view() for member in self._members)

    def view(self, address: str) -> WorkerView | None:
        """One worker; `None`: there is none at this address."""
        member = self._by_address.get(address)
        return None if member is None else member.view()

    def candidates(self, excluded: frozenset[str] = frozenset()) -> Candidates:
        """Who takes requests, without the addresses in `excluded`."""
        usable = [view for view in self.views() if view.takes_work and view.endpoint.address not in excluded]
        by_role = {
            role: tuple(view.as_replica() for view in usable if view.role == role)
            for role in ("prefill", "decode", "both")
        }
        return Candidates(**by_role)

    def context_tokens(self) -> int | None:
        """The smallest context among workers that take requests; `None` when there are none."""
        return min((view.max_model_tokens for view in self.views() if view.takes_work), default=None)

    def prefill(self, address: str) -> "prefill_pb2_grpc.PrefillAsyncStub":
        """The Prefill service at a worker's address.

        Raises:
            KeyError: no worker is there any more.
        """
        return self._by_address[address].prefill

    def decode(self, address: str) -> "decode_pb2_grpc.DecodeAsyncStub":
        """The Decode service at a worker's address.

        Raises:
            KeyError: no worker is there any more.
        """
        return self._by_address[address].decode

    @contextmanager
    def hold(self, address: str) -> Iterator[Hold]:
        """Count one call to `address` as in flight, and lose it with its worker."""
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
        """Take a worker out at once because a call to it failed; it is asked right away whether it lives."""
        member = self._by_address.get(address)
        if member is None:  # it left meanwhile
            return
        if not member.why_suspect:
            _log.warning("worker %s is suspect: %s", address, why)
        member.why_suspect = f"a call failed: {why}"
        member.num_suspicions += 1
        member.wake.set()
        self._announce()

    def may_recover(self) -> bool:
        """Whether a worker that can decode, though it may take no requests now, could do so in a moment."""
        return any(member.listing.role != "prefill" and member.may_recover for member in self._members)

    async def wait_until(self, holds: Callable[["Fleet"], bool]) -> None:
        """Return when `holds(fleet)` does. It is looked at again at every change."""
        while not holds(self):
            await self._change.wait()

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
        """Watch `member` until it has left and owes nothing, then end what was made for it."""
        try:
            await self._watch(member)
            self._forget(member)
        finally:
            await member.close(politely=member.has_left and self._is_running)

    async def _watch(self, member: Member) -> None:
        backoff, silent_looks = _FIRST_BACKOFF_SECONDS, 0
        while not (member.has_left and not member.held):
            member.wake.clear()
            suspicions, heard = member.num_suspicions, member.num_heard
            request = worker_admin_pb2.StatusRequest()
            try:
                status = await member.admin.Status(request, timeout=self._config.status_timeout_seconds)
            except grpc.aio.AioRpcError as error:
                member.lost(f"{error.code().name}: {error.details()}")
                # A worker whose tokens come is only too busy to answer, however long that takes.
                silent_looks = silent_looks + 1 if member.num_heard == heard else 0
                if silent_looks >= self._config.silent_looks:
                    member.lose_calls()
                delay = backoff
                backoff = min(2 * backoff, self._config.max_backoff_seconds)
            else:
                member.saw(status, clears_suspicion=member.num_suspicions == suspicions)
                delay = self._config.status_interval_seconds
                backoff, silent_looks = _FIRST_BACKOFF_SECONDS, 0
            self.num_looks += 1
            self._announce()
            with suppress(TimeoutError):
                # Not asyncio.wait_for: until Python 3.12 it loses a cancellation that comes together with the wake.
                async with asyncio.timeout(delay):
                    await member.wake.wait()

    def _announce(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def static_listings(config: FleetConfig) -> Iterator[Listing]:
    """The workers that a configuration lists."""
    for role, endpoints in (("prefill", config.prefill), ("decode", config.decode), ("both", config.both)):
        for endpoint in endpoints:
            yield Listing(endpoint.address, role, endpoint)
