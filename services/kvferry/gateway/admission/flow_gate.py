"""Runs the flow controller on the event loop: requests wait here until the fleet has room or their client disconnects.

On a fleet with room a request passes without waiting. While requests are queued, further ones can be dispatched at each
change of the fleet, at the end of each request, and after the computation of each prompt. A pool without workers is one
of the reasons to hold requests: they stay in the same queue, the pool is scaled up, and a request is held for a limited
time.

A request is admitted with a slot for its first sample. Each further sample is queued for a slot of its own, one of
a request at a time, so that slots go back with each sample that ends, and are taken again in fair order.

The slot of a request counts the tokens that the request uses, to free its capacity and correct its charge.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from kvferry.core.clock import Clock
from kvferry.core.errors import DeadlinePassed, Forbidden, KvferryError, Overloaded, Unavailable, UnknownModel
from kvferry.core.sampling import MAX_PRIORITY
from kvferry.gateway.admission.flow_report import flow_report
from kvferry.gateway.admission.quota_sync import QuotaSync
from kvferry.gateway.admission.request_slot import RequestSlot
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.decide.config import FlowConfig
from kvferry.gateway.decide.flow.controller import QUEUE_FULL, FlowController, QueueBounds
from kvferry.gateway.decide.flow.fair_queue import EntryState, QueueEntry
from kvferry.gateway.decide.flow.quotas import QuotaExceeded, Quotas
from kvferry.gateway.decide.flow.tenant_table import TenantTable
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.readiness import FleetRoom
from kvferry.gateway.fleet.waking import Waker
from kvferry.gateway.observe.instruments import FlowMetrics, GatewayInstruments, QueueCollector
from kvferry.serving.admission import RequestSize

_BYTES_PER_TOKEN = 40
"""Memory of one queued token: a reference and a Python integer."""
_BYTES_PER_REQUEST = 4096
_PATIENCE_SECONDS = 10.0
"""Time for which further samples of a request wait behind requests of the same tenant that have had fewer samples."""
_UNREAD_SECONDS = 2.0
"""Time for which a request keeps its slots while its output waits for its reader and others wait for slots."""
_MAX_ESTIMATED_PROMPTS = 16
"""Maximum number of prompts per request whose cached prefixes are looked up; the others count as not cached."""
UncachedTokens = Callable[[str, Sequence[int]], int]
"""Function from a prompt's scope and tokens to the number of its tokens that no worker has cached."""


def all_uncached(_scope: str, token_ids: Sequence[int]) -> int:
    """Return the number of tokens of the prompt, for gateways without a cache map."""
    return len(token_ids)


class FlowGate:
    """Implements `serving.admission.RequestAdmission`. Used on the event loop's thread only."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        config: FlowConfig,
        tenants: Tenants,
        instruments: GatewayInstruments,
        *,
        uncached: UncachedTokens = all_uncached,
        holding: Holding | None = None,
        waker: Waker | None = None,
        shared: QuotaSync | None = None,
    ) -> None:
        """
        Args:
            fleet: the workers, whose free capacity determines when a request is dispatched.
            clock: clock of waits and deadlines.
            config: limits of the queue.
            tenants: the tenants and their policies.
            instruments: metrics of the gateway.
            uncached: predicts the cost of a request that must wait.
            holding: limits on requests that wait for a pool's first worker; `None` if the workers are listed: requests
                that arrive while there are no workers are then dispatched, and fail.
            waker: scales the pool up from zero; `None` disables scaling up.
            shared: the quotas that this gateway shares with others; `None` if it has its own.
        """
        self._clock = clock
        self._config = config
        self._tenants = tenants
        self._uncached = uncached
        self._holding = holding
        self._waker = waker
        self._fleet = fleet
        self.room = FleetRoom(fleet, config.max_streams, is_held_when_empty=holding is not None)
        """The room of the fleet for further requests."""
        self.controller = FlowController(QueueBounds(config.max_queued, config.max_queued_bytes), config.class_weights)
        self._shared = shared
        self.quotas = Quotas() if shared is None else shared.quotas
        self._metrics = FlowMetrics(instruments)
        QueueCollector(self.controller, instruments.registry)
        self._waiters: dict[int, asyncio.Event] = {}
        """Events by number of the queued entry, set when the entry leaves the queue and when `FleetRoom.is_asleep`
        changes."""
        self._was_asleep = False
        self._slots: set[RequestSlot] = set()
        """Slots of the requests that are admitted, without searches."""
        self._waiting: dict[int, RequestSize] = {}
        """Requests that wait for their admission, by number of the entry."""
        self._follower: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> Collection[RequestSize]:
        """The requests that wait for their admission."""
        return self._waiting.values()

    # -- interface to text serving -----------------------------------------------------------------------------

    def enter(self, work: RequestSize) -> RequestSlot:
        """Return the slot of a request; see `serving.admission.RequestAdmission.enter`."""
        return RequestSlot(self, work)

    def count(self, tenant: str) -> None:
        """Count a request that computes no tokens; see `serving.admission.RequestAdmission.count`."""
        with self._counted_refusal(tenant):
            self.quotas.count(tenant, self._tenants.policy(tenant), self._clock.monotonic())

    def check_quota(self, tenant: str) -> None:
        """Check that the tenant may send another request; see `serving.admission.RequestAdmission.check_quota`."""
        with self._counted_refusal(tenant):
            self.quotas.check_requests(tenant, self._tenants.policy(tenant), self._clock.monotonic())

    @contextmanager
    def _counted_refusal(self, tenant: str) -> Iterator[None]:
        try:
            yield
        except KvferryError as error:
            self._metrics.refused(tenant, _reason(error))
            raise

    def check_model(self, tenant: str, model: str) -> None:
        """Check that the tenant may use a model; see `serving.admission.RequestAdmission.check_model`."""
        try:
            self._tenants.policy(tenant).check_model(model)
        except UnknownModel:
            self._metrics.refused(tenant, "model")
            raise

    # -- interface to slots ------------------------------------------------------------------------------------

    async def admit(self, slot: RequestSlot) -> None:
        """Wait until the request may start, and charge it to the tenant's quotas; see
        `serving.admission.Slot.__aenter__`.

        Args:
            slot: slot of the request; its queue entry and times are set.

        Raises:
            Overloaded: a quota is used up, the queue is full, or requests of a higher priority took the request's place
                in it.
            Forbidden: the tenant may not use the request's priority.
            DeadlinePassed: the deadline passed in the queue.
            Unavailable: the pool had no workers for too long.
        """
        tenant = slot.work.caller.tenant
        if self._shared is not None:
            await self._shared.ensure(tenant, self._tenants.policy(tenant), self._expected_tokens(slot.work))
        try:
            entry = slot.entry = self._submit(slot)
        except KvferryError as error:
            self._metrics.refused(tenant, _reason(error))
            raise
        self.quotas.begin(tenant, slot.expected_tokens)
        self._waiting[entry.number] = slot.work
        try:
            await self._dispatched(entry)
        except BaseException as error:
            self.quotas.end(tenant, slot.expected_tokens, used=0.0)
            reason = _reason(error) if isinstance(error, KvferryError) else "cancelled"
            self._metrics.refused(tenant, reason)
            raise
        finally:
            del self._waiting[entry.number]
        if not slot.work.is_search:
            self._slots.add(slot)
        slot.entered = self._clock.monotonic()
        slot.queued_seconds = slot.entered - entry.arrived
        self._metrics.admitted(tenant, entry.priority, slot.queued_seconds)

    def leave(self, slot: RequestSlot, *, is_whole: bool) -> None:
        """Free the slot of an admitted request, and correct the tokens that its tenant was charged.

        Args:
            slot: slot of the request, after `admit`.
            is_whole: whether the request ended without an error; only then its output and duration enter the averages.
        """
        entry, tenant = slot.entry, slot.work.caller.tenant
        assert entry is not None, "the slot was freed before it was admitted"
        self._slots.discard(slot)
        prompt, cached, output = slot.prompt_tokens(), slot.cached_tokens(), slot.output_tokens()
        used = float(prompt - cached + slot.recomputed_tokens + output)
        self.controller.finish(entry, used=used - slot.charged_parts)
        self.quotas.end(tenant, slot.expected_tokens, used=float(prompt + output))
        if is_whole and slot.num_started and slot.work.max_tokens:
            self.quotas.learn(tenant, output / slot.num_started, self._clock.monotonic() - slot.entered)
        self._metrics.used(tenant, prompt, cached, output)
        self._pump()

    async def enter_sample(self, slot: RequestSlot, sample: int, *, is_prompt_new: bool) -> QueueEntry:
        """Wait until a further sample of an admitted request may start.

        Args:
            slot: slot of the request.
            sample: index of the sample.
            is_prompt_new: whether it is the first sample of its prompt.

        Returns:
            The entry of the sample, for `leave_sample`.

        Raises:
            DeadlinePassed: the deadline passed in the queue.
            Unavailable: the pool had no workers for too long.
        """
        assert slot.entry is not None, "a sample began before its request was admitted"
        prompt = len(slot.prompt_of(sample)) if is_prompt_new else 1
        tenant, now = slot.work.caller.tenant, self._clock.monotonic()
        entry = QueueEntry(
            tenant=tenant,
            priority=slot.priority,
            cost=prompt + self.quotas.expected_output(tenant, slot.work.max_tokens),
            is_part=True,
            prefill_tokens=prompt,
            weight=slot.entry.weight,
            deadline=slot.entry.deadline,
            rank=slot.num_begun if self._config.is_small_first else 0,
        )
        self.controller.submit(entry, now)
        slot.waiting = entry
        try:
            await self._dispatched(entry)
        finally:
            slot.waiting = None
        slot.charged_parts += entry.cost
        return entry

    def leave_sample(self, slot: RequestSlot, entry: QueueEntry) -> None:
        """Free the slot of a sample that has ended. Its charge is corrected at the end of the request.

        Args:
            slot: slot of the request.
            entry: the entry of the sample; that of the request for its first sample.
        """
        if entry is slot.entry:
            self.controller.give_back(entry)
        else:
            self.controller.finish(entry, used=entry.cost)
        self._pump()

    def now(self) -> float:
        """Return the time, monotonic seconds."""
        return self._clock.monotonic()

    def prefilled(self, entry: QueueEntry, num_tokens: int) -> None:
        """Free the capacity of computed prompt tokens.

        Args:
            entry: a dispatched entry.
            num_tokens: number of tokens of one sample's prompt, which has been computed.
        """
        self.controller.prefilled(entry, num_tokens)
        self._pump()

    # -- requests whose worker was lost ----------------------------------------------------------------------------

    async def wait_for_worker(self, may_go: Callable[[], bool], remaining_seconds: float) -> bool:
        """Hold a sample of an admitted request whose pool has lost its last worker, until `may_go()` is true.

        Args:
            may_go: returns whether a worker can serve the sample; called again when the fleet changes.
            remaining_seconds: time until the request's deadline.

        Returns:
            `True`, or `False` if `remaining_seconds` or the configured hold time passed first.

        Raises:
            Overloaded: `max_held` samples are already held.
        """
        assert self._holding is not None, "only pools hold requests"
        with self._holding.held():
            self._wake()
            try:
                async with asyncio.timeout(min(self._holding.seconds, remaining_seconds)):
                    await self._fleet.wait_until(lambda _: may_go())
            except TimeoutError:
                return False
        return True

    def gave_up(self) -> Unavailable:
        """Return the error for a request that was held for the maximum time without a worker becoming available."""
        assert self._holding is not None, "only pools hold requests"
        return self._holding.gave_up()

    # -- operation -------------------------------------------------------------------------------------------------

    def use_tenants(self, table: TenantTable) -> None:
        """Replace the tenants with those of a changed file."""
        self._tenants.use(table)
        self.quotas.forget_all_but(self._tenants.keys.tenants | {""})

    def report(self) -> Mapping[str, object]:
        """Return the queue by priority and tenant, as a JSON object."""
        return flow_report(self.controller, self.quotas, self.room.now())

    async def stop(self) -> None:
        """Stop following the fleet."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    # -- internals -------------------------------------------------------------------------------------------------

    def _submit(self, slot: RequestSlot) -> QueueEntry:
        """Check policy, quotas and bounds of a request, then queue it.

        Raises:
            KvferryError: the request is not accepted.
        """
        work, now = slot.work, self._clock.monotonic()
        policy = self._tenants.policy(work.caller.tenant)
        slot.priority = policy.priority_of(work.caller.priority)
        if work.caller.is_batch_line:
            slot.priority = MAX_PRIORITY
        prompt = sum(map(len, work.prompts))
        output = self.quotas.expected_output(work.caller.tenant, work.max_tokens)
        slot.expected_tokens = self._expected_tokens(work)
        begun = work if work.is_search else replace(work, prompts=work.prompts[:1], num_samples=1, num_running=1)
        output *= len(begun.prompts) * begun.num_samples
        first = sum(map(len, begun.prompts))
        self.quotas.check(work.caller.tenant, policy, slot.expected_tokens, now)
        limit = work.caller.arrived + self._config.request_timeout_seconds
        entry = QueueEntry(
            tenant=work.caller.tenant,
            priority=slot.priority,
            cost=first * begun.num_samples + output,
            num_sequences=begun.num_running,
            num_held=work.num_running,
            is_search=work.is_search,
            prefill_tokens=first,
            num_bytes=_BYTES_PER_REQUEST + _BYTES_PER_TOKEN * prompt + work.held_bytes,
            weight=policy.weight,
            deadline=limit if work.caller.deadline is None else min(limit, work.caller.deadline),
        )
        room = self.room.now()
        if self.controller.is_waited_for or not self.controller.is_open(room, entry):
            for victim in self.controller.make_room(entry, policy.bounds(self._own_bounds), now):
                self._waiters[victim.number].set()
            uncached = self._estimate(begun)
            entry.cost = uncached * begun.num_samples + output
            entry.prefill_tokens = uncached
        self.controller.submit(entry, now)
        return entry

    def _expected_tokens(self, work: RequestSize) -> float:
        """Return the tokens that a request is charged before it begins."""
        output = self.quotas.expected_output(work.caller.tenant, work.max_tokens)
        return (sum(map(len, work.prompts)) + output * len(work.prompts)) * work.num_samples

    @property
    def _own_bounds(self) -> QueueBounds:
        """Default bounds of a tenant's queue: a quarter of the whole queue's if there are several tenants."""
        share = 4 if self._tenants.path is not None else 1
        return QueueBounds(max(1, self._config.max_queued // share), self._config.max_queued_bytes // share)

    def _estimate(self, work: RequestSize) -> int:
        known, rest = work.prompts[:_MAX_ESTIMATED_PROMPTS], work.prompts[_MAX_ESTIMATED_PROMPTS:]
        return sum(self._uncached(work.caller.scope, prompt) for prompt in known) + sum(map(len, rest))

    def _pump(self) -> None:
        """Dispatch the queued entries that may be dispatched now."""
        if not self.controller.is_waited_for:
            return
        room = self.room.now()
        for entry in self.controller.dispatch(room, self._clock.monotonic()):
            waiter = self._waiters.get(entry.number)
            if waiter is not None:
                waiter.set()  # the waiting tasks continue in this order
        if self.room.is_asleep is not self._was_asleep:
            self._was_asleep = self.room.is_asleep
            for event in self._waiters.values():
                event.set()

    async def _dispatched(self, entry: QueueEntry) -> None:
        """Return when a queued entry is dispatched; it holds nothing if this raises.

        Raises:
            KvferryError: the entry left the queue in another way; see `_ending` and `_wait`.
        """
        try:
            self._pump()
            if entry.state is EntryState.QUEUED:
                await self._wait(entry)
            if entry.state is not EntryState.DISPATCHED:
                raise self._ending(entry)
        except BaseException:
            if entry.state is EntryState.DISPATCHED:  # cancelled after the dispatch, before this task continued
                self.controller.finish(entry, used=0.0)
                self._pump()
            raise

    async def _wait(self, entry: QueueEntry) -> None:
        """Wait until a queued entry has left the queue.

        Raises:
            Overloaded: the pool has no workers, and `max_held` samples are already waiting.
            Unavailable: the pool had no workers for the maximum time.
        """
        event = self._waiters[entry.number] = asyncio.Event()
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow(), name="flow gate")
        try:
            while entry.state is EntryState.QUEUED:
                event.clear()
                remaining = entry.deadline - self._clock.monotonic()
                if self._holding is not None and self.room.is_asleep:
                    await self._hold(self._holding, entry, event, remaining)
                elif not await _is_set_within(event, remaining) and entry.state is EntryState.QUEUED:
                    self.controller.expire(entry)
        except KvferryError:
            if entry.state is EntryState.QUEUED:
                self.controller.refuse(entry)
            raise
        finally:
            if entry.state is EntryState.QUEUED:
                self.controller.cancel(entry)
            del self._waiters[entry.number]
            if not self._waiters and self._follower is not None:
                self._follower.cancel()
                self._follower = None

    async def _hold(self, holding: Holding, entry: QueueEntry, event: asyncio.Event, remaining: float) -> None:
        """Wait until the pool has a worker or the entry has left the queue."""
        with holding.held(entry.num_held):
            self._wake()
            if await _is_set_within(event, min(holding.seconds, remaining)) or entry.state is not EntryState.QUEUED:
                return
        if remaining <= holding.seconds:
            self.controller.expire(entry)
        else:
            raise holding.gave_up()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.request()

    async def _follow(self) -> None:
        """Dispatch at each change of the fleet, and at intervals the slots of readers that do not read, until
        cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNREAD_SECONDS / 2):
                    await self._fleet.next_change()
            self._free_unread()
            self._rerank_patient()
            self._pump()

    def _rerank_patient(self) -> None:
        """Have samples that have waited for long served in the order of their requests' arrival."""
        limit = self._clock.monotonic() - _PATIENCE_SECONDS
        for slot in self._slots:
            entry = slot.waiting
            if entry is not None and entry.rank and entry.state is EntryState.QUEUED and entry.arrived <= limit:
                self.controller.rerank(entry, 0)

    def _free_unread(self) -> None:
        """Free the slots of requests whose output waits for its reader: the workers go on without them."""
        limit = self._clock.monotonic() - _UNREAD_SECONDS
        for slot in self._slots:
            if slot.handed_out_at is not None and slot.handed_out_at <= limit:
                for entry in slot.entries:
                    self.controller.give_back(entry)

    def _ending(self, entry: QueueEntry) -> KvferryError:
        """Return the error of a request that left the queue without being dispatched."""
        now = self._clock.monotonic()
        waited = now - entry.arrived
        if entry.state is EntryState.EXPIRED:
            return DeadlinePassed(f"the deadline passed after {waited:.1f} s in the queue", reason="DEADLINE_IN_QUEUE")
        return Displaced(
            f"requests of a higher priority have displaced this one after {waited:.1f} s in the full queue",
            reason=QUEUE_FULL,
            retry_after_seconds=self.controller.retry_after(now),
        )


class Displaced(Overloaded):
    """A request of a higher priority took the place of this one in the full queue."""


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, for up to `seconds`; return whether it is set."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


def _reason(error: KvferryError) -> str:
    """Return the label of a refusal."""
    match error:
        case QuotaExceeded():
            return error.quota
        case Displaced():
            return "displaced"
        case Overloaded():
            return "pool_empty" if error.reason == "POOL_EMPTY" else "queue_full"
        case Forbidden():
            return "priority"
        case DeadlinePassed():
            return "deadline"
        case _:
            return "pool_empty"
