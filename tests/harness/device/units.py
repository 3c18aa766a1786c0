"""Worker units in this process, on an event loop of their own, with any kind of pages."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.servers.worker_channel import TEST_KEYS
from kvferry.core.clock import SystemClock
from kvferry.core.ids import new_incarnation
from kvferry.core.settings.engine import EngineSettings
from kvferry.engine.build import EnginePages, LoadedModel, load_model
from kvferry.engine.execute.run.runner import Runner
from kvferry.kv.interface.connector import PageMemory
from kvferry.kv.interface.mirror import PageMirror
from kvferry.kv.pricing.price import LoadPolicy
from kvferry.workers.build import UnitEndpoint
from kvferry.workers.config import WorkerConfig
from kvferry.workers.unit import WorkerUnit

SECONDS = 60.0
T = TypeVar("T")
MakePages = Callable[[LoadedModel, PageMemory], EnginePages]


@dataclass(frozen=True)
class RunningUnit:
    """A ready worker unit."""

    unit: WorkerUnit
    address: str
    admin: str

    @property
    def runner(self) -> Runner:
        """The runner of the engine."""
        return self.unit.parts.pages.runner

    @property
    def mirror(self) -> PageMirror:
        """The mirror of the engine's pages."""
        return self.unit.parts.pages.mirror


@contextmanager
def worker_units(
    make_pages: MakePages,
    *roles: str,
    connector: str,
    engine: dict[str, object] | None = None,
    failures: list[BaseException] | None = None,
    **settings: object,
) -> Iterator[list[RunningUnit]]:
    """Yield a ready worker of the tiny model for each role; they share the weights.

    Args:
        failures: takes the errors of engines; without it, engines must not fail.
    """
    may_fail = failures is not None
    failures = [] if failures is None else failures
    chosen = {
        "model": "tiny",
        "dtype": "float32",
        "threads": 1,
        "kv_memory": 4 << 20,
        "load_policy": LoadPolicy.ALWAYS,
        **(engine or {}),
    }
    loaded = load_model(EngineSettings(**chosen))  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="units")
    thread.start()

    def run(task: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(task, loop).result(SECONDS)

    async def start(role: str) -> RunningUnit:
        config = WorkerConfig(
            role,
            loaded.settings,
            connector=connector,
            ticket_secrets=(TEST_KEYS["KVFERRY_TICKET_KEY"].encode(),),
            tenant_key=TEST_KEYS["KVFERRY_TENANT_KEY"].encode(),
            **settings,  # type: ignore[arg-type]
        )
        endpoint = UnitEndpoint(role, "127.0.0.1:0", "127.0.0.1:0")
        unit = await WorkerUnit.start(
            config,
            endpoint,
            loaded,
            incarnation=new_incarnation(),
            clock=SystemClock(),
            on_failure=failures.append,
            make_pages=make_pages,
        )
        await unit.warm_up()
        return RunningUnit(unit, unit.context.address, unit.admin_address)

    units: list[RunningUnit] = []
    try:
        for role in roles:
            units.append(run(start(role)))  # noqa: PERF401  those that have started are stopped if one fails
        yield units
        assert may_fail or not failures
    finally:
        for one in units:
            run(one.unit.stop(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()
