"""Queued requests in priority bands, and weighted fair queueing between the tenants of a band.

Bands are served strictly by priority, or, with weights of priorities, share like tenants (`band_shares`). Within a
band, each tenant has a counter of its service in tokens divided by its weight; the backlogged tenant with the smallest
counter is served next, and its counter grows by the cost of the request when the request is dispatched, not when it
ends. The band's virtual time is the largest counter at a dispatch. A tenant that becomes backlogged again starts at the
virtual time, so that idle time earns no credit (start-time fair queueing, Goyal et al., SIGCOMM 1996; counters per
client with corrected costs, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). The service of two
tenants that stay backlogged differs, per weight, by one request at most, plus the corrections of requests that have not
ended yet.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.core.states import Machine

_SLACK = 64
"""Number of invalid heap entries above which all are removed together, if they also outnumber the valid ones."""


class EntryState(StrEnum):
    """State of an entry; transitions are in `MACHINE`."""

    NEW = "new"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    """The request has left the queue and holds capacity."""
    ENDED = "ended"
    """The dispatched request has ended, in any way, and holds no capacity."""
    REFUSED = "refused"
    """The queue had no room for the request, or the request was displaced."""
    EXPIRED = "expired"
    """The deadline passed in the queue."""
    CANCELLED = "cancelled"
    """The client cancelled the request in the queue."""


class EntryEvent(StrEnum):
    """Event that changes an entry's state; transitions are in `MACHINE`."""

    QUEUE = "queue"
    DISPATCH = "dispatch"
    END = "end"
    REFUSE = "refuse"
    EXPIRE = "expire"
    CANCEL = "cancel"


MACHINE: Machine[EntryState, EntryEvent] = Machine(
    name="flow entry",
    initial=EntryState.NEW,
    final=frozenset({EntryState.ENDED, EntryState.REFUSED, EntryState.EXPIRED, EntryState.CANCELLED}),
    table={
        (EntryState.NEW, EntryEvent.QUEUE): EntryState.QUEUED,
        (EntryState.NEW, EntryEvent.REFUSE): EntryState.REFUSED,
        (EntryState.QUEUED, EntryEvent.DISPATCH): EntryState.DISPATCHED,
        (EntryState.QUEUED, EntryEvent.REFUSE): EntryState.REFUSED,
        (EntryState.QUEUED, EntryEvent.EXPIRE): EntryState.EXPIRED,
        (EntryState.QUEUED, EntryEvent.CANCEL): EntryState.CANCELLED,
        (EntryState.DISPATCHED, EntryEvent.END): EntryState.ENDED,
    },
)


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One request, with its first sample, or a further sample of one. Only the fields at the end change."""

    tenant: str
    priority: int
    """Band of the request; lower numbers are served first."""
    cost: float
    """Expected number of tokens, uncached prompt tokens plus output tokens, of the sample or of all beams; greater than
    0."""
    is_part: bool = False
    """Whether this is a further sample of a dispatched request: it is never displaced, and does not count as a queued
    request."""
    is_search: bool = False
    """Whether the request is a beam search; see `capacity.Room.searches`."""
    prefill_tokens: int = 1
    """Expected prompt tokens that are computed before the request's first tokens."""
    num_held: int = 1
    """Number of samples or beams that count while a pool without workers holds the request: those that would run."""
    num_bytes: int = 0
    """Memory of the queued request in bytes."""
    weight: float = 1.0
    """Share of the tenant in its band, relative to other tenants; greater than 0."""
    deadline: float = math.inf
    """Monotonic seconds."""
    number: int = 0
    """Order of arrival, assigned by the controller."""
    arrived: float = 0.0
    """Time at which the request was queued, monotonic seconds."""
    state: EntryState = MACHINE.initial
    num_sequences: int = 1
    """Number of samples or beams that hold slots when the entry is dispatched; 0 when they have been given back."""
    rank: int = 0
    """Number of samples of the same request that have begun; a tenant's entries with lower numbers are served first."""
    open_prefill_tokens: int = 0
    """Part of `prefill_tokens` that holds capacity."""

    def on(self, event: EntryEvent) -> None:
        """Apply `event`: change the state according to `MACHINE`.

        Raises:
            InvariantBroken: `event` is illegal in the current state.
        """
        self.state = MACHINE.next(self.state, event)


class BandOrder(Protocol):
    """Order of the bands of one queue, or of several that share it."""

    def served(self, priority: int) -> float:
        """Return the number by which bands of different queues are ordered first; equal numbers leave the order to the
        priorities."""
        ...

    def open(self, priority: int) -> None:
        """Note that a band has its first request in a queue."""
        ...

    def enter(self, priority: int) -> None:
        """Note that a band becomes backlogged in a queue."""
        ...

    def close(self, priority: int) -> None:
        """Note that a band has no more requests in a queue, queued or running."""
        ...

    def first(self, is_backlogged: Callable[[int], bool]) -> int | None:
        """Return the band that is served next; `None` if no band is backlogged.

        Args:
            is_backlogged: returns whether a band is backlogged.
        """
        ...

    def begin(self, priority: int, cost: float) -> None:
        """Charge a dispatched request of `cost` tokens to its band."""
        ...

    def charge(self, priority: int, tokens: float) -> None:
        """Add tokens to the charge of a band, or subtract them if `tokens` is negative."""
        ...


class StrictOrder:
    """The smallest priority number first. Implements `BandOrder` for one queue."""

    def __init__(self) -> None:
        self._priorities: list[int] = []
        """Heap of priorities, each at most once; those of bands that are no longer backlogged are skipped."""
        self._listed: set[int] = set()
        """The priorities in the heap."""

    def served(self, priority: int) -> float:
        """Return 0: bands are ordered by priority."""
        return 0.0

    def open(self, priority: int) -> None:
        """See `BandOrder.open`."""

    def enter(self, priority: int) -> None:
        """See `BandOrder.enter`."""
        if priority not in self._listed:
            self._listed.add(priority)
            heapq.heappush(self._priorities, priority)

    def close(self, priority: int) -> None:
        """See `BandOrder.close`."""

    def first(self, is_backlogged: Callable[[int], bool]) -> int | None:
        """See `BandOrder.first`."""
        while self._priorities:
            if is_backlogged(self._priorities[0]):
                return self._priorities[0]
            self._listed.discard(heapq.heappop(self._priorities))
        return None

    def begin(self, priority: int, cost: float) -> None:
        """See `BandOrder.begin`."""

    def charge(self, priority: int, tokens: float) -> None:
        """See `BandOrder.charge`."""


class _Flow:
    """The requests of one tenant in one band."""

    __slots__ = ("num_running", "order", "served", "tenant", "waiting")

    def __init__(self, tenant: str, served: float) -> None:
        self.tenant = tenant
        self.served = served
        """Service in tokens per weight."""
        self.waiting: OrderedDict[int, QueueEntry] = OrderedDict()
        """Queued entries by number, in order of arrival."""
        self.order: list[tuple[int, float, int, QueueEntry]] = []
        """Heap of entries by rank, deadline, then arrival; those that left the queue, and those whose rank has changed,
        are skipped."""
        self.num_running = 0

    def first(self) -> QueueEntry:
        """Return the queued entry with the lowest rank, then the earliest deadline; there must be one."""
        while True:
            rank, _, _, entry = self.order[0]
            if entry.state is EntryState.QUEUED and rank == entry.rank:
                return entry
            heapq.heappop(self.order)

    def enter(self, entry: QueueEntry) -> None:
        """Add an entry to the heap, with its current rank."""
        heapq.heappush(self.order, (entry.rank, entry.deadline, entry.number, entry))

    def compact(self) -> None:
        if len(self.order) > 2 * len(self.waiting) + _SLACK:
            self.order = [(entry.rank, entry.deadline, entry.number, entry) for entry in self.waiting.values()]
            heapq.heapify(self.order)


class _Band:
    """The flows of one priority."""

    __slots__ = ("flows", "num_running", "ranking", "virtual_time", "waiting")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.flows: dict[str, _Flow] = {}
        self.waiting: OrderedDict[int, QueueEntry] = OrderedDict()
        self.num_running = 0
        self.ranking: list[tuple[float, str]] = []
        """Heap of backlogged tenants by counter; pairs whose counter has changed are skipped."""

    def rank(self, flow: _Flow) -> None:
        """Add a backlogged flow to the heap, with its current counter."""
        if len(self.ranking) > 2 * len(self.flows) + _SLACK:
            self.ranking = [(f.served, f.tenant) for f in self.flows.values() if f.waiting and f is not flow]
            heapq.heapify(self.ranking)
        heapq.heappush(self.ranking, (flow.served, flow.tenant))

    def least(self) -> _Flow:
        """Return the backlogged flow with the smallest counter; there must be one."""
        while True:
            served, tenant = self.ranking[0]
            flow = self.flows.get(tenant)
            if flow is not None and flow.waiting and flow.served == served:
                return flow
            heapq.heappop(self.ranking)

    def forget(self, flow: _Flow) -> None:
        """Drop an idle flow whose counter has no effect on its next request."""
        if not flow.waiting and not flow.num_running and flow.served <= self.virtual_time:
            self.flows.pop(flow.tenant, None)


class FairQueue:
    """Queued entries, and the service counters of the tenants that have queued or running entries."""

    def __init__(self, order: BandOrder) -> None:
        """
        Args:
            order: order of the bands.
        """
        self._order = order
        self._bands: dict[int, _Band] = {}
        self._num_queued = 0

    def __len__(self) -> int:
        """Return the number of queued entries."""
        return self._num_queued

    @property
    def num_flows(self) -> int:
        """Number of service counters."""
        return sum(len(band.flows) for band in self._bands.values())

    def virtual_time(self, priority: int) -> float:
        """Return the virtual time of a band; 0 if it has neither queued nor running entries."""
        band = self._bands.get(priority)
        return 0.0 if band is None else band.virtual_time

    def served(self, priority: int, tenant: str) -> float:
        """Return a tenant's counter in a band, tokens per weight; the virtual time if it has none."""
        band = self._bands.get(priority)
        flow = None if band is None else band.flows.get(tenant)
        return self.virtual_time(priority) if flow is None else flow.served

    def add(self, entry: QueueEntry) -> None:
        """Queue an entry, whose state is QUEUED and whose number is larger than that of all earlier ones."""
        band = self._bands.get(entry.priority)
        if band is None:
            band = self._bands[entry.priority] = _Band()
            self._order.open(entry.priority)
        flow = band.flows.get(entry.tenant)
        if flow is None:
            flow = band.flows[entry.tenant] = _Flow(entry.tenant, band.virtual_time)
        if not band.waiting:
            self._order.enter(entry.priority)
        if not flow.waiting:
            flow.served = max(flow.served, band.virtual_time)
            band.rank(flow)
        band.waiting[entry.number] = flow.waiting[entry.number] = entry
        flow.enter(entry)
        self._num_queued += 1

    def rerank(self, entry: QueueEntry, rank: int) -> None:
        """Change the rank of a queued entry."""
        flow = self._bands[entry.priority].flows[entry.tenant]
        entry.rank = rank
        flow.enter(entry)
        flow.compact()

    def next(self) -> QueueEntry | None:
        """Return the entry that is to be dispatched next, without removing it; `None` if the queue is empty."""
        priority = self._order.first(self._is_backlogged)
        return None if priority is None else self._bands[priority].least().first()

    def begin(self, entry: QueueEntry) -> None:
        """Remove the entry that `next` returned, and charge its cost to its tenant."""
        band = self._bands[entry.priority]
        flow = band.flows[entry.tenant]
        band.virtual_time = max(band.virtual_time, flow.served)
        flow.num_running += 1
        band.num_running += 1
        self._order.begin(entry.priority, entry.cost)
        self._take(band, flow, entry)
        self._charge(band, flow, entry.cost / entry.weight)

    def end(self, entry: QueueEntry, used: float) -> None:
        """Correct the charge of a running entry to the tokens that it has used.

        Args:
            entry: an entry for which `begin` was called.
            used: number of tokens that the request used.
        """
        band = self._bands[entry.priority]
        flow = band.flows[entry.tenant]
        flow.num_running -= 1
        band.num_running -= 1
        self._order.charge(entry.priority, used - entry.cost)
        self._charge(band, flow, (used - entry.cost) / entry.weight)
        self._tidy(band, flow, entry.priority)

    def remove(self, entry: QueueEntry) -> None:
        """Remove a queued entry that will not be dispatched."""
        band = self._bands[entry.priority]
        flow = band.flows[entry.tenant]
        self._take(band, flow, entry)
        flow.compact()
        self._tidy(band, flow, entry.priority)

    def newest_below(self, priority: int, tenant: str | None = None) -> Iterator[QueueEntry]:
        """Yield queued requests of larger priority numbers than `priority`: the last band first, the newest first.

        Args:
            priority: priority number; lower numbers are served first.
            tenant: yield only entries of this tenant; `None` for all.
        """
        for lower in sorted((p for p, band in self._bands.items() if p > priority and band.waiting), reverse=True):
            band = self._bands[lower]
            if tenant is None:
                waiting = band.waiting
            elif tenant in band.flows:
                waiting = band.flows[tenant].waiting
            else:
                continue
            yield from (entry for entry in reversed(waiting.values()) if not entry.is_part)

    def queued(self) -> Iterator[QueueEntry]:
        """Yield all queued entries, in no particular order."""
        for band in self._bands.values():
            yield from band.waiting.values()

    def _is_backlogged(self, priority: int) -> bool:
        band = self._bands.get(priority)
        return band is not None and bool(band.waiting)

    def _take(self, band: _Band, flow: _Flow, entry: QueueEntry) -> None:
        del band.waiting[entry.number]
        del flow.waiting[entry.number]
        if not flow.waiting:
            flow.order.clear()
        self._num_queued -= 1

    def _charge(self, band: _Band, flow: _Flow, service: float) -> None:
        flow.served += service
        if flow.waiting:
            band.rank(flow)

    def _tidy(self, band: _Band, flow: _Flow, priority: int) -> None:
        band.forget(flow)
        if not band.waiting and not band.num_running:
            # The end of a busy period: counters matter only relative to each other among tenants that compete.
            del self._bands[priority]
            self._order.close(priority)
