"""Scripted workers with a gateway's fleet and dispatcher in front, as most gateway tests want them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvferry.core.clock import SystemClock
from kvferry.gateway.config import DispatchConfig, Endpoint, FleetConfig
from kvferry.gateway.dispatch import Dispatcher
from kvferry.gateway.fleet import Fleet
from kvferry.gateway.instruments import Instruments
from kvferry.testing.byte_model import NAME
from kvferry.testing.scripted_worker import ScriptedWorker, ScriptedWorkers


def fleet_config(workers: ScriptedWorkers, status_timeout_seconds: float = 2.0) -> FleetConfig:
    """The configuration that names these workers; quick looks, so that tests see changes at once."""

    def endpoints(group: list[ScriptedWorker]) -> tuple[Endpoint, ...]:
        return tuple(Endpoint.parse(worker.address) for worker in group)

    return FleetConfig(
        prefill=endpoints(workers.prefill),
        decode=endpoints(workers.decode),
        both=endpoints(workers.both),
        status_interval_seconds=0.02,
        status_timeout_seconds=status_timeout_seconds,
        max_backoff_seconds=0.1,
    )


@dataclass
class ScriptedFleet:
    """Everything below a gateway's edge."""

    workers: ScriptedWorkers
    fleet: Fleet
    dispatcher: Dispatcher
    instruments: Instruments
    slept: list[float] = field(default_factory=list)
    """What the dispatcher waited between attempts, seconds."""

    async def idle(self) -> None:
        """Return when nothing is open or owed anywhere.

        Raises:
            TimeoutError: something leaked.
            AssertionError: the gateway's own counts disagree.
        """
        async with asyncio.timeout(10):
            await self.dispatcher.wait_idle()
        await self.workers.idle()
        assert [view.in_flight for view in self.fleet.views()] == [0] * len(self.workers.all)


@asynccontextmanager
async def scripted_fleet(
    *,
    prefill: int = 0,
    decode: int = 0,
    both: int = 0,
    config: DispatchConfig | None = None,
    status_timeout_seconds: float = 2.0,
) -> AsyncIterator[ScriptedFleet]:
    """Start the workers, wait until the fleet has seen all of them, and check at the end that nothing leaked."""
    async with ScriptedWorkers(prefill=prefill, decode=decode, both=both) as workers:
        fleet = Fleet(fleet_config(workers, status_timeout_seconds), NAME)
        instruments = Instruments()
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            # Not at all for real: until every worker's state was looked at once more.
            slept.append(seconds)
            seen = fleet.num_looks
            await fleet.wait_until(lambda f: f.num_looks > seen + len(workers.all))

        dispatcher = Dispatcher(
            fleet,
            SystemClock(),
            config or DispatchConfig(),
            instruments=instruments,
            sleep=sleep,
        )
        fleet.start()
        try:
            await fleet.wait_until(lambda f: all(view.takes_work for view in f.views()))
            scripted = ScriptedFleet(workers, fleet, dispatcher, instruments, slept)
            yield scripted
            await scripted.idle()
        finally:
            await fleet.stop()
