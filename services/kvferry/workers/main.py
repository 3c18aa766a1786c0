"""A worker process from its settings to its end.

SIGTERM may come at any time. While the process starts, it is gone at once, since nobody was served yet. Later it is
not ready from that moment on, takes no new work, and ends with the last of its work or after `drain_seconds`; a second
SIGTERM ends the waiting.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import NoReturn

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.core.ids import new_incarnation
from kvferry.kv.connector import TransportSetup
from kvferry.workers.build import LoadedModel, build_engine, load_model
from kvferry.workers.config import WorkerConfig
from kvferry.workers.metrics_page import MetricsPage
from kvferry.workers.unit import UnitPlace, WorkerUnit

Announce = Callable[[Mapping[str, object]], None]
"""Told `listening` with the addresses bound, then `ready`."""


async def run_worker(config: WorkerConfig, places: list[UnitPlace], announce: Announce) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Raises:
        KvferryError: the model cannot be loaded, an address cannot be bound, a setting is wrong.
    """
    for place in places:
        _check_reach(config, place)
    process = _Process(config, announce)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, process.signalled)
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
        # From here on a signal says nothing new, and must not be written to a loop that is being closed.
        signal.set_wakeup_fd(-1)
    return process.report()


class _Process:
    """The units of one process and what was asked of it."""

    def __init__(self, config: WorkerConfig, announce: Announce) -> None:
        self._config = config
        self._announce = announce
        self._clock: Clock = SystemClock()
        self._units: list[WorkerUnit] = []
        self._failures: list[BaseException] = []
        self._page: MetricsPage | None = None
        self.stop = asyncio.Event()

    def signalled(self) -> None:
        """Asked to end; asked again, to end now."""
        if self.stop.is_set():
            for unit in self._units:
                unit.hasten()
        self.stop.set()

    def fail(self, error: BaseException) -> None:
        """An engine broke an invariant."""
        self._failures.append(error)
        self.stop.set()

    async def start(self, places: list[UnitPlace]) -> None:
        """Load, bind and warm up."""
        begun = self._clock.monotonic()
        model = await asyncio.to_thread(load_model, self._config.engine)
        for place in places:
            unit = await _start_unit(self._config, place, model, self._clock, self.fail)
            self._units.append(unit)  # one by one, so that those that did start are stopped if the next one fails
        addresses = _addresses(self._units)
        if self._config.metrics:
            self._page = MetricsPage(self._config.metrics, self._units)
            addresses["metrics"] = self._page.address
        self._announce({"event": "listening", **addresses})
        for unit in self._units:
            await unit.warm_up()
        # What was loaded stays; without this each collection of garbage would look at all of it again.
        gc.collect()
        gc.freeze()
        seconds = round(self._clock.monotonic() - begun, 3)
        self._announce({"event": "ready", "seconds": seconds, "dtype": model.dtype})

    async def drain(self) -> None:
        """End all units."""
        seconds = 0 if self._failures else self._config.drain_seconds
        await asyncio.gather(*(unit.stop(seconds) for unit in self._units))
        if self._page is not None:
            await asyncio.to_thread(self._page.close)

    def report(self) -> int:
        """Say why it ended; the exit status."""
        if not self._failures:
            return 0
        sys.stderr.write(f"kvferry worker: stopped, {self._failures[0]}\n")
        return 1

    def leave(self) -> NoReturn:
        """End while starting: nothing is owed to anybody, and a thread that loads a model cannot be asked to stop."""
        status = self.report()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _check_reach(config: WorkerConfig, place: UnitPlace) -> None:
    host = _host(place)
    with suppress(ValueError):  # a name
        if place.role != "both" and not config.advertise_host and ip_address(host).is_unspecified:
            raise UsageError(
                f"it listens on {host}, which no other worker can call; name the host that they reach it under with "
                "--advertise-host",
                field="advertise_host",
            )


def _host(place: UnitPlace) -> str:
    return place.listen.rpartition(":")[0].strip("[]")


async def _start_unit(
    config: WorkerConfig, place: UnitPlace, model: LoadedModel, clock: Clock, fail: Callable[[BaseException], None]
) -> WorkerUnit:
    incarnation = new_incarnation()
    setup = TransportSetup(
        listen_host=_host(place),
        advertise_host=config.advertise_host.strip("[]"),
        secrets=config.ticket_secrets,
    )
    built = await asyncio.to_thread(
        build_engine,
        config.engine,
        model,
        connector=config.connector,
        setup=setup,
        incarnation=incarnation,
        tenant_secret=config.tenant_secret,
    )
    own = (
        replace(config, worker_id=f"{config.worker_id}-{place.role}")
        if config.role == "split" and config.worker_id
        else config
    )
    unit = WorkerUnit(own, place, model, built, incarnation=incarnation, clock=clock, on_failure=fail)
    await unit.start()
    return unit


def _addresses(units: list[WorkerUnit]) -> dict[str, str]:
    if len(units) > 2:
        raise InvariantBroken(f"a worker process has one or two units, not {len(units)}")
    found: dict[str, str] = {}
    for unit, prefix in zip(units, ("", "decode_"), strict=False):
        found[f"{prefix}grpc"] = unit.context.address
        found[f"{prefix}admin"] = unit.admin_address
    return found
