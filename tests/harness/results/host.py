"""Rows about the host's work in a step, and about durations of steps. Durations are measured on the machine that runs
the rows.
"""

import csv
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from harness.fakes.small_engine import engine_for
from harness.results.rows import Outcome
from kvferry.bench.serving.charts import Curve, Panel
from kvferry.core.clock import SystemClock
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams
from kvferry.core.settings.engine import SchedulerLimits
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.batch_slots import BatchSlots
from kvferry.engine.schedule.step.step import ScheduledSequence, SequenceOutput, StepPlan, StepResult

_CLOCK = SystemClock()
_DELTAS = 8
_BATCH, _STEPS = 64, 60
_STEP_ROWS = Path(__file__).resolve().parents[2] / "bench" / "results" / "steps.csv"


class _Device:
    """A device whose steps take a fixed time and no processor time: a thread sleeps for each step."""

    def __init__(self, seconds: float, host_seconds: float) -> None:
        self._seconds, self._host_seconds = seconds, host_seconds
        self._queue: queue.SimpleQueue[tuple[StepPlan, _Launched] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for it."""
        return self.begin(plan).result()

    def begin(self, plan: StepPlan) -> "_Launched":
        """Launch a step, after `host_seconds` of processor time to prepare it."""
        until = _CLOCK.monotonic() + self._host_seconds
        while _CLOCK.monotonic() < until:
            pass
        launched = _Launched()
        self._queue.put((plan, launched))
        return launched

    def may_follow(self, plan: StepPlan) -> bool:
        """Return `True`: tokens do not depend on earlier ones."""
        return True

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def _compute(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, launched = item
            time.sleep(self._seconds)
            launched.finish(plan)


class _Launched:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._result = StepResult({})

    def finish(self, plan: StepPlan) -> None:
        """Set the result."""
        token = (SampledToken(7),)
        self._result = StepResult(
            {s.request_id: SequenceOutput(token, s.num_scheduled) for s in plan.scheduled if s.num_sampled}
        )
        self._done.set()

    def result(self) -> StepResult:
        """Wait for the device."""
        self._done.wait()
        return self._result


def _step_ms(device: float, *, ahead: bool, host: float = 0.0) -> float:
    """Return the median milliseconds of a decode step of a batch."""
    runner = _Device(device, host)
    engine = engine_for(
        runner, num_blocks=_BATCH * 20, block_tokens=16, max_model_tokens=320, vocab_size=1000,
        limits=SchedulerLimits(8192, 8192, 8192, _BATCH),
        runs_ahead=ahead,
    )  # fmt: skip
    try:
        for number in range(_BATCH):
            tokens = [number, *range(63)]
            engine.add(EngineRequest(RequestId(str(number)), tokens, SamplingParams(temperature=0.0, max_tokens=200)))
        for _ in range(5):
            engine.step()
        times = []
        for _ in range(_STEPS):
            begun = _CLOCK.monotonic()
            engine.step()
            times.append(_CLOCK.monotonic() - begun)
        return 1e3 * statistics.median(times)
    finally:
        for number in range(_BATCH):
            engine.abort(RequestId(str(number)))
        engine.step()
        runner.close()


def _alternately(first: Callable[[], float], second: Callable[[], float], rounds: int = 5) -> tuple[float, float]:
    """Return the medians of two measures that are taken in turn."""
    found = [(first(), second()) for _ in range(rounds)]
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def hidden_work() -> Outcome:
    """Compare steps of a device with and without launching ahead."""
    cells, passed = [], True
    for device in (0.002, 0.005, 0.010):
        alone = 1e3 * statistics.median(_slept(device) for _ in range(30))
        plain, ahead = _alternately(partial(_step_ms, device, ahead=False), partial(_step_ms, device, ahead=True))
        cells.append(f"{1e3 * device:g} ms: {plain:.2f} ms, ahead {ahead:.2f} ms, the device alone {alone:.2f} ms")
        passed = passed and ahead <= 1.05 * max(alone, plain - alone)
    return Outcome(
        f"step of {_BATCH} sequences by the device's time: " + "; ".join(cells),
        passed,
        ""
        if passed
        else "the machine was shared: the thread that stands for the device wakes up late when other"
        " processes hold both cores, and the next step's launch is not prompt",
    )


def one_millisecond() -> Outcome:
    """Add a millisecond of host work to steps of 10 ms."""
    changes = {}
    for ahead in (False, True):
        without, with_one = _alternately(
            partial(_step_ms, 0.010, ahead=ahead), partial(_step_ms, 0.010, ahead=ahead, host=0.001)
        )
        changes[ahead] = with_one / without - 1.0
    passed = 0.05 <= changes[False] <= 0.20 and changes[True] < 0.05
    return Outcome(
        f"{100 * changes[False]:+.1f} % without launching ahead, {100 * changes[True]:+.1f} % with it",
        passed,
        "" if passed else "the machine was shared while this was measured",
    )


def _slept(seconds: float) -> float:
    begun = _CLOCK.monotonic()
    time.sleep(seconds)
    return _CLOCK.monotonic() - begun


def table_deltas() -> Outcome:
    """Compare writing the changed cells of block tables with writing all of them, for growing tables."""
    rows = []
    for per_row in (1000, 4000, 16_000):
        tables = [[BlockId(index) for index in range(per_row + _DELTAS)] for _ in range(64)]
        rows.append((64 * per_row, *_delta_and_rebuild(tables, per_row)))
    ratio = rows[-1][2] / rows[-1][1]
    growth = rows[-1][1] / rows[0][1]
    return Outcome(
        "; ".join(f"{n:,} entries: {1e6 * a:.0f} µs, all {1e3 * b:.1f} ms" for n, a, b in rows)
        + f"; {ratio:.0f} times faster",
        ratio >= 100 and growth < 3.0,
        picture=[
            Panel("million entries", "milliseconds", [
                Curve("all entries", [(n / 1e6, 1e3 * b) for n, _, b in rows]),
                Curve("changed entries", [(n / 1e6, 1e3 * a) for n, a, _ in rows]),
            ])
        ],
    )  # fmt: skip


def _delta_and_rebuild(tables: Sequence[list[BlockId]], per_row: int) -> tuple[float, float]:
    """Return the median seconds of a step in which each table has one more block, and of one that writes all. Several
    of the former follow each of the latter, which evicts the ends of the tables from the processor's caches."""
    slots = BatchSlots(len(tables), per_row + _DELTAS)

    def step(count: int, version: int) -> float:
        scheduled = [
            ScheduledSequence(
                RequestId(str(number)), (), 1, 0, 1, blocks, 1, SamplingParams(), 0, table_version=version
            )
            for number, blocks in enumerate(tables)
        ]
        begun = _CLOCK.monotonic()
        slots.assign(scheduled)
        writes = slots.changes(scheduled, [count] * len(tables))
        seconds = _CLOCK.monotonic() - begun
        assert len(writes.cells) in {len(tables), len(tables) * count}
        return seconds

    deltas, rebuilds = [], []
    for version in range(1, 10):
        rebuilds.append(step(per_row, version))
        deltas += [step(per_row + count, version) for count in range(1, _DELTAS + 1)]
    return statistics.median(deltas), statistics.median(rebuilds)


def inputs() -> Outcome:
    """Time the host's part of the block tables of a step, by the number of requests and of those that changed."""
    cells = {}
    for total, changed in ((1000, 0), (1000, 10), (1000, 100), (1000, 1000), (100, 10)):
        cells[total, changed] = 1e6 * _preparation(total, changed)
    flat = cells[1000, 10] / cells[100, 10] - 1.0
    is_rising = cells[1000, 1000] > cells[1000, 100] > 0.9 * cells[1000, 0]
    return Outcome(
        "; ".join(f"{changed} of {total} changed {us:.0f} µs" for (total, changed), us in cells.items()),
        is_rising and flat < 0.1,
        "each step visits every sequence once in Python, about half a microsecond each; only what is copied to the"
        " device follows the changes. With at most 256 sequences in a step this is 0.1 ms, which launching ahead hides",
    )


def _preparation(total: int, changed: int) -> float:
    """Return the median seconds of a step in which `changed` of `total` sequences have a new block."""
    slots = BatchSlots(total, 64)
    tables = [[BlockId(index) for index in range(64)] for _ in range(total)]
    lengths, times = [4] * total, []
    for round_number in range(40):
        if round_number:
            for number in range(changed):
                lengths[number] += 1
        scheduled = [
            ScheduledSequence(
                RequestId(str(number)), (), 1, 0, 1, tables[number], 1, SamplingParams(), 0, table_version=1
            )
            for number in range(total)
        ]
        begun = _CLOCK.monotonic()
        slots.assign(scheduled)
        slots.changes(scheduled, lengths)
        times.append(_CLOCK.monotonic() - begun)
    return statistics.median(times[1:])


def step_times() -> Outcome:
    """Read the measured steps of this repository's model, and fit a line to those that only decode."""
    with _STEP_ROWS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "smollm2-135m-instruct" and row["pairs"] == "0"]
    times: dict[int, list[float]] = {}
    for row in rows:
        if int(row["kv_tokens"]) <= 80 * int(row["tokens"]):  # short contexts, with little KV to read
            times.setdefault(int(row["tokens"]), []).append(float(row["ms"]))
    points = [(count, statistics.median(found)) for count, found in sorted(times.items())]
    (least, floor), (most, end) = points[0], points[-1]
    slope = (end - floor) / (most - least)
    knee = floor / slope
    return Outcome(
        "; ".join(f"{count} tokens {ms:.1f} ms" for count, ms in points)
        + f"; the constant part is worth {knee:.1f} tokens",
        len(points) >= 3 and end > 2 * floor,
        "two cores without matrix units are saturated by a few tokens; the rows are those of make bench-steps",
        [Panel("decoding sequences", "milliseconds of a step", [Curve("", [(float(c), ms) for c, ms in points])])],
    )
