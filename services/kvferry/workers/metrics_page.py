"""Serves a worker's Prometheus metrics from a thread, which reads the status on the event loop.

In addition to `kvferry_*`, it exports the metrics that the llm-d endpoint picker and common dashboards read from model
servers; with two engines in one process, these are sums.
"""

import asyncio
import wsgiref.simple_server
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry.core.addresses import join_address, listen_address
from kvferry.core.causes import ComputeCause
from kvferry.core.errors import cannot_listen
from kvferry.core.histogram import Histogram
from kvferry.core.metrics import tls_metrics, vllm_metrics, worker_metrics
from kvferry.core.metrics.metric import Metric
from kvferry.engine.engine import Engine
from kvferry.engine.schedule.speculation.speculation import SpeculationCounts
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.v1.worker_admin_pb2 import StatusResponse
from kvferry.workers.unit import WorkerUnit

_ANSWER_SECONDS = 2.0


_OWN: tuple[tuple[Metric, str], ...] = (
    (worker_metrics.RUNNING, "running"),
    (worker_metrics.WAITING, "waiting"),
    (worker_metrics.LOADING, "loading"),
    (worker_metrics.BLOCKS, "blocks_total"),
    (worker_metrics.BLOCKS_FREE, "blocks_free"),
    (worker_metrics.QUARANTINED, "blocks_quarantined"),
    (worker_metrics.OFFERED, "tickets_offered"),
    (worker_metrics.CLAIMED, "tickets_claimed"),
    (worker_metrics.TRANSFERS, "transfers"),
    (worker_metrics.OPEN_CALLS, "open_calls"),
    (worker_metrics.EXPORTS, "exports"),
    (worker_metrics.EXPORTED_BLOCKS, "exported_blocks"),
    (worker_metrics.PINS, "pins"),
    (worker_metrics.PINNED_BLOCKS, "blocks_pinned"),
)


Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

_COUNTERS: tuple[tuple[Metric, Metric | None, Callable[[Engine], int]], ...] = (
    (worker_metrics.STEPS, None, lambda e: e.statistics.num_steps),
    (worker_metrics.PREEMPTIONS, vllm_metrics.PREEMPTIONS, lambda e: e.scheduler.num_preemptions),
    (
        worker_metrics.PREFIX_QUERIED,
        vllm_metrics.PREFIX_QUERIES,
        lambda e: e.scheduler.admission.num_queried_tokens,
    ),
    (worker_metrics.PREFIX_HIT, vllm_metrics.PREFIX_HITS, lambda e: e.scheduler.admission.num_hit_tokens),
    (worker_metrics.PROMPT_TOKENS, vllm_metrics.PROMPT_TOKENS, lambda e: e.statistics.num_prompt_tokens),
    (worker_metrics.OUTPUT_TOKENS, vllm_metrics.OUTPUT_TOKENS, lambda e: e.statistics.num_output_tokens),
    (worker_metrics.FINISHED, vllm_metrics.FINISHED, lambda e: e.statistics.num_finished),
    (worker_metrics.LATE_MASKS, None, lambda e: 0 if e.masks is None else e.masks.num_late),
    (worker_metrics.DRAFTS, vllm_metrics.DRAFTS, lambda e: _counts(e).num_drafts),
    (worker_metrics.DRAFT_TOKENS, vllm_metrics.DRAFT_TOKENS, lambda e: _counts(e).num_draft_tokens),
    (
        worker_metrics.ACCEPTED_TOKENS,
        vllm_metrics.ACCEPTED_TOKENS,
        lambda e: _counts(e).num_accepted_tokens,
    ),
)
"""Counters of an engine: metric per worker, metric for the sum under vLLM's name, and the value's attribute."""

_NO_DRAFTS = SpeculationCounts()


def _counts(engine: Engine) -> SpeculationCounts:
    return _NO_DRAFTS if engine.speculation is None else engine.speculation.counts


_HISTOGRAMS: tuple[tuple[Metric, Metric | None, Callable[[Engine], Histogram | None]], ...] = (
    (worker_metrics.STEP_TOKENS, vllm_metrics.STEP_TOKENS, lambda e: e.statistics.step_tokens),
    (worker_metrics.STEP_SEQUENCES, None, lambda e: e.statistics.step_sequences),
    (worker_metrics.QUEUE_SECONDS, vllm_metrics.QUEUE_SECONDS, lambda e: e.statistics.queue_seconds),
    (worker_metrics.PREFILL_SECONDS, vllm_metrics.PREFILL_SECONDS, lambda e: e.statistics.prefill_seconds),
    (
        worker_metrics.FIRST_TOKEN_SECONDS,
        vllm_metrics.FIRST_TOKEN_SECONDS,
        lambda e: e.statistics.first_token_seconds,
    ),
    (
        worker_metrics.INTER_TOKEN_SECONDS,
        vllm_metrics.INTER_TOKEN_SECONDS,
        lambda e: e.statistics.inter_token_seconds,
    ),
    (worker_metrics.REQUEST_SECONDS, vllm_metrics.REQUEST_SECONDS, lambda e: e.statistics.request_seconds),
    (worker_metrics.DECODE_SECONDS, vllm_metrics.DECODE_SECONDS, lambda e: e.statistics.decode_seconds),
    (
        worker_metrics.OUTPUT_TOKEN_SECONDS,
        vllm_metrics.OUTPUT_TOKEN_SECONDS,
        lambda e: e.statistics.output_token_seconds,
    ),
    (
        worker_metrics.REQUEST_PROMPT_TOKENS,
        vllm_metrics.REQUEST_PROMPT_TOKENS,
        lambda e: e.statistics.prompt_lengths,
    ),
    (
        worker_metrics.REQUEST_OUTPUT_TOKENS,
        vllm_metrics.REQUEST_OUTPUT_TOKENS,
        lambda e: e.statistics.output_lengths,
    ),
    (worker_metrics.COMPILE_SECONDS, None, lambda e: None if e.masks is None else e.masks.compile_seconds),
    (worker_metrics.MASK_SECONDS, None, lambda e: None if e.masks is None else e.masks.mask_seconds),
)
"""Histograms of an engine: metric per worker, metric for the sum under vLLM's name, and the value's attribute."""


def engine_families(model: str, engines: Sequence[tuple[str, Engine]]) -> Iterator[Family]:
    """Convert the statistics of each engine to metrics.

    Args:
        model: name of the served model.
        engines: worker id and engine.
    """
    for metric, alias, count in _COUNTERS:
        values = [(worker, count(engine)) for worker, engine in engines]
        yield _counter(metric, values)
        if alias is not None:
            yield _counter(alias, [(model, sum(value for _, value in values))])
    for metric, alias, histogram in _HISTOGRAMS:
        found = [(worker, each) for worker, engine in engines if (each := histogram(engine)) is not None]
        yield _histogram(metric, found)
        if alias is not None:
            yield _histogram(alias, [(model, each) for _, each in found])
    yield from _prompt_sources(engines)
    by_worker = [(worker, _counts(engine).accepted_by_position) for worker, engine in engines]
    yield _by_position(worker_metrics.ACCEPTED_BY_POSITION, by_worker)
    summed = [sum(counts) for counts in zip(*(counts for _, counts in by_worker), strict=True)]
    yield _by_position(vllm_metrics.ACCEPTED_BY_POSITION, [(model, summed)])


def families(units: Sequence[StatusResponse]) -> Iterator[GaugeMetricFamily]:
    """Convert the status of each engine to metrics."""
    for metric, field in _OWN:
        yield _by_worker(metric, [(u.identity.worker_id, getattr(u.load, field)) for u in units])
    ready = [(u.identity.worker_id, u.ready and not u.draining) for u in units]
    yield _by_worker(worker_metrics.READY, ready)
    loads = [u.load for u in units]
    model = [units[0].model]
    total = sum(load.blocks_total for load in loads)
    free = sum(load.blocks_free for load in loads)
    yield _gauge(vllm_metrics.WAITING, model, sum(load.waiting + load.loading for load in loads))
    yield _gauge(vllm_metrics.RUNNING, model, sum(load.running for load in loads))
    yield _gauge(vllm_metrics.CACHE_USAGE, model, 1 - free / total if total else 0.0)
    yield _gauge(vllm_metrics.CACHE_CONFIG, [*model, str(units[0].block_tokens), str(total)], 1)


class MetricsPage:
    """The metrics server, which runs from construction until `close`."""

    def __init__(
        self, address: str, units: Sequence[WorkerUnit], tls: PoolTls | None = None, *, load_seconds: float = 0.0
    ) -> None:
        """Serve `/metrics`. Must be called on a running event loop.

        Args:
            address: `host:port`; port 0 selects a free port.
            units: the worker units of this process.
            tls: TLS of the pool, whose certificate has a metric; `None` for plain connections.
            load_seconds: seconds that the process took to load the model.

        Raises:
            UsageError: the address cannot be bound.
        """
        host, port = listen_address(address, "metrics")
        registry = CollectorRegistry()
        registry.register(_FromUnits(units, asyncio.get_running_loop(), tls, load_seconds))
        self._server: wsgiref.simple_server.WSGIServer
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise cannot_listen("metrics", address, error) from error
        self.address = join_address(host, self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_ANSWER_SECONDS)


class _FromUnits(Collector):
    def __init__(
        self,
        units: Sequence[WorkerUnit],
        loop: asyncio.AbstractEventLoop,
        tls: PoolTls | None,
        load_seconds: float,
    ) -> None:
        self._units = units
        self._load_seconds = load_seconds
        self._tls = tls
        self._loop = loop

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # otherwise registration calls `collect`, which would deadlock on this event loop

    def collect(self) -> Iterator[Family]:
        future = asyncio.run_coroutine_threadsafe(self._numbers(), self._loop)
        units = future.result(_ANSWER_SECONDS)
        yield from families(units)
        loads = [(u.identity.worker_id, self._load_seconds) for u in units]
        yield _by_worker(worker_metrics.LOAD_SECONDS, loads)
        if self._tls is not None:
            yield _gauge(tls_metrics.NOT_AFTER, ["pool"], self._tls.not_after)
        engines = [(u.identity.worker_id, unit.engine) for u, unit in zip(units, self._units, strict=True)]
        yield from engine_families(units[0].model, engines)

    async def _numbers(self) -> list[StatusResponse]:
        return [unit.status() for unit in self._units]


def _by_worker(metric: Metric, values: Sequence[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for worker, value in values:
        family.add_metric([worker], float(value))
    return family


def _counter(metric: Metric, values: Sequence[tuple[str, float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for label, value in values:
        family.add_metric([label], float(value))
    return family


def _by_position(metric: Metric, values: Sequence[tuple[str, Sequence[int]]]) -> CounterMetricFamily:
    """Return a counter by position, up to the last position with a value above 0."""
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for label, counts in values:
        for position, count in enumerate(counts):
            if count:
                family.add_metric([label, str(position)], count)
    return family


def _prompt_sources(engines: Sequence[tuple[str, Engine]]) -> Iterator[CounterMetricFamily]:
    """Return the counters of prompt tokens: the computed ones by cause, the others by source."""
    computed = CounterMetricFamily(
        worker_metrics.COMPUTED_TOKENS.name,
        worker_metrics.COMPUTED_TOKENS.help,
        labels=worker_metrics.COMPUTED_TOKENS.labels,
    )
    reused = CounterMetricFamily(
        worker_metrics.REUSED_TOKENS.name,
        worker_metrics.REUSED_TOKENS.help,
        labels=worker_metrics.REUSED_TOKENS.labels,
    )
    for worker, engine in engines:
        totals = engine.scheduler.accounts.totals
        for cause in worker_metrics.COMPUTED_TOKENS.values["cause"]:
            computed.add_metric([worker, cause], totals.computed[ComputeCause(cause)])
        for source in worker_metrics.REUSED_TOKENS.values["source"]:
            reused.add_metric([worker, source], getattr(totals, source))
    yield computed
    yield reused


def _histogram(metric: Metric, values: Sequence[tuple[str, Histogram]]) -> HistogramMetricFamily:
    """Convert histograms to a metric family with one entry per label; histograms with equal labels are added."""
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for label in dict.fromkeys(label for label, _ in values):
        same = [histogram for other, histogram in values if other == label]
        counts = [sum(column) for column in zip(*(histogram.counts for histogram in same), strict=True)]
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric([label], buckets, sum(histogram.total for histogram in same))
    return family


def _gauge(metric: Metric, labels: Sequence[str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    family.add_metric(metric.checked(*labels), value)
    return family
