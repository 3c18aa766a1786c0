"""The pure flow controller: processor time per request, with and without a queue.

    make bench-flow                        rows appended to tests/bench/results/flow.csv
    make bench-flow ARGS="--dry"           no rows

gate       `pass` in the whole gateway: also metrics, and the count of the prompt's tokens
pass       a request that is admitted at once: quota check, queue, dispatch, end; its tenant has quotas
queued     the same while many requests of many tenants wait: one enters the queue, one leaves it, one ends
refused    a request while the queue is full of requests of its class
shed       a request that displaces one of a lower class from the full queue

Times are processor time of the thread, since other processes share the machine; each is the minimum of five runs.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.errors import Overloaded
from kvferry.core.ids import RequestId
from kvferry.gateway.admission.flow_gate import FlowGate
from kvferry.gateway.admission.tenants import Tenants
from kvferry.gateway.decide.config import FleetConfig, FlowConfig
from kvferry.gateway.decide.flow.capacity import Room
from kvferry.gateway.decide.flow.controller import FlowController, QueueBounds
from kvferry.gateway.decide.flow.fair_queue import QueueEntry
from kvferry.gateway.decide.flow.quotas import Quotas
from kvferry.gateway.decide.flow.tenant_table import TenantPolicy
from kvferry.gateway.fleet.fleet import Fleet
from kvferry.gateway.observe.instruments import GatewayInstruments
from kvferry.serving.admission import RequestSize
from kvferry.serving.request import Caller

RESULTS = Path(__file__).parent / "results" / "flow.csv"
_REQUESTS = 20_000
_RUNS = 5
_BOUNDS = QueueBounds(4096, 1 << 30)
_POLICY = TenantPolicy(requests_per_minute=1e9, tokens_per_minute=1e12, concurrent_requests=1 << 20)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    date: str
    commit: str
    cpu: str
    figure: str
    microseconds: float


def request(number: int, tenants: int, priority: int = 0) -> QueueEntry:
    """Return a new request of one of the tenants."""
    cost = float(100 + number % 900)
    return QueueEntry(f"t{number % tenants}", priority, cost, prefill_tokens=100, num_bytes=8000, deadline=1e9 + number)


def admit(controller: FlowController, quotas: Quotas, entry: QueueEntry, now: float) -> None:
    """Check, charge and queue a request, as the gateway does."""
    quotas.check(entry.tenant, _POLICY, entry.cost, now)
    controller.make_room(entry, _BOUNDS, now)
    controller.submit(entry, now)
    quotas.begin(entry.tenant, entry.cost)


def finish(controller: FlowController, quotas: Quotas, entry: QueueEntry) -> None:
    """End a dispatched request."""
    controller.prefilled(entry, 100)
    controller.finish(entry, entry.cost + 7)
    quotas.end(entry.tenant, entry.cost, entry.cost + 7)


def passing(tenants: int) -> None:
    """Time requests that are admitted at once."""
    controller, quotas, room = FlowController(_BOUNDS), Quotas(), Room(100, 1 << 20, 100)
    for number in range(_REQUESTS):
        entry = request(number, tenants)
        admit(controller, quotas, entry, number * 1e-3)
        controller.dispatch(room, number * 1e-3)
        finish(controller, quotas, entry)


def filled(tenants: int, priority: int = 0, size: int = _BOUNDS.requests - 1) -> tuple[FlowController, Quotas]:
    """Return a controller with a queue."""
    controller, quotas = FlowController(_BOUNDS), Quotas()
    for number in range(size):
        admit(controller, quotas, request(number, tenants, priority), 0.0)
    return controller, quotas


def timed(work: Callable[[], None]) -> float:
    """Return the processor time of `work` in seconds."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def queued(tenants: int) -> float:
    """Time requests that enter and leave a long queue."""
    controller, quotas = filled(tenants)
    room = Room(1, 1 << 40, 1 << 20)

    def work() -> None:
        for number in range(_REQUESTS):
            admit(controller, quotas, request(number, tenants), number * 1e-3)
            (entry,) = controller.dispatch(room, number * 1e-3)
            finish(controller, quotas, entry)

    return timed(work)


def refused() -> float:
    """Time requests that are refused because the queue is full."""
    controller, quotas = filled(100, size=_BOUNDS.requests)

    def work() -> None:
        for number in range(_REQUESTS):
            try:
                admit(controller, quotas, request(number, 100), number * 1e-3)
            except Overloaded:
                continue

    return timed(work)


def shed() -> float:
    """Time requests that displace requests of a lower class from a full queue."""
    controller, quotas = filled(100, priority=0, size=_BOUNDS.requests)

    def work() -> None:
        for number in range(_REQUESTS):
            # Each request displaces the newest of the lowest class, which the fillers or earlier rounds queued.
            admit(controller, quotas, request(number, 100, priority=-1 - number // 4000), number * 1e-3)

    return timed(work)


def through_the_gate() -> float:
    """Time requests that pass the gate of a gateway and generate 10 tokens each."""

    async def run() -> float:
        gate = FlowGate(
            Fleet(FleetConfig(), "bench", clock=SystemClock()),
            SystemClock(),
            FlowConfig(),
            _tenants(),
            GatewayInstruments(),
        )
        caller = Caller(RequestId("bench"), arrived=gate._clock.monotonic())
        work = RequestSize(caller, [range(1000)], num_samples=1, num_running=1, max_tokens=10)
        started = time.thread_time()
        for _ in range(_REQUESTS):
            async with gate.enter(work) as slot:
                for _ in range(10):
                    slot.record_tokens(0, 1)
                slot.record_usage(0, 500)
        return time.thread_time() - started

    return asyncio.run(run())


def _tenants() -> Tenants:
    return Tenants.load(None, None, SystemClock())


def measure() -> Iterator[tuple[str, float]]:
    """Yield each figure and its time per request in microseconds."""

    def best(work: Callable[[], float]) -> float:
        return 1e6 * min(work() for _ in range(_RUNS)) / _REQUESTS

    yield "gate", best(through_the_gate)
    for tenants in (1, 100):
        yield f"pass, {tenants} tenants", best(lambda tenants=tenants: timed(lambda: passing(tenants)))  # type: ignore[misc]
    for tenants in (1, 100, 2000):
        yield f"queued, {tenants} tenants", best(lambda tenants=tenants: queued(tenants))  # type: ignore[misc]
    yield "refused", best(refused)
    yield "shed", best(shed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="append no rows")
    arguments = parser.parse_args()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [Row(date, commit(), cpu_name(), figure, round(value, 2)) for figure, value in measure()]
    for row in rows:
        print(f"{row.figure:<28}{row.microseconds:>9.2f} us per request")
    if not arguments.dry:
        append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
