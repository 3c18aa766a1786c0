"""A worker of the fleet: its channels, latest status, calls in flight, and immutable views of these.

Whether it accepts requests depends on its status (ready, not draining, matching role and model), on the pool
(terminating, removed) and on recent calls: a failed call makes it suspect until its next status.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc

from kvferry.core.errors import Unauthenticated
from kvferry.core.ids import AdapterId, Incarnation, WorkerId
from kvferry.core.load import WorkerLoad
from kvferry.core.pausing import PauseState
from kvferry.gateway.decide.config import Endpoint
from kvferry.gateway.decide.flow.capacity import WorkerRoom
from kvferry.gateway.decide.generation_rule import GenerationRule, PoolWeights
from kvferry.gateway.decide.routing.discovery import Listing
from kvferry.gateway.decide.routing.routes import Place, Replica
from kvferry.gateway.fleet.stall_detector import StallDetector
from kvferry.gateway.fleet.worker_channels import WorkerChannels
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.rpc.access.call_keys import CallSigner
from kvferry.rpc.access.signed_channel import signed
from kvferry.rpc.errors import error_from_rpc
from kvferry.rpc.pause_wire import pause_from_wire
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.rpc.worker_wire import load_from_wire
from kvferry.v1 import (
    common_pb2,
    decode_pb2_grpc,
    kv_events_pb2_grpc,
    prefill_pb2_grpc,
    worker_admin_pb2,
    worker_admin_pb2_grpc,
)

_log = logging.getLogger(__name__)
_NONCE_BYTES = 16
_MAX_REASON_CHARS = 300
C = TypeVar("C", bound=grpc.aio.Call)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Immutable snapshot of a worker."""

    endpoint: Endpoint
    role: str
    """Role of the worker according to its listing."""
    why_not: str
    """Reason why the worker accepts no requests; empty if it accepts them."""
    in_flight: int = 0
    """Number of calls in flight from this gateway to the worker."""
    name: str = ""
    """Pod name; the worker's address if it has no pod."""
    worker_id: WorkerId | None = None
    """The worker's stable name; `None` until its first status is received."""
    incarnation: Incarnation | None = None
    fingerprint: bytes = b""
    family: bytes = b""
    connector: str = ""
    domain: str = ""
    model_digest: str = ""
    max_model_tokens: int = 0
    block_tokens: int = 0
    load: WorkerLoad = WorkerLoad()  # noqa: RUF009  frozen
    reported_at: float = 0.0
    """Time at which `load` was received, in monotonic seconds."""
    device: str = ""
    """`cpu`, or the name of the worker's GPU; empty if it is not known."""
    is_staged: bool = False
    """Whether peers and tiers access the worker's KV through host memory rather than in the device's pages."""
    place: Place = Place()  # noqa: RUF009  frozen
    tiers: tuple[worker_admin_pb2.TierStatus, ...] = ()
    adapters: frozenset[AdapterId] = frozenset()
    """Adapter versions that new requests may use."""
    retired_adapters: frozenset[AdapterId] = frozenset()
    """Adapter versions that only requests already started with them may use."""
    adapter_failures: Mapping[str, str] = field(default_factory=dict)
    """Why an adapter of the worker's list is not loaded, by name."""
    pause: PauseState = PauseState()  # noqa: RUF009  frozen
    is_pause_settled: bool = False
    weights: PoolWeights = PoolWeights()  # noqa: RUF009  frozen

    @property
    def takes_work(self) -> bool:
        """Whether the worker accepts requests."""
        return not self.why_not

    def as_replica(self) -> Replica:
        """Return the worker as a candidate for routing. The reported load includes other gateways' calls but not this
        gateway's newest ones, so `load` is the larger of the two counts."""
        load = max(self.in_flight, self.load.num_requests)
        worker_id = self.worker_id or WorkerId(self.endpoint.address)
        reach = b"|".join((b"", self.connector.encode(), self.domain.encode()))
        family = self.family + reach if self.family else b""
        return Replica(
            self.endpoint.address,
            worker_id,
            self.fingerprint + reach,
            load,
            family,
            layout_fingerprint=self.fingerprint,
            block_tokens=self.block_tokens,
            adapters=self.adapters,
            retired_adapters=self.retired_adapters,
            tokens_to_compute=self.load.tokens_to_compute,
            reported_at=self.reported_at,
            blocks_total=self.load.blocks_total,
            blocks_free=self.load.blocks_free,
            blocks_cached=self.load.blocks_cached,
            place=self.place,
        )


class Hold:
    """A call in flight from this gateway to a worker; cancelled when the worker is lost."""

    def __init__(self, member: "Member") -> None:
        self.why_lost = ""
        """Reason why the gateway cancelled the call; empty if it did not."""
        self._member = member
        self._call: grpc.aio.Call | None = None

    def watch(self, call: C) -> C:
        """Register `call` for cancellation when the worker is lost."""
        self._call = call
        return call

    def note_answer(self) -> None:
        """Count a received message of this call as a sign that the worker is alive."""
        self._member.num_answers += 1

    def lose(self, why: str) -> None:
        """Cancel the call and set `why_lost`."""
        if self._call is not None and not self._call.done():
            self.why_lost = why
            self._call.cancel()


class Member:
    """Channels and latest status of a worker. Changed only on the event loop."""

    def __init__(
        self,
        listing: Listing,
        model: str,
        keys: WorkerKeys | None,
        *,
        stalled_polls: int,
        tls: PoolTls | None = None,
        rule: GenerationRule | None = None,
    ) -> None:
        """
        Args:
            listing: address and role of the worker, from service discovery.
            model: name of the model that the worker must serve.
            keys: sign the calls; `None` for workers that do not check them, in tests.
            stalled_polls: see `FleetConfig.stalled_polls`.
            tls: TLS of the pool; `None` for plain connections.
            rule: the pool's pause and weights, which the worker must have; `None` for its own.
        """
        self._rule = rule or GenerationRule()
        self.listing = listing
        """The worker's latest listing."""
        self.has_left = False
        """Whether the worker is no longer listed; it is removed when its last call has ended."""
        self.held: set[Hold] = set()
        self.num_answers = 0
        self.why_suspect = ""
        self.num_suspicions = 0
        self.wake = asyncio.Event()
        self._steps = StallDetector(stalled_polls)
        self._model = model
        self._keys = keys
        self._signer = None if keys is None else keys.signers[0]
        """Signer whose key the worker last accepted."""
        self._status: worker_admin_pb2.StatusResponse | None = None
        self._reported_at = 0.0
        self._room: WorkerRoom | None = None
        """The worker's room as of its last status."""
        self._why_lost = "no status yet"
        self._view: WorkerView | None = None
        """The last view, kept because routing needs the views of all workers several times per request."""
        self._viewed: tuple[worker_admin_pb2.StatusResponse, Listing] | None = None
        """Status and listing from which `_view` was made."""
        self._replica: tuple[WorkerView, Replica] | None = None
        self.channels = WorkerChannels(listing.endpoint, tls)

    @property
    def address(self) -> str:
        """`host:port` of the worker's Prefill or Decode service."""
        return self.listing.endpoint.address

    def open(self) -> None:
        """Open the worker's channels. Must be called on a running event loop."""
        self.channels.open()
        self._sign(self._signer)

    def _sign(self, signer: CallSigner | None) -> None:
        """Make the stubs, whose calls `signer` signs."""
        self._signer = signer
        work, admin = self.channels.work, self.channels.admin
        if signer is not None:
            work = signed(work, signer, self.address)
            admin = signed(admin, signer, self.listing.endpoint.admin_address)
        self.prefill = prefill_pb2_grpc.PrefillStub(work)
        self.decode = decode_pb2_grpc.DecodeStub(work)
        self.events = kv_events_pb2_grpc.KvEventsStub(work)
        self.admin = worker_admin_pb2_grpc.WorkerAdminStub(admin)

    async def close(self, *, gracefully: bool) -> None:
        """Close the worker's channels; if `gracefully`, after a grace period for calls in flight."""
        await self.channels.close(gracefully=gracefully)

    async def status(self, timeout: float) -> worker_admin_pb2.StatusResponse:
        """Request the worker's status. If a worker rejects the key of earlier calls, each of the gateway's keys is
        tried.

        Raises:
            grpc.aio.AioRpcError: the worker does not answer within `timeout` seconds, or rejects the call.
            Unauthenticated: the worker accepts no key of this gateway, or does not prove that it has the pool's secret.
        """
        if self.channels.renew(self.held):
            self._sign(self._signer)
        await self.channels.close_replaced(self.held)
        try:
            return await self._proved_status(timeout)
        except Unauthenticated as error:
            if self._keys is None:
                raise
            self._keys.renew()
            rejected = self._signer
            for signer in self._keys.signers:
                if signer is not rejected:
                    self._sign(signer)
                    with suppress(Unauthenticated):
                        return await self._proved_status(timeout)
            self._sign(rejected)
            raise error

    async def _proved_status(self, timeout: float) -> worker_admin_pb2.StatusResponse:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            answer = await self.admin.Status(worker_admin_pb2.StatusRequest(nonce=nonce), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise error_from_rpc(error) from error
            raise
        audience = self.listing.endpoint.admin_address
        port = self.address.rpartition(":")[2].encode()
        if self._signer is not None and not self._signer.proves(answer.proof, audience, nonce + port):
            raise Unauthenticated(
                f"the process at {audience} has a different ticket key, or is not the worker that listens on port "
                f"{port.decode()}",
                reason="WORKER_UNKNOWN",
            )
        return answer

    def lost(self, why: str) -> None:
        """Record that a status poll failed."""
        if self._status is not None:
            _log.warning("worker %s does not answer: %s", self.address, _cleaned(why))
        self._status = None
        self._why_lost = f"does not answer: {_cleaned(why)}"

    def lose_calls(self, why: str = "") -> None:
        """Cancel all calls to the worker; their streams resume on other workers."""
        why = why or self._why_lost
        if self.held:
            _log.warning("worker %s: cancelling %d calls: %s", self.address, len(self.held), why)
        for held in tuple(self.held):
            held.lose(why)

    def saw(self, status: worker_admin_pb2.StatusResponse, now: float, *, clears_suspicion: bool) -> None:
        """Record a status response.

        Args:
            status: the response.
            now: time at which it was received, in monotonic seconds.
            clears_suspicion: whether the status was requested after the worker became suspect.
        """
        before = self.view().why_not
        self._status, self._reported_at = status, now
        load = load_from_wire(status.load)
        incarnation = status.identity.incarnation
        self._rule.saw(incarnation, pause_from_wire(status.pause), weights_of(status.weights))
        is_due = self._rule.starts_steps(incarnation)
        self._steps.observe(incarnation, status.num_steps, load.running if is_due else 0)
        self._room = WorkerRoom(
            self.listing.role, status.max_sequences, load.num_requests, len(self.held), load.kv_usage
        )
        if clears_suspicion:
            self.why_suspect = ""
        after = self.view().why_not
        if before != after:
            _log.info("worker %s: %s", self.address, after or f"accepts {self.listing.role} requests")

    @property
    def is_stalled(self) -> bool:
        """Whether the worker answers but its engine makes no steps."""
        return self._steps.is_stalled

    def view(self) -> WorkerView:
        """Return an immutable snapshot of the worker's state; the same object while nothing changes."""
        status, listing = self._status, self.listing
        if status is None:
            why_not = self._pool_refusal() or self._why_lost
            return WorkerView(listing.endpoint, listing.role, why_not, len(self.held), listing.name)
        why_not, in_flight = self._refusal(status), len(self.held)
        known, viewed = self._view, self._viewed
        if known is None or viewed is None or viewed[0] is not status or viewed[1] is not listing:
            self._viewed = status, listing
            known = self._view = self._view_of(status, listing, why_not, in_flight, self._reported_at)
        elif known.in_flight != in_flight or known.why_not != why_not:
            known = self._view = replace(known, why_not=why_not, in_flight=in_flight)
        return known

    def replica(self) -> Replica:
        """Return the worker as a candidate for routing; see `WorkerView.as_replica`."""
        view = self.view()
        if self._replica is None or self._replica[0] is not view:
            self._replica = view, view.as_replica()
        return self._replica[1]

    @staticmethod
    def _view_of(
        status: worker_admin_pb2.StatusResponse, listing: Listing, why_not: str, in_flight: int, reported_at: float
    ) -> WorkerView:
        return WorkerView(
            endpoint=listing.endpoint,
            role=listing.role,
            why_not=why_not,
            in_flight=in_flight,
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
            load=load_from_wire(status.load),
            reported_at=reported_at,
            device=status.device,
            is_staged=status.staged,
            place=listing.place,
            tiers=tuple(status.tiers),
            adapters=_versions(status.adapters),
            retired_adapters=_versions(status.retired_adapters),
            adapter_failures=dict(status.adapter_failures),
            pause=pause_from_wire(status.pause),
            is_pause_settled=status.pause.settled,
            weights=weights_of(status.weights),
        )

    def room(self) -> WorkerRoom | None:
        """Return the worker's room for further requests at its last status; `None` if it accepts no requests."""
        return None if self._status is None or self._refusal(self._status) else self._room

    @property
    def may_recover(self) -> bool:
        """Whether the worker may accept requests again without a restart."""
        # A draining or misconfigured worker needs a restart.
        if self._pool_refusal():
            return False
        return self._status is None or not self._settled_refusal(self._status)

    def _pool_refusal(self) -> str:
        if self.has_left:
            return "removed from the pool"
        return "terminating" if self.listing.stopping else ""

    def _settled_refusal(self, status: worker_admin_pb2.StatusResponse) -> str:
        role = self.listing.role
        if status.role not in (role, "both"):
            return f"its role is {status.role}, but it is listed as {role}"
        if status.model != self._model:
            return f"serves model {status.model!r}, not {self._model!r}"
        if status.draining:
            return "draining"
        return ""

    def _refusal(self, status: worker_admin_pb2.StatusResponse) -> str:
        settled = self._pool_refusal() or self._settled_refusal(status)
        if settled:
            return settled
        if not status.ready:
            return "not ready"
        if self._steps.is_stalled:
            return f"its engine has made no steps for {self._steps.count} statuses, with requests running"
        return self._rule.refusal(status.identity.incarnation) or self.why_suspect


def weights_of(message: worker_admin_pb2.WeightsStatus) -> PoolWeights:
    """Convert the weights of a worker."""
    return PoolWeights(message.revision, message.version, message.digest, message.path)


def _versions(adapters: Iterable[common_pb2.Adapter]) -> frozenset[AdapterId]:
    return frozenset(AdapterId(one.name, one.digest) for one in adapters)


def _cleaned(text: str) -> str:
    """Return text from a peer for logs and reports: at most 300 characters, all printable."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_REASON_CHARS])
