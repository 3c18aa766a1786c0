"""Serves a worker's Prometheus metrics from a thread, which reads the status on the event loop.

In addition to `kvferry_*`, it exports the metrics that the llm-d endpoint picker and common dashboards read from model
servers; with two engines in one process, these are sums.
"""

import asyncio
import wsgiref.simple_server
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core import metrics
from kvferry.core.errors import UsageError
from kvferry.core.metrics import Metric
from kvferry.v1.worker_admin_pb2 import StatusResponse
from kvferry.workers.unit import WorkerUnit

_ANSWER_SECONDS = 2.0


_OWN: tuple[tuple[Metric, str], ...] = (
    (metrics.WORKER_RUNNING, "running"),
    (metrics.WORKER_WAITING, "waiting"),
    (metrics.WORKER_LOADING, "loading"),
    (metrics.WORKER_BLOCKS, "blocks_total"),
    (metrics.WORKER_BLOCKS_FREE, "blocks_free"),
    (metrics.WORKER_QUARANTINED, "blocks_quarantined"),
    (metrics.WORKER_OFFERED, "tickets_offered"),
    (metrics.WORKER_CLAIMED, "tickets_claimed"),
    (metrics.WORKER_TRANSFERS, "transfers"),
    (metrics.WORKER_OPEN_CALLS, "open_calls"),
    (metrics.WORKER_EXPORTS, "exports"),
    (metrics.WORKER_EXPORTED_BLOCKS, "exported_blocks"),
)


def families(units: Sequence[StatusResponse]) -> Iterator[GaugeMetricFamily]:
    """Convert the status of each engine to metrics."""
    for metric, field in _OWN:
        yield _by_worker(metric, [(u.identity.worker_id, getattr(u.load, field)) for u in units])
    ready = [(u.identity.worker_id, u.ready and not u.draining) for u in units]
    yield _by_worker(metrics.WORKER_READY, ready)
    loads = [u.load for u in units]
    model = [units[0].model]
    total = sum(load.blocks_total for load in loads)
    free = sum(load.blocks_free for load in loads)
    yield _gauge(metrics.VLLM_WAITING, model, sum(load.waiting + load.loading for load in loads))
    yield _gauge(metrics.VLLM_RUNNING, model, sum(load.running for load in loads))
    yield _gauge(metrics.VLLM_CACHE_USAGE, model, 1 - free / total if total else 0.0)
    yield _gauge(metrics.VLLM_CACHE_CONFIG, [*model, str(units[0].block_tokens), str(total)], 1)


class MetricsPage:
    """The metrics server, which runs from construction until `close`."""

    def __init__(self, address: str, units: Sequence[WorkerUnit]) -> None:
        """Serve `/metrics` at `address` (`host:port`; port 0 selects a free port). Must be called on a running event
        loop.

        Raises:
            UsageError: the address cannot be bound.
        """
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdecimal() or int(port) > 0xFFFF:
            raise UsageError(f"{address!r} is not an address; write host:port", field="metrics")
        registry = CollectorRegistry()
        registry.register(_FromUnits(units, asyncio.get_running_loop()))
        self._server: wsgiref.simple_server.WSGIServer
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise UsageError(f"cannot listen on {address}: {error}", field="metrics") from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_ANSWER_SECONDS)


class _FromUnits(Collector):
    def __init__(self, units: Sequence[WorkerUnit], loop: asyncio.AbstractEventLoop) -> None:
        self._units = units
        self._loop = loop

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # otherwise registration calls `collect`, which would deadlock on this event loop

    def collect(self) -> Iterator[GaugeMetricFamily]:
        asked = asyncio.run_coroutine_threadsafe(self._numbers(), self._loop)
        yield from families(asked.result(_ANSWER_SECONDS))

    async def _numbers(self) -> list[StatusResponse]:
        return [unit.status() for unit in self._units]


def _by_worker(metric: Metric, values: Sequence[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for worker, value in values:
        family.add_metric([worker], float(value))
    return family


def _gauge(metric: Metric, labels: Sequence[str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    family.add_metric(labels, value)
    return family
