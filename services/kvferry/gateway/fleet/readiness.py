"""Readiness, room for further requests and fleet metrics, computed from the fleet's views."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core.clock import Clock
from kvferry.core.metrics import gateway_metrics, vllm_metrics, worker_metrics
from kvferry.core.metrics.metric import Metric, MetricKind
from kvferry.gateway.decide.flow.capacity import CLOSED, UNBOUNDED, Room, room, step_slots
from kvferry.gateway.decide.routing.holding import Holding
from kvferry.gateway.decide.routing.prefix_hash import PrefixHash
from kvferry.gateway.decide.routing.routes import RouteRequest, choose
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.fleet.member import WorkerView
from kvferry.gateway.fleet.membership import Knowledge, Membership
from kvferry.gateway.fleet.waking import Waker

MetricFamily = CounterMetricFamily | GaugeMetricFamily
_TIER_FIELDS: tuple[tuple[Metric, str], ...] = (
    (worker_metrics.TIER_HELD, "bytes_held"),
    (worker_metrics.TIER_HITS, "hits"),
    (worker_metrics.TIER_MISSES, "misses"),
    (worker_metrics.TIER_LOADED, "bytes_loaded"),
    (worker_metrics.TIER_LOAD_SECONDS, "load_seconds"),
    (worker_metrics.TIER_STORED, "bytes_stored"),
    (worker_metrics.TIER_FAILURES, "failures"),
    (worker_metrics.TIER_DROPPED, "dropped"),
)


def can_serve(fleet: Fleet) -> bool:
    """Return whether a route for a request exists now."""
    return choose(RouteRequest(lambda _: b"readiness"), fleet.candidates(), PrefixHash(1.0)) is not None


def notes(fleet: Fleet) -> list[str]:
    """Return a line for each worker that accepts no requests: the reason, and whether requests are served without
    it."""
    matter = "; requests are served without it" if can_serve(fleet) else ""
    return [f"{view.role} {view.endpoint.address}: {view.why_not}{matter}" for view in fleet.views() if view.why_not]


class FleetCollector(Collector):
    """Gauges read from the fleet at each scrape."""

    def __init__(self, fleet: Fleet, model: str, registry: CollectorRegistry, clock: Clock) -> None:
        """
        Args:
            fleet: the workers.
            model: name of the served model.
            registry: registry in which the collector is registered.
            clock: measures the length of a pause.
        """
        self._fleet = fleet
        self._clock = clock
        self._model = model
        registry.register(self)

    def collect(self) -> Iterator[MetricFamily]:
        views = self._fleet.views()
        workers = _gauge(gateway_metrics.WORKERS)
        for role in ("prefill", "decode", "both"):
            of_role = [view for view in views if view.role == role]
            num_ready = sum(view.takes_work for view in of_role)
            workers.add_metric(gateway_metrics.WORKERS.checked(role, "ready"), num_ready)
            workers.add_metric(gateway_metrics.WORKERS.checked(role, "out"), len(of_role) - num_ready)
        yield workers
        total = sum(view.load.blocks_total for view in views)
        free = sum(view.load.blocks_free for view in views)
        for metric, value in (
            (vllm_metrics.WAITING, sum(view.load.waiting + view.load.loading for view in views)),
            (vllm_metrics.RUNNING, sum(view.load.running for view in views)),
            (vllm_metrics.CACHE_USAGE, 1 - free / total if total else 0.0),
        ):
            gauge = _gauge(metric)
            gauge.add_metric([self._model], value)
            yield gauge
        quarantined = _gauge(worker_metrics.QUARANTINED)
        for view in views:
            quarantined.add_metric([view.endpoint.address], view.load.blocks_quarantined)
        yield quarantined
        yield from self._generation(views)
        yield from _tiers(views)

    def _generation(self, views: Sequence[WorkerView]) -> Iterator[MetricFamily]:
        pause = self._fleet.rule.pause
        paused = _gauge(gateway_metrics.PAUSED)
        paused.add_metric((), 0.0 if pause.mode is None else max(0.0, self._clock.wall() - pause.since))
        yield paused
        weights = _gauge(gateway_metrics.WEIGHTS)
        for view in views:
            weights.add_metric([view.endpoint.address, view.weights.version], 1)
        yield weights


class PoolCollector(Collector):
    """Gauges of discovery, held requests and wake-ups, read at each scrape."""

    def __init__(
        self, membership: Membership, holding: Holding, waker: Waker | None, registry: CollectorRegistry
    ) -> None:
        """
        Args:
            membership: source of the gauges of discovery.
            holding: source of the gauges of held requests.
            waker: source of the gauges of wake-ups; `None` if the gateway does not scale the pool up.
            registry: registry in which the collector is registered.
        """
        self._membership = membership
        self._holding = holding
        self._waker = waker
        registry.register(self)

    def collect(self) -> Iterator[MetricFamily]:
        is_stale = self._membership.state.state in (Knowledge.STALE, Knowledge.UNKNOWN)
        for metric, value in (
            (gateway_metrics.STALE, float(is_stale)),
            (gateway_metrics.HELD, self._holding.num_held),
        ):
            gauge = _gauge(metric)
            gauge.add_metric((), value)
            yield gauge
        wakes = CounterMetricFamily(gateway_metrics.WAKES.name, gateway_metrics.WAKES.help)
        wakes.add_metric((), 0 if self._waker is None else self._waker.num_wakes)
        yield wakes


def _tiers(views: Sequence[WorkerView]) -> Iterator[MetricFamily]:
    for metric, field in _TIER_FIELDS:
        make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for view in views:
            for tier in view.tiers:
                family.add_metric([view.endpoint.address, tier.name], getattr(tier, field))
        yield family


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


class FleetRoom:
    """Bounds on a gateway's dispatched requests. Used on the event loop's thread only."""

    def __init__(self, fleet: Fleet, max_streams: int, *, is_held_when_empty: bool) -> None:
        """
        Args:
            fleet: the workers, whose loads bound the requests.
            max_streams: maximum number of samples in flight.
            is_held_when_empty: whether requests are held while there are no workers; otherwise they are dispatched, and
                fail.
        """
        self._fleet = fleet
        self._max_streams = max_streams
        self._is_held_when_empty = is_held_when_empty
        self._room = Room()
        self._step_slots = UNBOUNDED
        self._seen = -1
        self._accepting: tuple[str, ...] | None = None
        self.is_asleep = False
        """Whether requests are held because no worker can serve them, at the last call of `now`."""

    def now(self) -> Room:
        """Return the present bounds."""
        if self._fleet.num_changes != self._seen:
            self._seen = self._fleet.num_changes
            self._update()
        return self._room

    def step_slots(self) -> int:
        """Return how many steps of beam searches may run on the workers at a time; see `capacity.step_slots`."""
        self.now()
        return self._step_slots

    def _update(self) -> None:
        found = self._fleet.rooms()
        accepting = tuple(found)
        if self._is_held_when_empty and accepting != self._accepting:
            self.is_asleep = not can_serve(self._fleet)
        self._accepting = accepting
        self._step_slots = step_slots(found.values())
        self._room = CLOSED if self.is_asleep else room(found.values(), self._max_streams)
