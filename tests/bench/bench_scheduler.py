"""Time to plan and record a step, without a model: by number of running and waiting requests, for each policy.

    make bench-scheduler                    rows appended to tests/bench/results/scheduler.csv

plan    `schedule` of a step in which all running sequences decode, with others waiting for a place in the batch
admit   `schedule` of a step that admits all sequences at once
update  `update` with one token for each running sequence
"""

import argparse
import os
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.machine import cpu_name

from kvferry.bench.commit import commit
from kvferry.bench.rows import append_csv
from kvferry.core.clock import SystemClock
from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.blocks.allocation import Allocator
from kvferry.engine.schedule.blocks.block_pool import BlockPool
from kvferry.engine.schedule.blocks.prefix_index import PrefixIndex
from kvferry.engine.schedule.plan.scheduler import Scheduler
from kvferry.engine.schedule.policies.policy import POLICIES
from kvferry.engine.schedule.step.sequence import Sequence
from kvferry.engine.schedule.step.sequence_request import SequenceRequest
from kvferry.engine.schedule.step.step import SequenceOutput, StepPlan, StepResult

RESULTS = Path(__file__).parent / "results" / "scheduler.csv"
BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
NUM_ADMISSIONS = 7
"""Number of schedulers whose first step is measured."""
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of one run, a row of the CSV file."""

    date: str
    commit: str
    cpu: str
    scheduling: str
    cell: str
    running: int
    waiting: int
    median_ms: float
    min_ms: float
    max_ms: float
    load_average: float


class Rig:
    """A scheduler with requests."""

    def __init__(self, scheduling: str, *, running: int, waiting: int) -> None:
        index = PrefixIndex()
        pool = BlockPool((running + 8) * 64, on_reuse=index.forget)
        limits = SchedulerLimits(
            token_budget=1 << 20, max_chunk_tokens=1 << 20, max_num_seqs=running, scheduling=scheduling
        )
        self.scheduler = Scheduler(limits, Allocator(pool, index, block_tokens=BLOCK_TOKENS))
        namer = BlockNamers(b"bench").of("", fingerprint=b"layout", block_tokens=BLOCK_TOKENS)
        for number in range(running + waiting):
            tokens = [number, *range(1, PROMPT_TOKENS + number % 32)]
            sampling = SamplingParams(temperature=0.0)
            request = SequenceRequest(RequestId(f"r{number}"), len(tokens), sampling, namer, 800, frozenset())
            self.scheduler.add(Sequence(request, tokens))

    def record(self, plan: StepPlan) -> None:
        tokens = (SampledToken(7),)
        self.scheduler.update(
            plan, StepResult({s.request_id: SequenceOutput(tokens, s.num_scheduled) for s in plan.scheduled})
        )


def measure(scheduling: str, running: int, waiting: int, repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"admit": [], "plan": [], "update": []}
    for _ in range(NUM_ADMISSIONS):
        rig = Rig(scheduling, running=running, waiting=waiting)
        begun = CLOCK.monotonic()
        plan = rig.scheduler.schedule()
        found["admit"].append(CLOCK.monotonic() - begun)
    rig.record(plan)
    for _ in range(repetitions):
        begun = CLOCK.monotonic()
        plan = rig.scheduler.schedule()
        found["plan"].append(CLOCK.monotonic() - begun)
        assert len(plan.scheduled) == running
        begun = CLOCK.monotonic()
        rig.record(plan)
        found["update"].append(CLOCK.monotonic() - begun)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=200)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for scheduling in POLICIES:
        for running, waiting in ((256, 0), (256, 1000), (256, 10_000)):
            for cell, seconds in measure(scheduling, running, waiting, arguments.repetitions).items():
                low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
                date = datetime.now(UTC).isoformat(timespec="seconds")
                load = os.getloadavg()[0]
                rows.append(
                    Row(date, commit(), cpu_name(), scheduling, cell, running, waiting, middle, low, high, load)
                )
                counts = f"{running:4} running {waiting:6} waiting"
                print(f"{scheduling:10} {counts}  {cell:7} {middle:7.3f} ms, least {low:.3f}")
    append_csv(RESULTS, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
