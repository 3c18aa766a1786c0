"""Worker process: start, signals, draining and exit.

SIGTERM may also be sent while the process starts: it then exits immediately. A serving process reports not ready,
rejects new requests, and exits when running requests have ended or after `drain_seconds`; a second SIGTERM ends the
draining.
"""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import NoReturn

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.core.ids import new_incarnation
from kvferry.core.process.stop_signals import stop_signals
from kvferry.core.traces.spans import Tracer
from kvferry.engine.build import LoadedModel, load_model
from kvferry.engine.execute.models.build import resolve_kernels
from kvferry.engine.schedule.speculation.settings import OFF
from kvferry.rpc.otlp import open_tracer
from kvferry.rpc.server import RpcServer
from kvferry.rpc.tls.pool_tls import PoolTls
from kvferry.workers.build import UnitEndpoint, host_of
from kvferry.workers.config import WorkerConfig
from kvferry.workers.metrics_page import MetricsPage
from kvferry.workers.throughput import WorkDone, throughput_text
from kvferry.workers.unit import WorkerUnit

_log = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0
"""Time between two lines about an engine's throughput."""
Announce = Callable[[Mapping[str, object]], None]
"""Callback for process events: `listening` with the bound addresses, then `ready`."""


async def run_worker(config: WorkerConfig, places: list[UnitEndpoint], announce: Announce) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Args:
        config: configuration of the worker.
        places: endpoint of each unit.
        announce: called with the process events.

    Raises:
        KvferryError: the model cannot be loaded, an address cannot be bound, or a setting is invalid.
    """
    for place in places:
        _check_reach(config, place)
    process = _Process(config, announce)
    with stop_signals(asyncio.get_running_loop(), process.stop.set, on_again=process.stop_draining):
        starting = asyncio.create_task(process.start(places))
        stopping = asyncio.create_task(process.stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                process.leave()
            starting.result()
            await stopping
        finally:
            await process.drain()
    return process.report()


class _Process:
    """The worker units of a process, and its shutdown."""

    def __init__(self, config: WorkerConfig, announce: Announce) -> None:
        self._config = config
        self._announce = announce
        self._clock: Clock = SystemClock()
        self._units: list[WorkerUnit] = []
        self._failures: list[BaseException] = []
        self._page: MetricsPage | None = None
        self._health: RpcServer | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._tracer: Tracer | None = None
        self.stop = asyncio.Event()

    def stop_draining(self) -> None:
        """Stop without waiting for the requests in flight."""
        for unit in self._units:
            unit.stop_draining()

    def fail(self, error: BaseException) -> None:
        """Record an engine's unexpected error and stop the process."""
        self._failures.append(error)
        self.stop.set()

    async def start(self, places: list[UnitEndpoint]) -> None:
        """Load the model, bind all ports and warm up."""
        begun = self._clock.monotonic()
        config = self._config
        name = config.worker_id or places[0].listen
        self._tracer = open_tracer(config.traces, f"kvferry-{config.role}", name, self._clock)
        tls = None if config.pool_tls is None else PoolTls(config.pool_tls, is_worker=True)
        loading = self._clock.monotonic()
        model = await asyncio.to_thread(_load, config)
        load_seconds = self._clock.monotonic() - loading
        for place in places:
            unit = await WorkerUnit.start(
                _settings_of(config, place),
                place,
                model,
                incarnation=new_incarnation(),
                clock=self._clock,
                on_failure=self.fail,
                tls=tls,
                tracer=self._tracer,
            )
            self._units.append(unit)  # one after another, so that units already started are stopped if one fails
        addresses = _addresses(self._units)
        if tls is not None:
            self._renewing = asyncio.create_task(tls.follow(), name="pool tls")
        if self._config.health:  # the last unit's status, since it becomes ready last
            self._health = await self._units[-1].report_health(self._config.health)
            addresses["health"] = self._health.address
        if self._config.metrics:
            self._page = MetricsPage(self._config.metrics, self._units, tls, load_seconds=load_seconds)
            addresses["metrics"] = self._page.address
        for unit in self._units:
            _log.info("%s", _described(unit, model, load_seconds))
        self._announce({"event": "listening", **addresses})
        for unit in self._units:
            await unit.warm_up()
        # Loaded objects are never freed; without this, each garbage collection would traverse all of them.
        gc.collect()
        gc.freeze()
        seconds = round(self._clock.monotonic() - begun, 3)
        self._announce({"event": "ready", "seconds": seconds, "dtype": model.dtype})
        if _log.isEnabledFor(logging.INFO):
            self._reporting = asyncio.create_task(self._report_throughput(), name="throughput")

    async def _report_throughput(self) -> None:
        """Log what each engine does, from time to time."""
        before = [_work_done(unit, self._clock) for unit in self._units]
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            after = [_work_done(unit, self._clock) for unit in self._units]
            for unit, earlier, now in zip(self._units, before, after, strict=True):
                if text := throughput_text(earlier, now):
                    _log.info("%s%s", f"{unit.parts.endpoint.role}: " if len(self._units) > 1 else "", text)
            before = after

    async def drain(self) -> None:
        """Drain and stop all units."""
        seconds = 0 if self._failures else self._config.drain_seconds
        await asyncio.gather(*(unit.stop(seconds) for unit in self._units))
        for task in (self._renewing, self._reporting):
            if task is not None:
                task.cancel()
        if self._health is not None:
            await self._health.stop(0)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        if self._page is not None:
            await asyncio.to_thread(self._page.close)

    def report(self) -> int:
        """Print the reason for exiting, and return the exit status."""
        if not self._failures:
            return 0
        sys.stderr.write(f"kvferry worker: stopped, {self._failures[0]}\n")
        return 1

    def leave(self) -> NoReturn:
        """Exit immediately during start: no requests have been accepted, and loading a model cannot be interrupted."""
        status = self.report()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _load(config: WorkerConfig) -> LoadedModel:
    # A prefill worker does not draft, so it loads no draft model.
    return load_model(replace(config.engine, speculation=OFF) if config.role == "prefill" else config.engine)


def _described(unit: WorkerUnit, model: LoadedModel, load_seconds: float) -> str:
    """Return the line about what a unit serves, and with what."""
    kernels = resolve_kernels(model.settings.kernels, model.config, model.dtype, model.model.device)
    role, pages = unit.parts.endpoint.role, unit.status().load.blocks_total
    return (
        f"{model.config.name}: {role}, {model.dtype} on {model.model.device} with kernels {kernels}, "
        f"{pages} KV pages of {model.settings.block_tokens} tokens ({model.kv_bytes / (1 << 20):.0f} MiB), "
        f"loaded in {load_seconds:.1f} s"
    )


def _work_done(unit: WorkerUnit, clock: Clock) -> WorkDone:
    engine = unit.engine
    load, statistics, admission = unit.status().load, engine.statistics, engine.scheduler.admission
    return WorkDone(
        at=clock.monotonic(),
        prompt_tokens=statistics.num_prompt_tokens,
        output_tokens=statistics.num_output_tokens,
        queried_tokens=admission.num_queried_tokens,
        hit_tokens=admission.num_hit_tokens,
        running=load.running,
        waiting=load.waiting + load.loading,
        kv_usage=1 - load.blocks_free / load.blocks_total if load.blocks_total else 0.0,
    )


def _check_reach(config: WorkerConfig, place: UnitEndpoint) -> None:
    host = host_of(place.listen)
    with suppress(ValueError):  # a host name
        if place.role != "both" and not config.advertise_host and ip_address(host).is_unspecified:
            raise UsageError(
                f"listening on {host}, which other workers cannot reach; set --advertise-host to a host that "
                "they can reach",
                field="advertise_host",
            )


def _settings_of(config: WorkerConfig, place: UnitEndpoint) -> WorkerConfig:
    """Return the settings of one unit; the units of a split process have ids of their own."""
    if config.role == "split" and config.worker_id:
        return replace(config, worker_id=f"{config.worker_id}-{place.role}")
    return config


def _addresses(units: list[WorkerUnit]) -> dict[str, str]:
    if len(units) > 2:
        raise InvariantBroken(f"a worker process has one or two units, not {len(units)}")
    found: dict[str, str] = {}
    for unit, prefix in zip(units, ("", "decode_"), strict=False):
        found[f"{prefix}grpc"] = unit.context.address
        found[f"{prefix}admin"] = unit.admin_address
    return found
