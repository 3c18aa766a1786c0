"""The workers as the gateway knows them: one task watches each, everybody else reads immutable views.

Whether a worker takes requests is its own word (ready, not draining, the right role and model), less than a
second old, and our experience: a call that fails makes it a suspect until it answers a question asked after that.
Calls to a worker that has stopped answering are cancelled, so that their streams go on elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import grpc

from kvferry.core.ids import Incarnation, WorkerId
from kvferry.gateway.config import Endpoint, FleetConfig
from kvferry.gateway.routing import Candidates, Replica
from kvferry.rpc.channel import open_channel
from kvferry.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_admin_pb2, worker_admin_pb2_grpc

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.1
C = TypeVar("C", bound=grpc.aio.Call)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment."""

    endpoint: Endpoint
    role: str
    """That it is configured for."""
    why_not: str
    """Why it takes no requests; empty: it does."""
    in_flight: int = 0
    """Calls of this gateway's."""
    worker_id: WorkerId | None = None
    """`None` until it was heard of."""
    incarnation: Incarnation | None = None
    fingerprint: bytes = b""
    family: bytes = b""
    connector: str = ""
    domain: str = ""
    max_model_tokens: int = 0
    block_tokens: int = 0
    running: int = 0
    waiting: int = 0
    """Waiting for room or for blocks from a peer."""
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_quarantined: int = 0
    tiers: tuple[worker_admin_pb2.TierStatus, ...] = ()

    @property
    def takes_work(self) -> bool:
        """Whether requests may be sent to it."""
        return not self.why_not

    def as_replica(self) -> Replica:
        """For the router. What other gateways send is in the worker's own numbers, what we have just sent is not
        yet; the larger of the two counts."""
        load = max(self.in_flight, self.running + self.waiting)
        worker_id = self.worker_id or WorkerId(self.endpoint.address)
        reach = b"|".join((b"", self.connector.encode(), self.domain.encode()))
        family = self.family + reach if self.family else b""
        return Replica(self.endpoint.address, worker_id, self.fingerprint + reach, load, family)


class Hold:
    """One call of this gateway's to a worker. When the worker is lost, so is the call."""

    def __init__(self, member: "_Member") -> None:
        self.why_lost = ""
        """Why the call was cancelled here; empty: it was not."""
        self._member = member
        self._call: grpc.aio.Call | None = None

    def watch(self, call: C) -> C:
        """`call`, from now on cancelled when its worker is lost."""
        self._call = call
        return call

    def heard(self) -> None:
        """Note that the worker said something in this call, which proves that it lives."""
        self._member.num_heard += 1

    def lose(self, why: str) -> None:
        """Cancel the call; whoever awaits it finds `why_lost`."""
        if self._call is not None and not self._call.done():
            self.why_lost = why
            self._call.cancel()


class Fleet:
    """All configured workers. `start` and `stop` frame its life."""

    def __init__(self, config: FleetConfig, model: str) -> None:
        self._config = config
        roles = (("prefill", config.prefill), ("decode", config.decode), ("both", config.both))
        self._members = [_Member(endpoint, role, model) for role, endpoints in roles for endpoint in endpoints]
        self._by_address = {member.endpoint.address: member for member in self._members}
        self._tasks: list[asyncio.Task[None]] = []
        self._change = asyncio.Event()
        self.num_looks = 0
        """Answers and failures to answer so far, over all workers."""

    def start(self) -> None:
        """Begin to watch. Needs a running event loop."""
        for member in self._members:
            member.open()
            self._tasks.append(asyncio.create_task(self._watch(member), name=f"watch {member.endpoint.address}"))

    async def stop(self) -> None:
        """Stop watching and close all channels; calls still in flight are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self._members))

    def views(self) -> tuple[WorkerView, ...]:
        """Every worker, in the order of the configuration."""
        return tuple(member.view() for member in self._members)

    def view(self, address: str) -> WorkerView | None:
        """One worker; `None`: it is not configured."""
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
        """The Prefill service at a configured address."""
        return self._by_address[address].prefill

    def decode(self, address: str) -> "decode_pb2_grpc.DecodeAsyncStub":
        """The Decode service at a configured address."""
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

    def suspect(self, address: str, why: str) -> None:
        """Take a worker out at once because a call to it failed; it is asked right away whether it lives."""
        member = self._by_address[address]
        if not member.why_suspect:
            _log.warning("worker %s is suspect: %s", address, why)
        member.why_suspect = f"a call failed: {why}"
        member.num_suspicions += 1
        member.wake.set()
        self._announce()

    def may_recover(self) -> bool:
        """Whether a worker that can decode, though it may take no requests now, could do so in a moment."""
        return any(member.role != "prefill" and member.may_recover for member in self._members)

    async def wait_until(self, holds: Callable[["Fleet"], bool]) -> None:
        """Return when `holds(fleet)` does. It is looked at again at every change."""
        while not holds(self):
            await self._change.wait()

    async def _watch(self, member: "_Member") -> None:
        backoff, silent_looks = _FIRST_BACKOFF_SECONDS, 0
        while True:
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


class _Member:
    """One worker's channel and last word. Changed only on the event loop."""

    def __init__(self, endpoint: Endpoint, role: str, model: str) -> None:
        self.endpoint = endpoint
        self.role = role
        self.held: set[Hold] = set()
        self.num_heard = 0
        self.why_suspect = ""
        self.num_suspicions = 0
        self.wake = asyncio.Event()
        self._model = model
        self._status: worker_admin_pb2.StatusResponse | None = None
        self._why_lost = "not heard of yet"
        self._channels: list[grpc.aio.Channel] = []

    def open(self) -> None:
        # The question "are you there" must not wait behind a full connection, so it has its own.
        work, admin = open_channel(self.endpoint.address), open_channel(self.endpoint.admin_address)
        self._channels = [work, admin]
        self.prefill = prefill_pb2_grpc.PrefillStub(work)
        self.decode = decode_pb2_grpc.DecodeStub(work)
        self.admin = worker_admin_pb2_grpc.WorkerAdminStub(admin)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def lost(self, why: str) -> None:
        if self._status is not None:
            _log.warning("worker %s does not answer: %s", self.endpoint.address, why)
        self._status = None
        self._why_lost = f"does not answer: {why}"

    def lose_calls(self) -> None:
        if self.held:
            _log.warning("worker %s: giving up %d calls: it %s", self.endpoint.address, len(self.held), self._why_lost)
        for held in self.held:
            held.lose(self._why_lost)

    def saw(self, status: worker_admin_pb2.StatusResponse, *, clears_suspicion: bool) -> None:
        before = self.view().why_not
        self._status = status
        if clears_suspicion:
            self.why_suspect = ""
        after = self.view().why_not
        if before != after:
            _log.info("worker %s: %s", self.endpoint.address, after or f"takes {self.role} work")

    def view(self) -> WorkerView:
        status = self._status
        if status is None:
            return WorkerView(self.endpoint, self.role, self._why_lost, len(self.held))
        return WorkerView(
            endpoint=self.endpoint,
            role=self.role,
            why_not=self._refusal(status),
            in_flight=len(self.held),
            worker_id=WorkerId(status.identity.worker_id),
            incarnation=Incarnation(status.identity.incarnation),
            fingerprint=status.fingerprint,
            family=status.family,
            connector=status.connector,
            domain=status.domain,
            max_model_tokens=status.max_model_tokens,
            block_tokens=status.block_tokens,
            running=status.load.running,
            waiting=status.load.waiting + status.load.loading,
            blocks_total=status.load.blocks_total,
            blocks_free=status.load.blocks_free,
            blocks_quarantined=status.load.blocks_quarantined,
            tiers=tuple(status.tiers),
        )

    @property
    def may_recover(self) -> bool:
        # One that drains or is configured wrongly changes only by being started anew.
        return self._status is None or not self._settled_refusal(self._status)

    def _settled_refusal(self, status: worker_admin_pb2.StatusResponse) -> str:
        if status.role not in (self.role, "both"):
            return f"it is a {status.role} worker, configured as {self.role}"
        if status.model != self._model:
            return f"it serves {status.model!r}, not {self._model!r}"
        if status.draining:
            return "it drains"
        return ""

    def _refusal(self, status: worker_admin_pb2.StatusResponse) -> str:
        settled = self._settled_refusal(status)
        if settled:
            return settled
        if not status.ready:
            return "it is not ready"
        return self.why_suspect
