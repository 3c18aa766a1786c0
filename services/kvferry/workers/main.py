"""A worker process from its settings to its end."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import InvariantBroken
from kvferry.core.ids import new_incarnation
from kvferry.kv.connector import TransportSetup
from kvferry.workers.build import LoadedModel, build_engine, load_model
from kvferry.workers.config import WorkerConfig
from kvferry.workers.unit import UnitPlace, WorkerUnit

Announce = Callable[[Mapping[str, object]], None]
"""Told `listening` with the addresses bound, then `ready`."""


async def run_worker(config: WorkerConfig, places: list[UnitPlace], announce: Announce) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Raises:
        KvferryError: the model cannot be loaded, an address cannot be bound, a setting is wrong.
    """
    clock: Clock = SystemClock()
    begun = clock.monotonic()
    stop = asyncio.Event()
    failures: list[BaseException] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def fail(error: BaseException) -> None:
        failures.append(error)
        stop.set()

    loading = asyncio.create_task(asyncio.to_thread(load_model, config.engine))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        return 0
    model = loading.result()
    units: list[WorkerUnit] = []
    try:
        for place in places:
            unit = await _start_unit(config, place, model, clock, fail)
            units.append(unit)  # one by one, so that those that did start are stopped if the next one fails
        announce({"event": "listening", **_addresses(units)})
        for unit in units:
            await unit.warm_up()
        # What was loaded stays; without this each collection of garbage would look at all of it again.
        gc.collect()
        gc.freeze()
        announce({"event": "ready", "seconds": round(clock.monotonic() - begun, 3), "dtype": model.dtype})
        await stopping
    finally:
        await asyncio.gather(*(unit.stop(0 if failures else config.drain_seconds) for unit in units))
    if failures:
        sys.stderr.write(f"kvferry worker: stopped, {failures[0]}\n")
        return 1
    return 0


async def _start_unit(
    config: WorkerConfig, place: UnitPlace, model: LoadedModel, clock: Clock, fail: Callable[[BaseException], None]
) -> WorkerUnit:
    incarnation = new_incarnation()
    setup = TransportSetup(
        listen_host=place.listen.rpartition(":")[0].strip("[]"),
        advertise_host=config.advertise_host,
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
