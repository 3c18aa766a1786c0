"""Scripted workers with a fleet and a dispatcher, for gateway tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from harness.fakes.byte_model import NAME
from harness.fakes.scripted_worker import ScriptedWorker, ScriptedWorkers
from kvferry.core.clock import SystemClock
from kvferry.gateway.decide.config import DispatchConfig, Endpoint, FleetConfig
from kvferry.gateway.dispatch.dispatcher import Dispatcher
from kvferry.gateway.dispatch.routing_parts import Routing, build_routing
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.observe.instruments import GatewayInstruments


def fleet_config(workers: ScriptedWorkers, status_timeout_seconds: float = 2.0) -> FleetConfig:
    """Create the fleet configuration for these workers, with a short poll interval, so that changes are detected
    quickly."""

    def endpoints(group: list[ScriptedWorker]) -> tuple[Endpoint, ...]:
        return tuple(Endpoint.parse(worker.address) for worker in group)

    return FleetConfig(
        prefill=endpoints(workers.prefill),
        decode=endpoints(workers.decode),
        both=endpoints(workers.both),
        status_interval_seconds=0.02,
        status_timeout_seconds=status_timeout_seconds,
        max_backoff_seconds=0.1,
        stalled_polls=3,
    )


@dataclass
class ScriptedFleet:
    """A gateway's fleet and dispatcher, without its servers, and scripted workers."""

    workers: ScriptedWorkers
    fleet: Fleet
    dispatcher: Dispatcher
    routing: Routing
    instruments: GatewayInstruments
    slept: list[float] = field(default_factory=list)
    """Duration in seconds of each wait between attempts."""

    async def idle(self) -> None:
        """Return when no stream is open and no clean-up is in flight.

        Raises:
            TimeoutError: a stream or a clean-up task leaked.
            AssertionError: the gateway's counters are inconsistent.
        """
        async with asyncio.timeout(10):
            await self.dispatcher.wait_idle()
        await self.workers.idle()
        assert self.routing.commitments.count == 0
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
    """Start the workers, wait until the fleet has polled all of them, and check for leaks at the end."""
    async with ScriptedWorkers(prefill=prefill, decode=decode, both=both) as workers:
        fleet = Fleet(fleet_config(workers, status_timeout_seconds), NAME, clock=SystemClock())
        instruments = GatewayInstruments()
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            # Instead of sleeping, wait until every worker has been polled again.
            slept.append(seconds)
            seen = fleet.num_polls
            await fleet.wait_until(lambda f: f.num_polls > seen + len(workers.all))

        dispatching = config or DispatchConfig()
        routing = build_routing(fleet, SystemClock(), dispatching, instruments)
        dispatcher = Dispatcher(
            fleet,
            SystemClock(),
            dispatching,
            routing=routing,
            sleep=sleep,
        )
        fleet.start()
        try:
            await fleet.wait_until(lambda f: all(view.takes_work for view in f.views()))
            scripted = ScriptedFleet(workers, fleet, dispatcher, routing, instruments, slept)
            yield scripted
            await scripted.idle()
        finally:
            await fleet.stop()
