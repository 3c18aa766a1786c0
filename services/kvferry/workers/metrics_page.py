"""A worker's page of Prometheus metrics: a small server in a thread, which asks the event loop for the numbers.

Beside our own names, those that the llm-d picker and common dashboards read from every model server's pod; with two
engines in one process those are sums.
"""

import asyncio
import wsgiref.simple_server
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.core import metrics
from kvferry.core.errors import UsageError
from kvferry.core.metrics import Metric
from kvferry.v1.worker_admin_pb2 import StatusResponse
from kvferry.workers.unit import WorkerUnit

_ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class UnitNumbers:
    """One engine's, at one moment."""

    status: StatusResponse
    exports: int
    exported_blocks: int


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
)


def families(units: Sequence[UnitNumbers]) -> Iterator[GaugeMetricFamily]:
    """What the page says of these engines."""
    for metric, field in _OWN:
        yield _by_worker(metric, [(u.status.identity.worker_id, getattr(u.status.load, field)) for u in units])
    ready = [(u.status.identity.worker_id, u.status.ready and not u.status.draining) for u in units]
    yield _by_worker(metrics.WORKER_READY, ready)
    yield _by_worker(metrics.WORKER_EXPORTS, [(u.status.identity.worker_id, u.exports) for u in units])
    yield _by_worker(metrics.WORKER_EXPORTED_BLOCKS, [(u.status.identity.worker_id, u.exported_blocks) for u in units])
    loads = [unit.status.load for unit in units]
    model = [units[0].status.model]
    total = sum(load.blocks_total for load in loads)
    free = sum(load.blocks_free for load in loads)
    yield _gauge(metrics.VLLM_WAITING, model, sum(load.waiting + load.loading for load in loads))
    yield _gauge(metrics.VLLM_RUNNING, model, sum(load.running for load in loads))
    yield _gauge(metrics.VLLM_CACHE_USAGE, model, 1 - free / total if total else 0.0)
    yield _gauge(metrics.VLLM_CACHE_CONFIG, [*model, str(units[0].status.block_tokens), str(total)], 1)


class MetricsPage:
    """The server, from its first answer to `close`."""

    def __init__(self, address: str, units: Sequence[WorkerUnit]) -> None:
        """Serve `/metrics` at `address` (`host:port`; port 0 takes a free one). Needs a running event loop.

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
        return []  # otherwise registering would collect, and wait for the loop that it runs on

    def collect(self) -> Iterator[GaugeMetricFamily]:
        asked = asyncio.run_coroutine_threadsafe(self._numbers(), self._loop)
        yield from families(asked.result(_ANSWER_SECONDS))

    async def _numbers(self) -> list[UnitNumbers]:
        loads = [unit.context.loop.load for unit in self._units]
        return [
            UnitNumbers(unit.status(), load.exports, load.exported_blocks)
            for unit, load in zip(self._units, loads, strict=True)
        ]


def _by_worker(metric: Metric, values: Sequence[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for worker, value in values:
        family.add_metric([worker], float(value))
    return family


def _gauge(metric: Metric, labels: Sequence[str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    family.add_metric(labels, value)
    return family
