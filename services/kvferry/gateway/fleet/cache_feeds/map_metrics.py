"""Metrics of the cache map, read at each scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core.metrics import gateway_metrics
from kvferry.core.metrics.metric import Metric, MetricKind
from kvferry.gateway.decide.cache_map.cache_map import CacheMap
from kvferry.gateway.decide.cache_map.map_states import MapState
from kvferry.gateway.fleet.cache_feeds.cache_feeds import CacheFeeds

MetricFamily = CounterMetricFamily | GaugeMetricFamily


class CacheMapCollector(Collector):
    """State, size and totals of one gateway's cache map."""

    def __init__(self, cache_map: CacheMap, feeds: CacheFeeds, registry: CollectorRegistry) -> None:
        self._map = cache_map
        self._feeds = feeds
        registry.register(self)

    def collect(self) -> Iterator[MetricFamily]:
        replicas = self._map.replicas
        state, blocks = _family(gateway_metrics.MAP_STATE), _family(gateway_metrics.MAP_BLOCKS)
        for address, replica in replicas.items():
            for each in (MapState.EXACT, MapState.CATCHING_UP, MapState.BLIND):
                labels = gateway_metrics.MAP_STATE.checked(address, each.value)
                state.add_metric(labels, float(replica.state is each))
            blocks.add_metric([address], replica.num_indexed)
        yield from (state, blocks)
        yield _single(gateway_metrics.MAP_BYTES, self._map.index.num_bytes)
        counts = self._map.counts
        events = _family(gateway_metrics.MAP_EVENTS)
        for kind, number in (
            ("snapshot", counts.snapshot_blocks),
            ("stored", counts.stored_blocks),
            ("removed", counts.removed_blocks),
        ):
            events.add_metric(gateway_metrics.MAP_EVENTS.checked(kind), number)
        yield events
        losses = _family(gateway_metrics.MAP_LOSSES)
        for event, number in self._map.losses.items():
            losses.add_metric(gateway_metrics.MAP_LOSSES.checked(event.value), number)
        yield losses
        yield _single(gateway_metrics.MAP_COLLISIONS, self._map.index.num_collisions)
        audits = _family(gateway_metrics.MAP_AUDITS)
        for outcome, number in self._feeds.audits.items():
            audits.add_metric(gateway_metrics.MAP_AUDITS.checked(outcome), number)
        yield audits


def _family(metric: Metric) -> MetricFamily:
    make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return make(metric.name, metric.help, labels=metric.labels)


def _single(metric: Metric, value: float) -> MetricFamily:
    family = _family(metric)
    family.add_metric((), value)
    return family
