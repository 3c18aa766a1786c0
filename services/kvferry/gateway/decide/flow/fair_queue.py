"""Queued requests in priority bands, and weighted fair queueing between the tenants of a band.

Bands are served strictly by priority, or, with weights of priorities, share like tenants (`band_shares`). Within a
band, each tenant has a counter of its service in tokens divided by its weight; the backlogged tenant with the smallest
counter is served next, and its counter grows by the cost of the request when the request is dispatched, not when it
ends. The band's virtual time is the largest counter at a dispatch. A tenant that becomes backlogged again starts at
the virtual time, so that idle time earns no credit (start-time fair queueing, Goyal et al., SIGCOMM 1996; counters per
client with corrected costs, Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). The service of two
tenants that stay backlogged differs, per weight, by one request at most, plus the corrections of requests that have
not ended yet.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from kvferry.gateway.decide.flow.band_order import BandOrder
from kvferry.gateway.decide.flow.entry import Entry, EntryState

_SLACK = 64
"""Number of invalid heap entries above which all are removed together, if they also outnumber the valid ones."""


class _Flow:
    """The requests of one tenant in one band."""

    __slots__ = ("num_running", "order", "served", "tenant", "waiting")

    def __init__(self, tenant: str, served: float) -> None:
        self.tenant = tenant
        self.served = served
        """Service in tokens per weight."""
        self.waiting: OrderedDict[int, Entry] = OrderedDict()
        """Queued entries by number, in order of arrival."""
        self.order: list[tuple[float, int, Entry]] = []
        """Heap of entries by deadline, then arrival; those that left the queue are skipped."""
        self.num_running = 0

    def first(self) -> Entry:
        """Return the queued entry with the earliest deadline; there must be one."""
        while self.order[0][2].state is not EntryState.QUEUED:
            heapq.heappop(self.order)
        return self.order[0][2]

    def compact(self) -> None:
        if len(self.order) > 2 * len(self.waiting) + _SLACK:
            self.order = [(entry.deadline, entry.number, entry) for entry in self.waiting.values()]
            heapq.heapify(self.order)


class _Band:
    """The flows of one priority."""

    __slots__ = ("flows", "num_running", "ranking", "virtual_time", "waiting")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.flows: dict[str, _Flow] = {}
        self.waiting: OrderedDict[int, Entry] = OrderedDict()
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

    def add(self, entry: Entry) -> None:
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
        heapq.heappush(flow.order, (entry.deadline, entry.number, entry))
        self._num_queued += 1

    def next(self) -> Entry | None:
        """Return the entry that is to be dispatched next, without removing it; `None` if the queue is empty."""
        priority = self._order.first(self._is_backlogged)
        return None if priority is None else self._bands[priority].least().first()

    def begin(self, entry: Entry) -> None:
        """Remove the entry that `next` returned, and charge its cost to its tenant."""
        band = self._bands[entry.priority]
        flow = band.flows[entry.tenant]
        band.virtual_time = max(band.virtual_time, flow.served)
        flow.num_running += 1
        band.num_running += 1
        self._order.begin(entry.priority, entry.cost)
        self._take(band, flow, entry)
        self._charge(band, flow, entry.cost / entry.weight)

    def end(self, entry: Entry, used: float) -> None:
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

    def remove(self, entry: Entry) -> None:
        """Remove a queued entry that will not be dispatched."""
        band = self._bands[entry.priority]
        flow = band.flows[entry.tenant]
        self._take(band, flow, entry)
        flow.compact()
        self._tidy(band, flow, entry.priority)

    def newest_below(self, priority: int, tenant: str | None = None) -> Iterator[Entry]:
        """Yield queued entries of larger priority numbers than `priority`: the last band first, the newest first.

        Args:
            priority: priority number; lower numbers are served first.
            tenant: yield only entries of this tenant; `None` for all.
        """
        for lower in sorted((p for p, band in self._bands.items() if p > priority and band.waiting), reverse=True):
            band = self._bands[lower]
            if tenant is None:
                yield from reversed(band.waiting.values())
            elif tenant in band.flows:
                yield from reversed(band.flows[tenant].waiting.values())

    def queued(self) -> Iterator[Entry]:
        """Yield all queued entries, in no particular order."""
        for band in self._bands.values():
            yield from band.waiting.values()

    def _is_backlogged(self, priority: int) -> bool:
        band = self._bands.get(priority)
        return band is not None and bool(band.waiting)

    def _take(self, band: _Band, flow: _Flow, entry: Entry) -> None:
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
