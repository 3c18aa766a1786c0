"""Workers with real gRPC servers that generate tokens by a rule and fail as instructed.

All offers and calls are tracked, so that tests can check for leaks at the end (`ScriptedWorkers.idle`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
from blake3 import blake3

from harness.fakes.byte_model import NAME
from harness.fakes.scripted_tokens import next_token, scores_of, vector_of
from harness.gateways.scripted_pins import ScriptedPins
from kvferry.core.causes import ComputedTokens
from kvferry.core.errors import KvferryError, TicketRejected, Unavailable
from kvferry.core.ids import new_incarnation
from kvferry.core.retention import Retention, RetentionOutcome
from kvferry.core.sampling import FinishReason
from kvferry.rpc import wire
from kvferry.rpc.call_interceptor import STARTED_METADATA
from kvferry.rpc.computed_wire import computed_to_wire
from kvferry.rpc.retention_wire import retention_to_wire
from kvferry.rpc.server import RpcServer, Service, start_server
from kvferry.rpc.wire import pooling_from_wire
from kvferry.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_events_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_admin_pb2,
)
from kvferry.v1 import worker_admin_pb2_grpc as admin_grpc

Handoff = decode_pb2.Handoff


class Act(StrEnum):
    """How a scripted worker fails a call."""

    FAIL = "fail"
    """Respond with `error`."""
    HANG = "hang"
    """Send no further message until the call is cancelled."""
    LOSE_ANSWER = "lose_answer"
    """Prefill only: create the offer but lose the response, as if the caller had disconnected."""
    CRASH = "crash"
    """Start computing, then break the connection like a process that crashes; later calls work."""
    DIE = "die"
    """Close all connections and stop."""
    END = "end"
    """End the stream without a finish reason."""
    LOCAL = "local"
    """Report that all offered blocks were cached locally."""
    REFUSE_TICKET = "refuse_ticket"


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure injected into a call."""

    act: Act
    after_tokens: int = 0
    """Decode only: number of tokens to send before the failure; 0 means before the hand-off."""
    error: KvferryError = field(default_factory=lambda: Unavailable("scripted failure"))


@dataclass(slots=True)
class Offers:
    """Open and released tickets of all workers of a test."""

    open: dict[str, str] = field(default_factory=dict)
    """Id of the worker that has the blocks, by ticket."""
    released: list[tuple[str, str]] = field(default_factory=list)
    """(ticket, reason) of every release."""
    change: asyncio.Event = field(default_factory=asyncio.Event)

    def make(self, worker_id: str, ticket: str) -> str:
        """Open an offer with the id that the caller has chosen."""
        self.open[ticket] = worker_id
        self.change.set()
        return ticket

    def take(self, ticket: str) -> bool:
        """End an offer; return whether it was open."""
        found = self.open.pop(ticket, None) is not None
        self.change.set()
        return found


class ScriptedWorker(prefill_pb2_grpc.PrefillServicer, ScriptedPins):
    """A scripted worker. Attributes may be changed between calls; each call consumes an entry of `faults`, where `None`
    means no failure."""

    def __init__(self, role: str, worker_id: str, offers: Offers) -> None:
        super().__init__()
        self.num_resets = 0
        self.pause = worker_admin_pb2.PauseStatus()
        self.weights = worker_admin_pb2.WeightsStatus(version="start", digest="00")
        self.prepared_weights: worker_admin_pb2.PrepareWeightsRequest | None = None
        self.settles = True
        """Whether pauses settle."""
        self.digest_of: Callable[[str], str] = str
        """Returns the digest of the weights at a path."""
        self.fails_at: dict[str, KvferryError] = {}
        """Errors of methods of the administration, by name."""
        self.adapters: dict[str, bytes] = {}
        """Digests of adapters by name."""
        self.prepared: list[decode_pb2.PrefetchKvRequest] = []
        self.role = role
        self.worker_id = worker_id
        self.offers = offers
        self.fingerprint = b"layout"
        self.family = b""
        self.model = NAME
        self.ready = True
        self.draining = False
        self.mute = False
        """Whether Status hangs, as in a suspended process."""
        self.max_model_tokens = 512
        self.max_sequences = 0
        """Maximum number of sequences in the running batch; 0 if the worker does not report it."""
        self.num_steps = 0
        """Reported number of steps; 0 if the worker does not report it."""
        self.running = 0
        """Reported number of running sequences, for those of other gateways."""
        self.step_tokens = 1
        """Number of tokens per message of Decode."""
        self.num_loaded = 0
        self.computed: tuple[ComputedTokens, ...] = ()
        """Causes of the computed tokens in answers of `Prefill.Run`."""
        """Number of tokens that decode calls without a ticket report as loaded from a tier."""
        self.keeps_offers = True
        """Whether Prefill returns a ticket if requested."""
        self.faults: dict[str, deque[Fault | None]] = {"prefill": deque(), "decode": deque(), "pool": deque()}
        self.fault_reached = asyncio.Event()
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        self.pools: list[prefill_pb2.PoolRequest] = []
        self.decodes: list[decode_pb2.DecodeRequest] = []
        self.step: Callable[[], Any] = lambda: asyncio.sleep(0)
        """Awaited before every message of Decode and of Pool; a test can block a stream here."""
        self.events: kv_events_pb2_grpc.KvEventsServicer | None = None
        """Served as the worker's cache feed from the next start on."""
        self.address = "127.0.0.1:0"
        self._server: RpcServer | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start listening; after a stop, with the same port and a new incarnation."""
        self.pins.clear()
        self.incarnation = new_incarnation()
        services = [
            Service("kvferry.v1.Prefill", lambda s: prefill_pb2_grpc.add_PrefillServicer_to_server(self, s)),
            Service("kvferry.v1.Decode", lambda s: _add_decode(self, s)),
            Service("kvferry.v1.WorkerAdmin", lambda s: admin_grpc.add_WorkerAdminServicer_to_server(self, s)),
        ]
        events = self.events
        if events is not None:
            services.append(
                Service("kvferry.v1.KvEvents", lambda s: kv_events_pb2_grpc.add_KvEventsServicer_to_server(events, s))
            )
        self._server = await start_server(self.address, services)
        self.address = self._server.address

    async def stop(self) -> None:
        """Close all connections and drop all offers, as a crash does."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)
        for ticket in [ticket for ticket, owner in self.offers.open.items() if owner == self.worker_id]:
            self.offers.take(ticket)

    @property
    def is_busy(self) -> bool:
        """Whether a call is in flight or the worker is stopping."""
        return bool(self._ending) or (self._server is not None and self._server.calls.count > 0)

    async def wait_idle(self) -> None:
        """Return when no call is in flight."""
        if self._server is not None:
            await self._server.calls.wait_idle()
        if self._ending:
            await asyncio.wait(set(self._ending))

    async def Status(self, request: worker_admin_pb2.StatusRequest, context: Any) -> worker_admin_pb2.StatusResponse:
        if self.mute:
            await asyncio.Event().wait()
        response = worker_admin_pb2.StatusResponse(
            pause=self.pause,
            weights=self.weights,
            adapters=[common_pb2.Adapter(name=name, digest=digest) for name, digest in self.adapters.items()],
            role=self.role,
            model=self.model,
            fingerprint=self.fingerprint,
            family=self.family,
            connector="scripted",
            ready=self.ready,
            draining=self.draining,
            max_model_tokens=self.max_model_tokens,
            block_tokens=16,
            max_sequences=self.max_sequences,
            num_steps=self.num_steps,
        )
        response.identity.worker_id = self.worker_id
        response.identity.incarnation = self.incarnation
        response.load.running = self.running
        response.load.blocks_total, response.load.blocks_free = 100, 75
        response.load.pins = len(self.pins)
        return response

    async def ResetPrefixCache(
        self, request: worker_admin_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_admin_pb2.ResetPrefixCacheResponse:
        self.num_resets += 1
        self.pins.clear()
        if self.mute:
            await asyncio.Event().wait()
        return worker_admin_pb2.ResetPrefixCacheResponse(num_blocks=7)

    async def SetPause(self, request: worker_admin_pb2.SetPauseRequest, context: Any) -> worker_admin_pb2.PauseStatus:
        self._fail("SetPause")
        if request.revision > self.pause.revision:
            self.pause = worker_admin_pb2.PauseStatus(
                revision=request.revision,
                mode=request.mode,
                by=request.by,
                since=request.since,
                settled=bool(request.mode) and self.settles,
            )
        return self.pause

    async def PrepareWeights(
        self, request: worker_admin_pb2.PrepareWeightsRequest, context: Any
    ) -> worker_admin_pb2.PrepareWeightsResponse:
        self._fail("PrepareWeights")
        self.prepared_weights = request
        return worker_admin_pb2.PrepareWeightsResponse(
            version=request.version or "of its digest", digest=self.digest_of(request.path)
        )

    async def CommitWeights(
        self, request: worker_admin_pb2.CommitWeightsRequest, context: Any
    ) -> worker_admin_pb2.WeightsStatus:
        self._fail("CommitWeights")
        given = self.prepared_weights
        if given is not None and given.revision == request.revision:
            self.weights = worker_admin_pb2.WeightsStatus(
                version=given.version or "of its digest", revision=given.revision, digest=given.path, path=given.path
            )
            self.fingerprint, self.prepared_weights = given.path.encode(), None
        return self.weights

    async def DiscardWeights(
        self, request: worker_admin_pb2.DiscardWeightsRequest, context: Any
    ) -> worker_admin_pb2.DiscardWeightsResponse:
        self.prepared_weights = None
        return worker_admin_pb2.DiscardWeightsResponse()

    def _fail(self, method: str) -> None:
        if method in self.fails_at:
            raise self.fails_at[method]

    async def LoadAdapter(
        self, request: worker_admin_pb2.LoadAdapterRequest, context: Any
    ) -> worker_admin_pb2.AdapterResponse:
        digest = blake3(request.path.encode()).digest()
        self.adapters[request.name] = digest
        return worker_admin_pb2.AdapterResponse(adapter=common_pb2.Adapter(name=request.name, digest=digest))

    async def UnloadAdapter(
        self, request: worker_admin_pb2.UnloadAdapterRequest, context: Any
    ) -> worker_admin_pb2.AdapterResponse:
        digest = self.adapters.pop(request.name)
        return worker_admin_pb2.AdapterResponse(adapter=common_pb2.Adapter(name=request.name, digest=digest))

    async def Profile(
        self, request: worker_admin_pb2.ProfileRequest, context: Any
    ) -> AsyncIterator[worker_admin_pb2.ProfilePart]:
        yield worker_admin_pb2.ProfilePart(trace=b"{}")

    async def Drain(self, request: worker_admin_pb2.DrainRequest, context: Any) -> worker_admin_pb2.DrainResponse:
        self.draining = True
        return worker_admin_pb2.DrainResponse(idle=True)

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Any) -> prefill_pb2.ReleaseResponse:
        self.offers.released.append((request.ticket_id, request.reason))
        self.offers.take(request.ticket_id)
        return prefill_pb2.ReleaseResponse()

    async def Pool(self, request: prefill_pb2.PoolRequest, context: Any) -> prefill_pb2.PoolResponse:
        self.pools.append(request)
        fault = self._next_fault("pool")
        if fault is not None:
            await self._misbehave(fault, context)
        await self.step()
        values = vector_of(request.token_ids, pooling_from_wire(request.pooling))
        return prefill_pb2.PoolResponse(values=values.tolist(), num_cached_tokens=1, prefill_seconds=0.5)

    async def run_prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:
        """Handle `Prefill.Run`: return the first token, and a ticket if requested."""
        self.prefills.append(request)
        fault = self._next_fault("prefill")
        if fault is not None:
            if fault.act is Act.LOSE_ANSWER:
                self.offers.make(self.worker_id, request.ticket_id)
            await self._misbehave(fault, context)
        sampling = wire.sampling_from_wire(request.sampling)
        token = next_token(list(request.token_ids), sampling, request.sample_index)
        response = prefill_pb2.PrefillResponse(
            first_token=wire.token_to_wire(token),
            num_cached_tokens=1,
            num_written_tokens=2,
            queue_seconds=0.25,
            prefill_seconds=0.5,
            computed=computed_to_wire(self.computed),
        )
        if request.retain_seconds:
            granted = Retention(RetentionOutcome.RETAINED, len(request.token_ids), request.retain_seconds)
            response.retention.CopyFrom(retention_to_wire(granted))
        response.prompt_logprobs.extend(wire.scores_to_wire(scores_of(request.token_ids, sampling)))
        if sampling.max_tokens == request.num_generated + 1:
            response.finish_reason = wire.finish_to_wire(FinishReason.LENGTH)
        elif request.offer and self.keeps_offers:
            response.ticket_id = self.offers.make(self.worker_id, request.ticket_id)
            response.ticket = response.ticket_id.encode()
        return response

    async def run_decode(
        self, request: decode_pb2.DecodeRequest, context: Any
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Handle `Decode.Run`: stream tokens up to `max_tokens`, which includes the tokens already generated."""
        self.decodes.append(request)
        fault = self._next_fault("decode")
        if fault is not None and fault.after_tokens == 0 and fault.act is not Act.LOCAL:
            await self._misbehave(fault, context)
        handoff: Handoff | None = self._hand_off(request.ticket.decode(), fault)
        sampling = wire.sampling_from_wire(request.sampling)
        tokens = list(request.token_ids)
        left = (sampling.max_tokens or 0) - request.num_generated
        sent = 0
        while left > 0:
            if fault is not None and fault.act is not Act.LOCAL and sent >= fault.after_tokens:
                if fault.act is Act.END:
                    return
                await self._misbehave(fault, context)
            await self.step()
            response = decode_pb2.DecodeResponse()
            for _ in range(min(self.step_tokens, left)):
                token = next_token(tokens, sampling, request.sample_index)
                tokens.append(token.token_id)
                response.tokens.append(wire.token_to_wire(token))
            if sent == 0:
                prompt = request.token_ids[: len(request.token_ids) - request.num_generated]
                response.prompt_logprobs.extend(wire.scores_to_wire(scores_of(prompt, sampling)))
            left -= len(response.tokens)
            sent += len(response.tokens)
            response.finish_reason = wire.finish_to_wire(None if left else FinishReason.LENGTH)
            if handoff is not None:
                response.handoff.CopyFrom(handoff)
                handoff = None
            yield response

    def _hand_off(self, ticket: str, fault: Fault | None) -> Handoff:
        if not ticket:
            return Handoff(outcome=Handoff.OUTCOME_NONE, num_cached_tokens=2, num_loaded_tokens=self.num_loaded)
        if fault is not None and fault.act is Act.LOCAL:
            return Handoff(outcome=Handoff.OUTCOME_LOCAL)
        if not self.offers.take(ticket):
            return Handoff(outcome=Handoff.OUTCOME_FAILED, reason="the offer is gone")
        return Handoff(
            outcome=Handoff.OUTCOME_FETCHED,
            connector="scripted",
            num_blocks=2,
            num_bytes=1024,
            seconds=0.125,
            num_loaded_tokens=64,
        )

    def _next_fault(self, method: str) -> Fault | None:
        return self.faults[method].popleft() if self.faults[method] else None

    async def _misbehave(self, fault: Fault, context: Any) -> None:
        self.fault_reached.set()
        if fault.act is Act.CRASH:
            if fault.after_tokens == 0:
                await context.send_initial_metadata(STARTED_METADATA)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if fault.act is Act.FAIL:
            raise fault.error
        if fault.act is Act.REFUSE_TICKET:
            raise TicketRejected("the ticket is stale")
        if fault.act is Act.DIE:
            # In a separate task, since stopping waits until calls have ended.
            task = asyncio.create_task(self.stop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        await asyncio.Event().wait()

    async def Run(self, request: Any, context: Any) -> Any:
        return await self.run_prefill(request, context)


class _DecodeOf(decode_pb2_grpc.DecodeServicer):
    # Prefill and Decode both have a method Run, so one object cannot implement both services.
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    def Run(self, request: Any, context: Any) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        return self._worker.run_decode(request, context)

    async def PrefetchKv(self, request: Any, context: Any) -> decode_pb2.PrefetchKvResponse:
        self._worker.prepared.append(request)
        return decode_pb2.PrefetchKvResponse()


def _add_decode(worker: ScriptedWorker, server: Any) -> None:
    decode_pb2_grpc.add_DecodeServicer_to_server(_DecodeOf(worker), server)


class ScriptedWorkers:
    """The workers of a test, for example `async with ScriptedWorkers(prefill=1, decode=2) as workers`."""

    def __init__(self, *, prefill: int = 0, decode: int = 0, both: int = 0) -> None:
        self.offers = Offers()
        self.prefill = [ScriptedWorker("prefill", f"p{i}", self.offers) for i in range(prefill)]
        self.decode = [ScriptedWorker("decode", f"d{i}", self.offers) for i in range(decode)]
        self.both = [ScriptedWorker("both", f"b{i}", self.offers) for i in range(both)]

    @property
    def all(self) -> list[ScriptedWorker]:
        """All workers of all roles."""
        return [*self.prefill, *self.decode, *self.both]

    async def __aenter__(self) -> "ScriptedWorkers":
        for worker in self.all:
            await worker.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for worker in self.all:
            await worker.stop()

    async def idle(self, deadline_seconds: float = 10.0) -> None:
        """Return when no call is in flight and no ticket is open.

        Raises:
            TimeoutError: a call or a ticket leaked.
        """
        async with asyncio.timeout(deadline_seconds):
            # Releasing a ticket may start a call, so both are checked until neither remains.
            while self.offers.open or any(worker.is_busy for worker in self.all):
                for worker in self.all:
                    await worker.wait_idle()
                if self.offers.open:
                    self.offers.change.clear()
                    await self.offers.change.wait()
