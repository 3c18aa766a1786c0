"""One worker as the gateway knows it: channels, last word, the calls to it; and the view of it that others read.

Whether it takes requests is its own word (ready, not draining, the right role and model), what the pool says of it
(it is being stopped, it left), and our experience: a call that failed makes it a suspect.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import TypeVar

import grpc

from kvferry.core.ids import Incarnation, WorkerId
from kvferry.gateway.config import Endpoint
from kvferry.gateway.discovery import Listing
from kvferry.gateway.routing import Replica
from kvferry.rpc.channel import open_channel
from kvferry.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_admin_pb2, worker_admin_pb2_grpc

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
"""For what is still owed over a channel that closes: an offer's release, a stream's last status."""
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
    name: str = ""
    """Of its pod, or its address where nobody named it."""
    worker_id: WorkerId | None = None
    """`None` until it was heard of."""
    incarnation: Incarnation | None = None
    fingerprint: bytes = b""
    family: bytes = b""
    connector: str = ""
    domain: str = ""
    model_digest: str = ""
    max_model_tokens: int = 0
    block_tokens: int = 0
    running: int = 0
    waiting: int = 0
    """Waiting for room or for blocks from a peer."""
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_quarantined: int = 0
    tickets_offered: int = 0
    tickets_claimed: int = 0
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

    def __init__(self, member: "Member") -> None:
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


class Member:
    """One worker's channel and last word. Changed only on the event loop."""

    def __init__(self, listing: Listing, model: str) -> None:
        self.listing = listing
        """As the fleet's source last listed it."""
        self.has_left = False
        """The source lists it no more: it ends with the last of its calls."""
        self.held: set[Hold] = set()
        self.num_heard = 0
        self.why_suspect = ""
        self.num_suspicions = 0
        self.wake = asyncio.Event()
        self._model = model
        self._status: worker_admin_pb2.StatusResponse | None = None
        self._why_lost = "not heard of yet"
        self._channels: list[grpc.aio.Channel] = []

    @property
    def address(self) -> str:
        """Of its work."""
        return self.listing.endpoint.address

    def open(self) -> None:
        """Make its channels. Needs a running event loop."""
        # The question "are you there" must not wait behind a full connection, so it has its own.
        work, admin = open_channel(self.address), open_channel(self.listing.endpoint.admin_address)
        self._channels = [work, admin]
        self.prefill = prefill_pb2_grpc.PrefillStub(work)
        self.decode = decode_pb2_grpc.DecodeStub(work)
        self.admin = worker_admin_pb2_grpc.WorkerAdminStub(admin)

    async def close(self, *, politely: bool) -> None:
        """Close its channels; `politely`: once what is still owed over them is done."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close(_CLOSE_SECONDS if politely else None)

    def lost(self, why: str) -> None:
        """It did not answer."""
        if self._status is not None:
            _log.warning("worker %s does not answer: %s", self.address, why)
        self._status = None
        self._why_lost = f"does not answer: {why}"

    def lose_calls(self, why: str = "") -> None:
        """Cancel all calls to it, so that their streams go on elsewhere."""
        why = why or self._why_lost
        if self.held:
            _log.warning("worker %s: giving up %d calls: it %s", self.address, len(self.held), why)
        for held in tuple(self.held):
            held.lose(why)

    def saw(self, status: worker_admin_pb2.StatusResponse, *, clears_suspicion: bool) -> None:
        """It answered."""
        before = self.view().why_not
        self._status = status
        if clears_suspicion:
            self.why_suspect = ""
        after = self.view().why_not
        if before != after:
            _log.info("worker %s: %s", self.address, after or f"takes {self.listing.role} work")

    def view(self) -> WorkerView:
        """It, now."""
        status, listing = self._status, self.listing
        if status is None:
            why_not = self._pool_refusal() or self._why_lost
            return WorkerView(listing.endpoint, listing.role, why_not, len(self.held), listing.name)
        return WorkerView(
            endpoint=listing.endpoint,
            role=listing.role,
            why_not=self._refusal(status),
            in_flight=len(self.held),
            name=listing.name,
            worker_id=WorkerId(status.identity.worker_id),
            incarnation=Incarnation(status.identity.incarnation),
            fingerprint=status.fingerprint,
            family=status.family,
            connector=status.connector,
            domain=status.domain,
            model_digest=status.model_digest,
            max_model_tokens=status.max_model_tokens,
            block_tokens=status.block_tokens,
            running=status.load.running,
            waiting=status.load.waiting + status.load.loading,
            blocks_total=status.load.blocks_total,
            blocks_free=status.load.blocks_free,
            blocks_quarantined=status.load.blocks_quarantined,
            tickets_offered=status.load.tickets_offered,
            tickets_claimed=status.load.tickets_claimed,
            tiers=tuple(status.tiers),
        )

    @property
    def may_recover(self) -> bool:
        """Whether it could take requests in a moment, though it may not now."""
        # One that drains or is configured wrongly changes only by being started anew.
        if self._pool_refusal():
            return False
        return self._status is None or not self._settled_refusal(self._status)

    def _pool_refusal(self) -> str:
        if self.has_left:
            return "it left the pool"
        return "it is being stopped" if self.listing.stopping else ""

    def _settled_refusal(self, status: worker_admin_pb2.StatusResponse) -> str:
        role = self.listing.role
        if status.role not in (role, "both"):
            return f"it is a {status.role} worker, configured as {role}"
        if status.model != self._model:
            return f"it serves {status.model!r}, not {self._model!r}"
        if status.draining:
            return "it drains"
        return ""

    def _refusal(self, status: worker_admin_pb2.StatusResponse) -> str:
        settled = self._pool_refusal() or self._settled_refusal(status)
        if settled:
            return settled
        if not status.ready:
            return "it is not ready"
        return self.why_suspect
